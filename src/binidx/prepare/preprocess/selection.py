"""Documents of a batch left out after they were tokenised: too short, too long, or with a special token in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.preprocess.record import SPECIAL, Counts
from binidx.text.batch import Batch, Problem, Strings
from binidx.text.slices import PARQUET, Slice
from binidx.tokenize.spec import TokenizerSpec
from binidx.tokenize.specials import find_specials, find_unknown

MIN_TOKENS, MAX_TOKENS, EMPTY = "min tokens", "max tokens", "empty"
"""Reasons to drop a row, besides those of `text`."""


@dataclass(frozen=True)
class Tokenised:
    """A batch of one key and the ids of its texts, `ids[offsets[i]:offsets[i + 1]]` those of text i."""

    batch: Batch
    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of each document, shape (num_documents,)."""
        found: NDArray[np.int64] = np.diff(self.offsets[self.batch.documents])
        return found

    def text(self, document: int) -> bytes:
        """All texts of a document."""
        first, last = self.batch.documents[document : document + 2]
        return self.batch.texts[self.batch.offsets[first] : self.batch.offsets[last]].tobytes()

    def per_document(self, of_texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of something over the texts of each document."""
        sums = np.zeros(len(of_texts) + 1, np.int64)
        np.cumsum(of_texts, out=sums[1:])
        found: NDArray[np.int64] = np.diff(sums[self.batch.documents])
        return found

    def select(self, wanted: NDArray[np.bool_]) -> Tokenised:
        """Some of the documents, in their order; their texts are not brought along."""
        if wanted.all():
            return self
        texts = np.repeat(wanted, np.diff(self.batch.documents))
        lengths = np.diff(self.offsets)
        ids = self.ids[np.repeat(texts, lengths)]
        batch = replace(
            self.batch,
            texts=self.batch.texts[:0],
            offsets=np.zeros(1, np.int64),
            documents=_bounds(np.diff(self.batch.documents)[wanted]),
            rows=self.batch.rows[wanted],
            places=self.batch.places[wanted],
            ids=None if self.batch.ids is None else select_strings(self.batch.ids, wanted),
        )
        return Tokenised(batch, ids, _bounds(lengths[texts]))


def total_lengths(found: Sequence[Tokenised]) -> NDArray[np.int64]:
    """Ids of each document in all keys together, shape (num_documents,)."""
    total: NDArray[np.int64] = np.sum([each.lengths for each in found], axis=0)
    return total


def within(found: Sequence[Tokenised], least: int | None, most: int | None, counts: Counts) -> list[Tokenised]:
    """Documents that have so many tokens in all keys together; the others are counted."""
    if least is None and most is None:
        return list(found)
    lengths = total_lengths(found)
    short = lengths < (0 if least is None else least)
    long = ~short & (lengths > (np.iinfo(np.int64).max if most is None else most))
    counts.drop({MIN_TOKENS: int(short.sum()), MAX_TOKENS: int(long.sum())})
    return [each.select(~(short | long)) for each in found]


def without_empty(found: Sequence[Tokenised], counts: Counts) -> list[Tokenised]:
    """Documents that have a token in any key; the others are counted."""
    full = total_lengths(found) > 0
    counts.drop({EMPTY: int((~full).sum())})
    return [each.select(full) for each in found]


def without_specials(
    piece: Slice, found: Sequence[Tokenised], tokenizer: TokenizerSpec
) -> tuple[list[Problem], list[Tokenised]]:
    """Documents with a special token in their text as problems, and the others."""
    each_has = [
        each.per_document(
            find_specials(each.ids, each.offsets, tokenizer)
            + find_unknown(each.batch.texts, each.batch.offsets, tokenizer)
        )
        for each in found
    ]
    counts: NDArray[np.int64] = np.sum(each_has, axis=0)
    first = found[0].batch
    problems = [
        Problem(
            SPECIAL,
            piece.uri,
            int(first.rows[number]),
            int(first.places[number]),
            f"row {first.rows[number]}" if piece.format == PARQUET else f"byte {first.places[number]}",
            f"{counts[number]} of them in its text",
            b"\n".join(each.text(number) for each in found),
        )
        for number in np.flatnonzero(counts).tolist()
    ]
    return problems, [each.select(counts == 0) for each in found]


def select_strings(strings: Strings, wanted: NDArray[np.bool_]) -> Strings:
    """Some of them."""
    lengths = np.diff(strings.offsets)
    data = strings.bytes[strings.offsets[0] : strings.offsets[-1]][np.repeat(wanted, lengths)]
    return Strings(data, _bounds(lengths[wanted]), strings.present[wanted])


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
