"""Batches: documents of one key in one buffer, and the rows that are not documents.

    texts      P a r i s r o m e O s l o      UTF-8, one text after the other
    offsets    0         5       9       13   start of each text, then the end
    documents  0         1               3    first text of each document, then the number of texts

A JSON string is a document of one text, a list of strings a document of several: "Paris", ["rome", "Oslo"]. An empty
text stays in its batch: only the tokenizer decides whether it becomes a sequence.

`Filters` drop documents by field values and by length; a dropped document counts under the first reason that applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from binidx.errors import ConfigError, redacted


@dataclass(frozen=True)
class Problem:
    """Row that is not a document.

    Attributes:
        kind: one of PROBLEMS_BY_KIND.
        uri: of the input.
        row: number of the row, counted as in `Batch.rows`.
        byte: position of the row, as in `Batch.positions`.
        where: location for messages: "line 18, byte 2034"; "byte 2034" if the line number is unknown; "row 17".
        detail: description of the found value.
        line: bytes of the line, for the quarantine file; empty for Parquet and for lines that are too long.
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


PROBLEMS_BY_KIND = {
    "malformed": "the line is not JSON, as Python's json.loads reads it, or the row is not CSV",
    "not utf-8": "the line is not UTF-8",
    "not an object": "the line is JSON, but not an object",
    "missing key": "the object lacks one of the keys",
    "null": "the text is null",
    "not text": "the value is neither a string nor a list of strings",
    "not extracted": "the record of a WARC file is a page as it was fetched, not the text of one",
    "lone surrogate": "the string cannot be encoded in UTF-8",
    "too long": "the line is longer than the limit",
    "damaged": "the rows of a Parquet file from here to the end of their row group, or all, cannot be read",
}
"""Kind of a Problem -> its meaning."""


def cumulative_offsets(lengths: ArrayLike) -> NDArray[np.int64]:
    """Return the start of each of n adjacent items of these lengths, then the end of the last, shape (n + 1,)."""
    lengths = np.asarray(lengths, np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def select_items(
    data: NDArray[Any], bounds: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the chosen ones of adjacent items, and their bounds; neighbours are copied together.

    Args:
        data: values of all n items.
        bounds: start of each item in `data`, then the end of the last, shape (n + 1,).
        chosen: mask of shape (n,).
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]))).reshape(-1, 2)
    runs = (data[bounds[first] : bounds[last]] for first, last in edges.tolist())
    return np.concatenate([data[:0], *runs]), cumulative_offsets(np.diff(bounds)[chosen])


