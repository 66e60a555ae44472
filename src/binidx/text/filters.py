"""Which documents are wanted; each one that is not is counted under the first reason that drops it.

keep        a field equals one of some values; a string as it is, anything else as JSON (3, true)
characters  Unicode code points of all texts of the document, of the first key
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.text.batch import Batch, Strings


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
