"""What readers of text give: documents in one buffer, and what became of all others.

    texts      P a r i s r o m e O s l o      UTF-8, one after the other
    offsets    0         5       9       13   where each text begins, then the end
    documents  0         1               3    the first text of each document, then their number

A JSON string is a document of one text, a list of strings one of so many: "Paris", ["rome", "Oslo"]. A text may be
empty, and is kept: what has no tokens is no sequence, and only who tokenises knows that.

Which documents are wanted; each one that is not is counted under the first reason that drops it.

keep        a field equals one of some values; a string as it is, anything else as JSON (3, true)
characters  Unicode code points of all texts of the document, of the first key
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, redacted


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


@dataclass(frozen=True)
class Filters:
    """What a document must have.

    Args:
        min_characters, max_characters: bounds, both of them allowed; None: no upper one.
        keep: field -> the values that are wanted; all fields must match.
    """

    min_characters: int = 0
    max_characters: int | None = None
    keep: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        most = self.max_characters
        if self.min_characters < 0 or (most is not None and most < self.min_characters):
            raise ConfigError(
                f"characters: found {self.min_characters} to {most}, needed 0 or more, and no less after it"
            )

    @property
    def fields(self) -> list[str]:
        return list(self.keep)

    def wanted(self, batch: Batch, fields: Sequence[Strings]) -> tuple[NDArray[np.bool_], Counter[str]]:
        """Which documents stay, shape (d,), and how many go for which reason.

        Args:
            fields: of the documents, in the order of `self.fields`.
        """
        stay, dropped = np.ones(batch.num_documents, np.bool_), Counter[str]()
        for reason, good in self._judged(batch, fields):
            gone = int((stay & ~good).sum())
            stay &= good
            if gone:
                dropped[reason] += gone
        return stay, dropped

    def _judged(self, batch: Batch, fields: Sequence[Strings]) -> Iterable[tuple[str, NDArray[np.bool_]]]:
        for (name, values), column in zip(self.keep.items(), fields, strict=True):
            yield f"keep {name}", _is_one_of(column, values)
        if self.min_characters or self.max_characters is not None:
            count = characters(batch)
            yield "min characters", count >= self.min_characters
            if self.max_characters is not None:
                yield "max characters", count <= self.max_characters


def parse_keep(texts: Iterable[str]) -> dict[str, list[str]]:
    """`["lang=en", "lang=de", "ok=true"]` -> {"lang": ["en", "de"], "ok": ["true"]}.

    Raises:
        ConfigError: one without = or a name.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"keep: found {text!r}, needed FIELD=VALUE")
        found.setdefault(name, []).append(value)
    return found


def characters(batch: Batch) -> NDArray[np.int64]:
    """Code points of each document, shape (d,): bytes that begin one."""
    begun = np.concatenate([[0], np.cumsum((batch.texts & 0xC0) != 0x80, dtype=np.int64)])
    return np.diff(begun[batch.offsets[batch.documents]])


def only(batch: Batch, stay: NDArray[np.bool_], dropped: Counter[str]) -> Batch:
    """The batch without the documents that do not stay, which are counted as dropped."""
    texts = np.repeat(stay, np.diff(batch.documents))
    counts, lengths = np.diff(batch.documents)[stay], np.diff(batch.offsets)[texts]
    return batch.with_counts(
        texts=_runs(batch.texts, batch.offsets, texts),
        offsets=_bounds(lengths),
        documents=_bounds(counts),
        rows=batch.rows[stay],
        places=batch.places[stay],
        dropped=batch.dropped + dropped,
    )


def only_strings(column: Strings, stay: NDArray[np.bool_]) -> Strings:
    """The same of a column."""
    lengths = np.diff(column.offsets)[stay]
    return Strings(_runs(column.bytes, column.offsets, stay), _bounds(lengths), column.present[stay])


def _runs(data: NDArray[np.uint8], bounds: NDArray[np.int64], stay: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The bytes of the items that stay: neighbours are copied together."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], stay, [False]]))).reshape(-1, 2)
    parts = [data[bounds[first] : bounds[last]] for first, last in edges.tolist()]
    return np.concatenate([data[:0], *parts])


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _is_one_of(column: Strings, values: Sequence[str]) -> NDArray[np.bool_]:
    data, bounds, wanted = column.bytes.tobytes(), column.offsets.tolist(), {each.encode() for each in values}
    found = (here and data[bounds[i] : bounds[i + 1]] in wanted for i, here in enumerate(column.present.tolist()))
    return np.fromiter(found, np.bool_, len(column))
