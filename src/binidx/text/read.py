"""A slice as batches of documents: the one entry for all formats.

for text, title in read_slice(piece, ["text", "title"]):     one Batch for each key
    for problem in text.problems: ...                        said once: it is the same list in both
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from binidx.text.batch import Batch
from binidx.text.jsonl import read_jsonl
from binidx.text.slices import Slice

BATCH_BYTES = 4 << 20
MAX_LINE_BYTES = 256 << 20


def read_slice(
    piece: Slice,
    keys: Sequence[str] = ("text",),
    *,
    id_key: str | None = None,
    batch_bytes: int = BATCH_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Batch, ...]]:
    """The documents of a slice in order, and the rows that are none.

    Args:
        keys: of the texts.
        id_key: a field to give along, if it is there.
        batch_bytes: plain bytes of a batch, about; a longer line has one of its own.
        max_line_bytes: what a line and its newline may have.

    Returns:
        A batch for each key, in their order.

    Raises:
        ObjectChangedError: the object is not the one that was planned.
        FormatError: it cannot be decompressed, or is no parquet file with these columns.
        StorageError: it cannot be read.
    """
    return read_jsonl(piece, keys, id_key, batch_bytes, max_line_bytes, storage_options)
