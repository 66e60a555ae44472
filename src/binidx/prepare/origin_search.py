"""The documents of a dataset by where they came from: a row of a file, or an id. The way back from `origins`.

Read are the columns that are compared, of all row groups; by a row, of those whose rows may be it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ObjectNotFoundError
from binidx.format.sidecars import LINEAGE
from binidx.prepare.finished import Options
from binidx.prepare.lineage import invalid_named
from binidx.storage.backends import open_object

Mask = NDArray[np.bool_]


def documents_with_id(prefix: str, wanted: str, options: Options = None) -> list[int]:
    """The numbers of the documents that had this id, rising.

    Raises:
        ObjectNotFoundError: the dataset has no lineage.
        FormatError: it is none.
    """
    return _search(prefix, ["id"], lambda table: _equal(table["id"], wanted), options)


def documents_at(prefix: str, file: str, row: int, options: Options = None) -> list[int]:
    """The numbers of the documents of a row of a file, rising; the file by its URI or the end of it from a slash on.

    Raises:
        ObjectNotFoundError: the dataset has no lineage.
        FormatError: it is none.
    """

    def matches(table: Any) -> Mask:
        source = table["source"].combine_chunks()
        names = [name == file or name.endswith(f"/{file}") for name in source.dictionary.to_pylist()]
        mine: Mask = np.array([*names, False])[source.indices.fill_null(len(names)).to_numpy()]
        return mine & _equal(table["row"], row)

    return _search(prefix, ["source", "row"], matches, options, row)


def _search(
    prefix: str, columns: Sequence[str], matches: Callable[[Any], Mask], options: Options, row: int | None = None
) -> list[int]:
    from binidx.prepare.preprocess.lineage import SCHEMA, open_rows

    uri, found, first = prefix + LINEAGE, list[int](), 0
    with invalid_named(uri):
        try:
            file = open_rows(open_object(uri, storage_options=options, cache=False))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"{uri}: not there; binidx preprocess writes it beside a dataset") from error
        about, number = file.metadata, SCHEMA.get_field_index("row")
        for group in range(about.num_row_groups):
            told = about.row_group(group).column(number).statistics
            if row is None or not (told and told.has_min_max) or told.min <= row <= told.max:
                found += (first + np.flatnonzero(matches(file.read_row_group(group, [*columns])))).tolist()
            first += about.row_group(group).num_rows
    return found


def _equal(column: Any, value: Any) -> Mask:
    import pyarrow.compute as compute

    found: Mask = compute.equal(column, value).combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
    return found
