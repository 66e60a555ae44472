"""Masking of tokens for BERT and T5: whole words or pieces of words, singly or in n-grams.

    tokens       cls  un  ##aff ##able  the  sep        WordPiece: "##" begins a piece that continues a word
    words              ───────────────  ───             or each piece for itself
    order        words in shuffled order; each draws the n of its n-gram, and takes fewer words where n would mask too
                 many tokens, none where one word does or a word is masked already; until enough tokens are masked

Every number is drawn from one `RandomState`, in Megatron Core's order, so that the samples are equal. Megatron Core
takes three times as long, mostly for drawing n from a list of probabilities; here that is a number and a binary search.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.config import BlendedMegatronDatasetConfig, check_given
from binidx.dataset.token_dataset import SampleAssemble
from binidx.errors import ConfigError, FormatError
from binidx.forks import cached_property
from binidx.order.sequences import SentenceOrder

logger = logging.getLogger(__name__)

MISSING, BEGINS, CONTINUES, SPECIAL = range(4)
"""Kinds of tokens: not in the vocabulary, first piece of a word, a later piece, or a special token, never masked."""

GEOMETRIC = 0.2
"""SpanBERT's probability that an n-gram ends with a word (https://arxiv.org/abs/1907.10529, section 3.1)."""

MaskedSpan = tuple[list[int], list[int]]
"""Positions of the tokens of an n-gram, and the original tokens."""

MaskedPredictions = tuple[list[int], list[int], list[int], list[int], list[tuple[list[int], list[int]]]]
"""Tokens as the model sees them; positions of the masked tokens; their original tokens; for each token 1 if a word or a
special token begins with it, else 0; positions and original tokens of each n-gram."""

Predict = Callable[[Sequence[int] | NDArray[Any], int, RandomState], MaskedPredictions]
"""Function that masks some of the tokens of a sample, given their target length and the source of all draws."""

Ngrams = Iterator[tuple[int, int]]
"""(start, stop) of n-grams in `Words.positions`."""


class Vocabulary:
    """Kinds of the tokens of a WordPiece tokenizer.

    Args:
        tokenizer: has `inv_vocab` (id -> piece), `cls` and `sep`.

    Attributes:
        ids: all ids, in the order of `inv_vocab`, which Hugging Face's fast tokenizers change in each process.

    Raises:
        ConfigError: a negative id.
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

    @cached_property
    def sorted_ids(self) -> list[int]:
        """All ids, increasing."""
        return sorted(self.ids)

    def kinds(self, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the kind of each token, shape (n,).

        Raises:
            FormatError: a token is not in the vocabulary.
        """
        inside = (tokens >= 0) & (tokens < len(self._kinds))
        kinds: NDArray[np.uint8] = np.where(inside, self._kinds[tokens * inside], MISSING)
        if not kinds.all():
            token = tokens[kinds == MISSING][0]
            raise FormatError(f"token {token}: not in the tokenizer's inv_vocab; use the tokenizer of the data")
        return kinds


@dataclass(frozen=True)
class Words:
    """The words of a sample that may be masked.

    Attributes:
        positions: positions of the words' tokens in the sample, in order; special tokens are left out.
        bounds: for each word its first index in `positions`, then the end, shape (num_words + 1,).
    """

    positions: list[int]
    bounds: list[int]

    @classmethod
    def split(cls, kinds: NDArray[np.uint8], whole: bool) -> Words:
        """Split a sample into words, or single tokens if not `whole`. Pieces before the first word form one word.

        Args:
            kinds: of each token, as `Vocabulary.kinds` returns them, shape (n,).
            whole: make words of whole words; else each token is a word.
        """
        maskable = np.flatnonzero(kinds != SPECIAL)
        begins = kinds[maskable] == BEGINS if whole else np.ones(len(maskable), np.bool_)
        begins[:1] = True
        return cls(maskable.tolist(), [*np.flatnonzero(begins).tolist(), len(maskable)])

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass
class MaskedTokens:
    """A sample with some of its tokens masked.

    Attributes:
        tokens: the sample as the model sees it.
        labels: (position, original token) of the masked and of the permuted tokens, in order.
        spans: each masked n-gram, in the order of the text.
    """

    tokens: list[int]
    labels: list[tuple[int, int]]
    spans: list[MaskedSpan]


