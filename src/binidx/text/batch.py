"""What readers of text give: documents in one buffer, and what became of all others.

    texts      P a r i s r o m e O s l o      UTF-8, one after the other
    offsets    0         5       9       13   where each text begins, then the end
    documents  0         1               3    the first text of each document, then their number

A JSON string is a document of one text, a list of strings one of so many: "Paris", ["rome", "Oslo"]. A text may be
empty, and is kept: what has no tokens is no sequence, and only who tokenises knows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.redacted import redacted


@dataclass(frozen=True)
class Problem:
    """A row that is no document.

    Attributes:
        kind: one of KINDS.
        uri: of the input.
        row: its number, counted as in `Batch.rows`.
        byte: as in `Batch.places`.
        where: for people: "line 18, byte 2034"; "byte 2034" where nobody has counted the lines; "row 17" in parquet.
        detail: what was found, in words.
        line: the bytes of the line, for a quarantine; empty where there are none (parquet, a line that is too long).
    """

    kind: str
    uri: str
    row: int
    byte: int
    where: str
    detail: str
    line: bytes = b""

    def __str__(self) -> str:
        return f"{redacted(self.uri)}: {self.where}: {self.kind}: {self.detail}"


KINDS = {
    "malformed": "the line is not JSON, as Python's json.loads reads it",
    "not utf-8": "the line is not UTF-8",
    "not an object": "the line is JSON, but no object",
    "missing key": "one of the keys is not there",
    "null": "the text is null",
    "not text": "it is neither a string nor a list of strings",
    "lone surrogate": "a string that no UTF-8 can say",
    "too long": "the line is longer than the limit",
}
"""kind of a Problem -> what it means"""


@dataclass(frozen=True)
class Strings:
    """A column of strings that may be absent.

    Attributes:
        bytes: UTF-8, one after the other, uint8.
        offsets: where each begins, then the end, shape (d + 1,) int64.
        present: shape (d,) bool; what is absent has no bytes.
    """

    bytes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    present: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.present)

    def tolist(self) -> list[str | None]:
        data, bounds = self.bytes.tobytes(), self.offsets.tolist()
        return [
            data[bounds[i] : bounds[i + 1]].decode() if here else None for i, here in enumerate(self.present.tolist())
        ]


@dataclass(frozen=True)
class Batch:
    """Documents of one key, in the order of their input.

    The batches of several keys have the same documents: a row that is none for one key is none for all. What follows
    `documents` is said of the rows, and so is the same object in all of them; count it once.

    Attributes:
        key: of the JSON object, or column.
        texts: UTF-8, one text after the other, uint8.
        offsets: where each text begins, then the end, shape (n + 1,) int64.
        documents: first text of each document, then n, shape (d + 1,) int64.
        rows: of each document, shape (d,) int64: the number of its line or row in the slice, blank ones counted. Add
            `Slice.first_row`, where that is known, to have it in the file.
        places: shape (d,) int64: the byte at which the line begins in the plain bytes of the file; in parquet the row
            in its row group.
        ids: of the field `id_key`, if one was asked for: a string as it is, any other value as JSON.
        problems: rows that are no documents.
        dropped: reason -> rows: "blank line", and those of `Filters`.
        num_rows: rows that were read for it: documents + problems + dropped.
        num_bytes: of the slice that were read for it, as they are stored; for progress.
    """

    key: str
    texts: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    ids: Strings | None = None
    problems: Sequence[Problem] = ()
    dropped: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_bytes: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.rows)

    def text(self, number: int) -> str:
        """One of the texts."""
        return bytes(self.texts[self.offsets[number] : self.offsets[number + 1]]).decode()

    def with_counts(self, **counts: Any) -> Batch:
        return replace(self, **counts)
