"""Origins of documents: find the lineage rows of documents, and the documents of a row of a file or of an id.

Only the needed row groups are read: for documents those that hold their rows, for a row those whose statistics include
it, and only the columns that are compared.
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
    """Return source, row, byte, id and hash of documents, by document number; empty if there is no lineage.

    Reads the footer, and one row group for each run of documents: about 6 MB of a quarter of a million rows.

    Raises:
        FormatError: the lineage is not valid, or has no such row.
        MissingDriverError: there is a lineage, and pyarrow is not installed.
    """
    uri = prefix + LINEAGE
    if not len(documents) or not object_exists(uri, options):
        return {}
    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    wanted = np.unique(np.array(documents, np.int64))
    with lineage_errors(uri):
        found = open_lineage(open_object(uri, storage_options=options, cache=False))
        metadata, rows = found.metadata, dict[int, dict[str, Any]]()
        if wanted[-1] >= metadata.num_rows:
            raise FormatError(f"{uri}: {metadata.num_rows} rows, needed one for document {wanted[-1]}")
        firsts = np.cumsum([0, *(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))])
        for group in np.unique(np.searchsorted(firsts, wanted, "right") - 1).tolist():
            here = wanted[(wanted >= firsts[group]) & (wanted < firsts[group + 1])]
            table = found.read_row_group(group).take(here - firsts[group]).cast(SCHEMA)
            rows.update(zip(here.tolist(), table.to_pylist(), strict=True))
    return rows


def origin_text(origin: dict[str, Any]) -> str:
    """Return a text such as `s3://text/en.jsonl row 17, byte 2,034, id "a"`."""
    byte = f", byte {origin['byte']:,}" if origin["byte"] is not None else ""
    name = f', id "{origin["id"]}"' if origin["id"] is not None else ""
    return f"{origin['source']} row {origin['row']:,}{byte}{name}"


Mask = NDArray[np.bool_]


def documents_with_id(prefix: str, wanted: str, options: Options = None) -> list[int]:
    """Return the numbers of the documents with an id, ascending.

    Raises:
        ObjectNotFoundError: the dataset has no lineage.
        FormatError: the lineage is not valid.
    """
    return _search(prefix, ["id"], lambda table: _equal(table["id"], wanted), options)


def documents_at(prefix: str, file: str, row: int, options: Options = None) -> list[int]:
    """Return the numbers of the documents of one row of a file, ascending.

    Args:
        file: URI of the file, or its end after a slash.

    Raises:
        ObjectNotFoundError: the dataset has no lineage.
        FormatError: the lineage is not valid.
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
            raise ObjectNotFoundError(f"{uri}: not found; binidx preprocess writes it beside a dataset") from error
        metadata, number = file.metadata, SCHEMA.get_field_index("row")
        for group in range(metadata.num_row_groups):
            bounds = metadata.row_group(group).column(number).statistics
            if row is None or not (bounds and bounds.has_min_max) or bounds.min <= row <= bounds.max:
                found += (first + np.flatnonzero(matches(file.read_row_group(group, [*columns])))).tolist()
            first += metadata.row_group(group).num_rows
    return found


def _equal(column: Any, value: Any) -> Mask:
    import pyarrow.compute as compute

    found: Mask = compute.equal(column, value).combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
    return found
