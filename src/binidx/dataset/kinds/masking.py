"""Which tokens of a sample are hidden, and what stands in their place: whole words or pieces, singly or in n-grams.

    tokens       cls  un  ##aff ##able  the  sep        of WordPiece: a "##" carries the word on
    words              ───────────────  ───             or each piece for itself
    order        words by a shuffle; each draws the n of its n-gram, and takes fewer words where n would hide too many,
                 none where one word does or one is hidden already; until enough tokens are hidden

Every number is drawn from one `RandomState`, in Megatron Core's order, so that its samples are equal. It is three times
slower than this for a choice of n from a list of probabilities, which is one number and its place in their sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError

MISSING, BEGINS, CONTINUES, SPECIAL = range(4)


"""What a token is to masking: not in the vocabulary, first piece of a word, a later one, or never hidden."""


GEOMETRIC = 0.2


"""SpanBERT's share of n-grams that end with each word (https://arxiv.org/abs/1907.10529, section 3.1)."""


Span = tuple[list[int], list[int]]


"""Positions of the tokens of an n-gram, and what they were."""


Ngrams = Iterator[tuple[int, int]]


"""First place of each in `Words.positions`, and the end."""


class Vocabulary:
    """What masking asks of a WordPiece tokenizer.

    Args:
        tokenizer: gives `inv_vocab` (id -> piece), `cls` and `sep`.

    Attributes:
        ids: all ids, in the order of `inv_vocab`.
    """

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.inv_vocab
        self.ids: list[int] = list(pieces)
        special = [tokenizer.cls, tokenizer.sep]
        if min(self.ids, default=0) < 0:
            raise ConfigError(f"tokenizer: found id {min(self.ids)} in inv_vocab, needs 0 and more")
        self._kinds = np.zeros(max([*self.ids, *special]) + 1, np.uint8)
        self._kinds[self.ids] = [CONTINUES if piece.startswith("##") else BEGINS for piece in pieces.values()]
        self._kinds[special] = SPECIAL

    def kinds(self, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What each token is, shape (n,).

        Raises:
            FormatError: one is not in the vocabulary.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self._kinds):
            raise _unknown(tokens[(tokens < 0) | (tokens >= len(self._kinds))][0])
        kinds: NDArray[np.uint8] = self._kinds[tokens]
        if not kinds.all():
            raise _unknown(tokens[kinds == MISSING][0])
        return kinds


def _unknown(token: int) -> FormatError:
    return FormatError(f"token {token}: not in the tokenizer's inv_vocab; needs the tokenizer that the data is of")