@dataclass(frozen=True)
class Masking:
    """Choice of the masked tokens; the options are those of `MaskedWordPieceDatasetConfig`."""

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
    ) -> MaskedTokens:
        """Mask some of `tokens`.

        Args:
            tokens: shape (n,).
            kinds: kinds of the tokens, from `Vocabulary.kinds`, shape (n,).
            target: target length of the sample in tokens; at most a fraction `probability` of this length is masked.
            rng: source of all draws.
            token_mask: draws the replacement of a masked token; None keeps the token.
        """
        words = Words.split(kinds, self.whole_words)
        most = min(self.probability * target, max(1, round(len(tokens) * self.probability)))
        order = np.arange(len(words))
        rng.shuffle(order)
        taken = bytearray(len(words.positions))
        masked = MaskedTokens(tokens.tolist(), [], [])
        ngrams = self._ngrams(words, order, most, taken, self._draw(rng))
        self._mask(masked, words, ngrams, lambda: token_mask(rng))
        rng.shuffle(order)
        if self.permutation:
            self._permute(masked, words, self._ngrams(words, order, most, taken, self._draw_choice(rng)), rng)
        masked.labels.sort(key=lambda label: label[0])
        masked.spans.sort(key=lambda span: span[0][0])
        return masked

    def _ngrams(
        self, words: Words, order: NDArray[np.int64], most: float, taken: bytearray, draw: Callable[[], int]
    ) -> Ngrams:
        """Yield n-grams of tokens not marked in `taken`, and mark these, until `most` tokens are yielded."""
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
    def _mask(masked: MaskedTokens, words: Words, ngrams: Ngrams, draw_mask: Callable[[], int | None]) -> None:
        for first, end in ngrams:
            positions = words.positions[first:end]
            originals = [masked.tokens[position] for position in positions]
            for position in positions:
                if (mask := draw_mask()) is not None:
                    masked.tokens[position] = mask
            masked.labels += zip(positions, originals, strict=True)
            masked.spans.append((positions, originals))

    @staticmethod
    def _permute(masked: MaskedTokens, words: Words, ngrams: Ngrams, rng: RandomState) -> None:
        positions = np.array(sorted(chain.from_iterable(words.positions[slice(*ngram)] for ngram in ngrams)), np.int64)
        moved = positions.copy()
        rng.shuffle(moved)
        before = list(masked.tokens)
        for position, source in zip(positions.tolist(), moved.tolist(), strict=True):
            masked.tokens[position] = before[source]
            masked.labels.append((position, before[position]))

    def _draw(self, rng: RandomState) -> Callable[[], int]:
        """Return a function that draws the n of the next masked n-gram."""
        if self.geometric:
            return lambda: min(int(rng.geometric(GEOMETRIC)), self.max_ngram)
        return self._draw_choice(rng)

    def _draw_choice(self, rng: RandomState) -> Callable[[], int]:
        """Return a function that draws as `rng.choice(range(1, max_ngram + 1), p=probabilities)`."""
        sums, draw = self._sums, rng.random_sample
        return lambda: bisect_right(sums, draw()) + 1

    @cached_property
    def _sums(self) -> list[float]:
        """Cumulative probabilities of n = 1, 2, ..., which are proportional to 1 / n; reversed with `longer_ngrams`."""
        chances = 1.0 / np.arange(1, self.max_ngram + 1)
        chances = chances / chances.sum(keepdims=True)
        chances = chances[::-1] if self.longer_ngrams else chances
        # Summed and divided as often as in Megatron and NumPy, so that the last bits are equal.
        sums = (chances / chances.sum(keepdims=True)).cumsum()
        return [float(value) for value in sums / sums[-1]]


class _OneEach(threading.local):
    """A random generator for each thread: NumPy takes 140 us to make a generator, and 3 us to seed it again."""

    def __init__(self) -> None:
        self.rng = RandomState()


_ONE_EACH = _OneEach()


def random_state(seed: int) -> RandomState:
    """Return a generator equal to `RandomState(seed)`; the next call in this thread seeds the same object again."""
    rng = _ONE_EACH.rng
    rng.seed(seed)
    return rng