def join_texts(texts: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of all n texts joined; and the start of each text, then the end, shape (n + 1,)."""
    return np.frombuffer(b"".join(texts), np.uint8), cumulative_offsets(list(map(len, texts)))


Value = bytes | None


@dataclass(frozen=True)
class Strings:
    """Column of strings, some of which may be absent.

    Attributes:
        bytes: UTF-8, one string after the other, uint8.
        offsets: start of each string, then the end, shape (d + 1,) int64.
        present: shape (d,) bool; an absent string has no bytes.
    """

    bytes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    present: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.present)

    def values(self) -> list[Value]:
        """Return the bytes of each string, None if absent; in a binary column of Parquet they need not be UTF-8."""
        data, bounds = self.bytes.tobytes(), pairwise(self.offsets.tolist())
        rows = zip(bounds, self.present.tolist(), strict=True)
        return [data[start:stop] if present else None for (start, stop), present in rows]

    def tolist(self) -> list[str | None]:
        """Return the strings as Python strings, None for absent ones."""
        return [None if value is None else value.decode() for value in self.values()]

    def select(self, chosen: NDArray[np.bool_]) -> Strings:
        """Return the chosen strings; `chosen` is a mask of shape (d,)."""
        return Strings(*select_items(self.bytes, self.offsets, chosen), self.present[chosen])


@dataclass(frozen=True)
class Batch:
    """Documents of one key, in the order of their input.

    The batches of several keys hold the same documents: a row that is not a document for one key is not one for any.
    The attributes after `documents` describe the rows and are equal in all of these batches.

    Attributes:
        key: JSON key, or Parquet column, of the texts.
        texts: UTF-8, one text after the other, uint8.
        offsets: start of each text, then the end, shape (n + 1,) int64.
        documents: first text of each document, then n, shape (d + 1,) int64.
        rows: number of each document's line or row in the slice, blank lines included, shape (d,) int64. Add
            `Slice.first_row`, if it is known, for the number in the file.
        positions: shape (d,) int64: plain byte of the file at which the line begins; in Parquet the row in its group.
        ids: values of the field `id_key`, if one was given: a string as it is, any other value as JSON.
        problems: rows that are not documents.
        dropped: reason -> number of rows: "blank line", and the reasons of `Filters`.
        num_rows: number of rows read: documents + problems + dropped.
        num_bytes: stored bytes read for this batch, to measure progress.
    """

    key: str
    texts: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    ids: Strings | None = None
    problems: Sequence[Problem] = ()
    dropped: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_bytes: int = 0

    @property
    def num_documents(self) -> int:
        """Number of documents, d."""
        return len(self.rows)

    def text(self, number: int) -> str:
        """Return the text of a number, from 0 to n - 1."""
        return bytes(self.texts[self.offsets[number] : self.offsets[number + 1]]).decode()

    def document_bytes(self, document: int) -> bytes:
        """Return the UTF-8 bytes of all texts of a document, without separators."""
        first, last = self.documents[document : document + 2]
        return self.texts[self.offsets[first] : self.offsets[last]].tobytes()

    def select(self, chosen: NDArray[np.bool_]) -> Batch:
        """Return the documents of the mask `chosen`, shape (d,), with the problems and counts of the whole batch."""
        if chosen.all():
            return self
        texts, offsets = select_items(self.texts, self.offsets, np.repeat(chosen, np.diff(self.documents)))
        return replace(
            self,
            texts=texts,
            offsets=offsets,
            documents=cumulative_offsets(np.diff(self.documents)[chosen]),
            rows=self.rows[chosen],
            positions=self.positions[chosen],
            ids=None if self.ids is None else self.ids.select(chosen),
        )


def check_limits(names: str, least: int, most: int | None) -> None:
    """Raise ConfigError unless 0 <= least <= most; None for no upper bound.

    Args:
        names: names of both bounds, for the message.
        least, most: bounds, inclusive.
    """
    if least < 0 or (most is not None and most < least):
        raise ConfigError(
            f"{names}: not a range (found {least}, {most}, need 0 or more, and the maximum not below the minimum)"
        )


@dataclass(frozen=True)
class Filters:
    """Conditions on documents.

    Args:
        min_characters, max_characters: bounds of the document's code points, inclusive; None: no upper bound.
        keep: field -> accepted values, a string as it is, any other value as JSON; all fields must match.
    """

    min_characters: int = 0
    max_characters: int | None = None
    keep: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_limits("min_characters, max_characters", self.min_characters, self.max_characters)

    def apply(self, batch: Batch, fields: Sequence[Strings]) -> tuple[NDArray[np.bool_], Counter[str]]:
        """Return which documents pass, shape (d,), and the number of dropped ones by reason.

        Args:
            fields: column of each field of `keep`, in its order.
        """
        passed, dropped = np.ones(batch.num_documents, np.bool_), Counter[str]()
        for reason, accepted in self._conditions(batch, fields):
            dropped[reason] += int((passed & ~accepted).sum())
            passed &= accepted
        return passed, +dropped  # without reasons that dropped no document

    def _conditions(self, batch: Batch, fields: Sequence[Strings]) -> Iterable[tuple[str, NDArray[np.bool_]]]:
        for (name, values), column in zip(self.keep.items(), fields, strict=True):
            accepted = {value.encode() for value in values}
            yield f"keep {name}", np.array([value in accepted for value in column.values()], np.bool_)
        if self.min_characters or self.max_characters is not None:
            count = count_characters(batch)
            yield "min characters", count >= self.min_characters
            if self.max_characters is not None:
                yield "max characters", count <= self.max_characters


def parse_keep(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parse `["lang=en", "lang=de", "ok=true"]` to {"lang": ["en", "de"], "ok": ["true"]}.

    Raises:
        ConfigError: a text without = or without a name.
    """
    conditions: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"keep: not a condition (found {text!r}, need FIELD=VALUE)")
        conditions.setdefault(name, []).append(value)
    return conditions


def count_characters(batch: Batch) -> NDArray[np.int64]:
    """Return the number of code points of each document, shape (d,): it counts the bytes that begin a character."""
    begun = cumulative_offsets((batch.texts & 0xC0) != 0x80)
    return np.diff(begun[batch.offsets[batch.documents]])
