"""Where single documents came from: their rows of the lineage, and of that only the row groups that hold them.

The documents of a dataset by where they came from: a row of a file, or an id. The way back from `origins`.

Read are the columns that are compared, of all row groups; by a row, of those whose rows may be it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.lineage_transfer import lineage_errors
from binidx.corpus.whole_dataset import Options
from binidx.errors import FormatError, ObjectNotFoundError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.storage.open import open_object
from binidx.storage.writing.publish import object_exists


def read_origins(prefix: str, documents: Sequence[int], options: Options = None) -> dict[int, dict[str, Any]]:
    """document -> its source, row, byte, id and hash; nothing where the dataset has no lineage.

    Price: the footer, and a row group for each run of documents: 6 MB or so of a quarter of a million rows.

    Raises:
        FormatError: there is no such row, or it is no lineage.
        MissingDriverError: there is lineage, and no pyarrow.
    """
    uri = prefix + LINEAGE
    if not len(documents) or not object_exists(uri, options):
        return {}
    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    wanted = np.unique(np.array(documents, np.int64))
    with lineage_errors(uri):
        found = open_lineage(open_object(uri, storage_options=options, cache=False))
        about, rows = found.metadata, dict[int, dict[str, Any]]()
        if wanted[-1] >= about.num_rows:
            raise FormatError(f"{uri}: {about.num_rows} rows, needed one for document {wanted[-1]}")
        firsts = np.cumsum([0, *(about.row_group(number).num_rows for number in range(about.num_row_groups))])
        for group in np.unique(np.searchsorted(firsts, wanted, "right") - 1).tolist():
            here = wanted[(wanted >= firsts[group]) & (wanted < firsts[group + 1])]
            table = found.read_row_group(group).take(here - firsts[group]).cast(SCHEMA)
            rows.update(zip(here.tolist(), table.to_pylist(), strict=True))
    return rows


def origin_text(origin: dict[str, Any]) -> str:
    """`s3://text/en.jsonl row 17, byte 2034, id "a"`."""
    byte = f", byte {origin['byte']:,}" if origin["byte"] is not None else ""
    name = f', id "{origin["id"]}"' if origin["id"] is not None else ""
    return f"{origin['source']} row {origin['row']:,}{byte}{name}"


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
    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    uri, found, first = prefix + LINEAGE, list[int](), 0
    with lineage_errors(uri):
        try:
            file = open_lineage(open_object(uri, storage_options=options, cache=False))
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