def concatenate_tokens(sentences: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the tokens of all sentences, one after the other, shape (n,), int64."""
    return np.concatenate([np.empty(0, np.int64), *sentences]).astype(np.int64, copy=False)


@dataclass(repr=False)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Config of masked samples: `BlendedMegatronDatasetConfig` and options of the masking, all required.

    Args:
        masking_probability: fraction of the tokens that are masked, above 0 and below 1.
        short_sequence_probability: fraction of the samples with a target length below `sequence_length`, 0 to 1.
        masking_max_ngram: number of words of the longest masked n-gram, at least 1.
        masking_do_full_word: mask whole words; False masks pieces.
        masking_do_permutation: also shuffle as many other tokens among themselves.
        masking_use_longer_ngrams: draw long n-grams more often than short ones.
        masking_use_geometric_distribution: draw n as SpanBERT does; excludes `masking_do_permutation`.

    The other arguments are those of `BlendedMegatronDatasetConfig`. The tokenizer is a WordPiece tokenizer with
    `inv_vocab` (id -> piece, where "##" begins a piece that continues a word), `cls`, `sep`, `mask`, `pad`.

    Raises:
        ConfigError: an option is missing, out of bounds, or excluded by another.

    Source: Megatron Core, `MaskedWordPieceDatasetConfig`. Difference: errors instead of assertions.
    """

    masking_probability: float | None = field(default=None, metadata=affects("samples"))
    short_sequence_probability: float | None = field(default=None, metadata=affects("order"))
    masking_max_ngram: int | None = field(default=None, metadata=affects("samples"))
    masking_do_full_word: bool | None = field(default=None, metadata=affects("samples"))
    masking_do_permutation: bool | None = field(default=None, metadata=affects("samples"))
    masking_use_longer_ngrams: bool | None = field(default=None, metadata=affects("samples"))
    masking_use_geometric_distribution: bool | None = field(default=None, metadata=affects("samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given(self, "masked samples", *MASKING, "tokenizer")
        check_option("masking_probability", self.masking_probability, lambda p: 0 < p < 1, "above 0 and below 1")
        check_option("short_sequence_probability", self.short_sequence_probability, lambda p: 0 <= p <= 1, "0 to 1")
        check_option("masking_max_ngram", self.masking_max_ngram, lambda n: n > 0, "at least 1")
        if self.masking_use_geometric_distribution and self.masking_do_permutation:
            raise ConfigError(
                "masking_use_geometric_distribution: excludes masking_do_permutation; give one or the other"
            )
        if self.masking_use_geometric_distribution and self.masking_use_longer_ngrams:
            logger.warning("masking_use_longer_ngrams: no effect with masking_use_geometric_distribution")

    @cached_property
    def masking(self) -> Masking:
        """The masking options as a `Masking`."""
        return Masking(*(getattr(self, name) for name in MASKING if name != "short_sequence_probability"))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the tokenizer, shared by all datasets of this config."""
        return Vocabulary(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # Each worker builds its own: 20 ms for 250,000 tokens, instead of 2 MB to send.
        return {name: value for name, value in vars(self).items() if name not in ("masking", "vocabulary")}


MASKING = [*MaskedWordPieceDatasetConfig.__annotations__]
"""Fields that are part of a dataset's identity, in the order that is hashed."""


def check_option(name: str, value: Any, holds: Callable[[Any], bool], needed: str) -> None:
    """Raise ConfigError unless `holds(value)`; the message has `needed`, the text of the bounds."""
    if not holds(value):
        raise ConfigError(f"{name}: found {value}, needs {needed}")


class MaskedAssemble(SampleAssemble):
    """Base of the functions that make samples of sentences with some of their tokens masked.

    Args:
        config: options of the masking and of the lengths.
        pad: id of pads.
        order: has the target length of each sample.
        predict: masks some of the tokens.
    """

    def __init__(self, config: Any, pad: int, order: SentenceOrder, predict: Predict) -> None:
        self.config, self.pad, self.order, self.predict = config, pad, order, predict

    def begin(self, number: int | None) -> tuple[int, RandomState]:
        """Return the target length of a sample in tokens, and its random state, a function of seed and number."""
        target = int(self.order.target_lengths(np.array([number or 0]))[0])
        return target, random_state((self.config.random_seed + (number or 0)) % 2**32)