@dataclass(frozen=True)
class Words:
    """The words of a sample that may be hidden.

    Attributes:
        positions: of their tokens, in order; neighbours but for special tokens between.
        bounds: for each word its first place in `positions`, then the end, shape (num_words + 1,).
    """

    positions: list[int]
    bounds: list[int]

    @classmethod
    def of(cls, kinds: NDArray[np.uint8], whole: bool) -> Words:
        """`whole` words, or each token one. Pieces before the first word's beginning are one word."""
        maskable = np.flatnonzero(kinds != SPECIAL)
        begins = kinds[maskable] == BEGINS if whole else np.ones(len(maskable), np.bool_)
        begins[:1] = True
        return cls(maskable.tolist(), [*np.flatnonzero(begins).tolist(), len(maskable)])

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass
class Masked:
    """A sample with some of its tokens hidden.

    Attributes:
        tokens: the sample as the model sees it.
        labels: (position, original token) of the hidden ones; then of the permuted ones, the token before they moved.
        spans: each n-gram that was hidden, in the order of the text.
    """

    tokens: list[int]
    labels: list[tuple[int, int]]
    spans: list[Span]


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen. See `MaskedWordPieceDatasetConfig` for the options."""

    probability: float
    max_ngram: int
    whole_words: bool
    permutation: bool
    longer_ngrams: bool
    geometric: bool

    def mask(
        self,
        tokens: NDArray[np.int64],
        kinds: NDArray[np.uint8],
        target: int,
        rng: RandomState,
        token_mask: Callable[[RandomState], int | None],
    ) -> Masked:
        """Hide some of `tokens`.

        Args:
            kinds: what each of them is, from `Vocabulary.kinds`.
            target: tokens that the sample aimed at: no more than `probability` of them are hidden.
            rng: all draws are of it.
            token_mask: draws what stands in the place of a hidden token; None for itself.
        """
        words = Words.of(kinds, self.whole_words)
        most = min(self.probability * target, max(1, round(len(tokens) * self.probability)))
        order = np.arange(len(words))
        rng.shuffle(order)
        taken = bytearray(len(words.positions))
        masked = Masked(tokens.tolist(), [], [])
        self._hide(masked, words, self._ngrams(words, order, most, taken, self._draw(rng)), rng, token_mask)
        rng.shuffle(order)
        if self.permutation:
            self._permute(masked, words, self._ngrams(words, order, most, taken, self._drawn_by_chance(rng)), rng)
        masked.labels.sort(key=lambda label: label[0])
        masked.spans.sort(key=lambda span: span[0][0])
        return masked

    def _ngrams(
        self, words: Words, order: NDArray[np.int64], most: float, taken: bytearray, draw: Callable[[], int]
    ) -> Ngrams:
        """N-grams of which no token is taken, until `most` tokens are; takes them."""
        bounds, num_words, num_tokens = words.bounds, len(words), 0
        for word in order.tolist():
            if num_tokens >= most:
                return
            first, n = bounds[word], draw()
            while n and num_tokens + bounds[min(word + n, num_words)] - first > most:
                n -= 1
            end = bounds[min(word + n, num_words)]
            if n and not any(taken[first:end]):
                taken[first:end] = b"\1" * (end - first)
                num_tokens += end - first
                yield first, end

    @staticmethod
    def _hide(
        masked: Masked, words: Words, ngrams: Ngrams, rng: RandomState, token_mask: Callable[[RandomState], int | None]
    ) -> None:
        for first, end in ngrams:
            positions = words.positions[first:end]
            originals = [masked.tokens[position] for position in positions]
            for position in positions:
                mask = token_mask(rng)
                if mask is not None:
                    masked.tokens[position] = mask
            masked.labels += zip(positions, originals, strict=True)
            masked.spans.append((positions, originals))

    @staticmethod
    def _permute(masked: Masked, words: Words, ngrams: Ngrams, rng: RandomState) -> None:
        places = [place for first, end in ngrams for place in range(first, end)]
        positions = np.array(sorted(words.positions[place] for place in places), np.int64)
        moved = positions.copy()
        rng.shuffle(moved)
        before = list(masked.tokens)
        for position, source in zip(positions.tolist(), moved.tolist(), strict=True):
            masked.tokens[position] = before[source]
            masked.labels.append((position, before[position]))

    def _draw(self, rng: RandomState) -> Callable[[], int]:
        """The n of the next n-gram to be hidden."""
        if self.geometric:
            return lambda: min(int(rng.geometric(GEOMETRIC)), self.max_ngram)
        return self._drawn_by_chance(rng)

    def _drawn_by_chance(self, rng: RandomState) -> Callable[[], int]:
        """As `rng.choice(1 .. max_ngram, p=chances)`."""
        sums, draw = self._sums, rng.random_sample
        return lambda: bisect_right(sums, draw()) + 1

    @cached_property
    def _sums(self) -> list[float]:
        """The chance that n is at most 1, 2, ...: those of n are as 1 / n, or the other way round."""
        chances = 1.0 / np.arange(1, self.max_ngram + 1)
        chances = chances / chances.sum(keepdims=True)
        chances = chances[::-1] if self.longer_ngrams else chances
        # Summed and divided as often as Megatron and NumPy do: the last bits count.
        sums = (chances / chances.sum(keepdims=True)).cumsum()
        return [float(each) for each in sums / sums[-1]]


_spare: list[RandomState] = []


@contextmanager
def random_state(seed: int) -> Iterator[RandomState]:
    """`RandomState(seed)` for a block. They are used again: NumPy takes 140 us to make one, and 3 to seed it."""
    try:
        rng = _spare.pop()
    except IndexError:
        rng = RandomState()
    rng.seed(seed)
    try:
        yield rng
    finally:
        _spare.append(rng)


def join(sentences: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """The tokens of sentences, one after the other."""
    return np.concatenate([np.empty(0, np.int64), *sentences]).astype(np.int64, copy=False)
