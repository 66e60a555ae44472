"""GPT samples with the middle moved to the end, so that a model learns to fill it in.

    a segment        def area(r): return 3.14 * r * r         between two EODs
    cut at random    prefix         middle       suffix       at two characters
    PSM              <pre> prefix <suf> suffix <mid> middle
    SPM              <pre> <suf> suffix <mid> prefix middle

Each segment is decoded, cut and encoded again, so a sample comes out longer or shorter: it is cut off at its length, or
filled with pads.

Cost: tokenizing, some 100 us a sample and more; the reading stays one vectored read for a batch.

Source: Megatron-LM, `GPTFIMDataset`. There a dataset draws from one RandomState, so a sample depends on all that were
read before it, on the number of workers, and on where the run was resumed. Here the draws of a sample are a function of
(seed, its number); given the same draws the sample is Megatron's. The extra token is read only where the config says
so, partial samples are padded, and tokens wider than the stored type stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError

Ids = NDArray[np.int64]


EXTRA_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """What samples with the middle at the end need to know besides.

    Args:
        fim_rate: share of segments that are cut; of those with `fim_split_sample`, share whose fragments may be.
        fim_spm_rate: share of the cut ones that begin with the suffix.
        fim_extra_tokens: the tokenizer's tokens for "prefix", "middle", "suffix", "pad" and "eod".
        fim_split_sample: a token at which segments fall into fragments, each cut by itself: files of a repository.
        fim_fragment_rate: share of fragments that are cut; must be given with `fim_split_sample`.
        fim_no_prefix: text that keeps what begins with it from being cut.

    The tokenizer, or its `_tokenizer`, has `tokens_to_ids`, `ids_to_text` and `text_to_ids`.

    Raises:
        ConfigError: a rate outside 0 to 1, tokens that are missing, or `inter_document_masking`, since the bounds of
            documents move with the cuts.
    """

    fim_rate: float | None = None
    fim_spm_rate: float | None = None
    fim_extra_tokens: Mapping[str, str] | None = None
    fim_split_sample: str | None = None
    fim_fragment_rate: float | None = None
    fim_no_prefix: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = ["fim_rate", "fim_spm_rate", *(["fim_fragment_rate"] if self.fim_split_sample else [])]
        for name in rates:
            rate = getattr(self, name)
            if rate is None or not 0 <= rate <= 1:
                raise ConfigError(f"{name}: found {rate}, needs 0 to 1")
        if missing := [name for name in EXTRA_TOKENS if name not in (self.fim_extra_tokens or {})]:
            raise ConfigError(f"fim_extra_tokens: found no {', '.join(missing)}, needs {', '.join(EXTRA_TOKENS)}")
        if self.inter_document_masking:
            raise ConfigError("inter_document_masking: found True, the middle cannot be moved within bounds; leave it")


class GPTFIMDataset(GPTDataset):
    """GPT samples, their middles moved; keys, shapes and indices are those of `GPTDataset`.

    Raises:
        ConfigError: the tokenizer does not know one of the extra tokens, or cannot decode.
    """

    RECORDED_NAME: ClassVar[str] = "GPTFIMDataset"

    config: GPTFIMDatasetConfig
    config_class = GPTFIMDatasetConfig

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """The sample of its tokens, cut by the draws of its number."""
        number = (idx or 0) % len(self)
        draws = draws_of(self.config.random_seed, number)
        tokens = np.concatenate([np.empty(0, np.int64), *sequences]).astype(np.int64)
        return super().assemble(idx, [self.rearrangement(tokens, draws)])

    @cached_property
    def rearrangement(self) -> Rearrangement:
        """What the config asks to be done with the tokens of a sample."""
        return rearrangement_of(self.config)


def draws_of(seed: int, number: int) -> np.random.RandomState:
    """The randomness of one sample: MT19937 seeded by an array of the run's seed and the sample's number."""
    return np.random.RandomState([seed, number % 2**32, number >> 32])


def rearrangement_of(config: GPTFIMDatasetConfig) -> Rearrangement:
    tokenizer = getattr(config.tokenizer, "_tokenizer", config.tokenizer)
    for name in ("tokens_to_ids", "ids_to_text", "text_to_ids"):
        if not hasattr(tokenizer, name):
            raise ConfigError(f"{type(tokenizer).__name__}: has no {name}, cuts in the text need it; give Megatron's")
    named = cast(Mapping[str, str], config.fim_extra_tokens)
    ids = dict(zip(EXTRA_TOKENS, tokenizer.tokens_to_ids([named[name] for name in EXTRA_TOKENS]), strict=True))
    if unknown := [named[name] for name, token in ids.items() if token is None]:
        raise ConfigError(f"fim_extra_tokens: the tokenizer does not know {', '.join(unknown)}")
    return Rearrangement(
        **ids,
        rate=cast(float, config.fim_rate),
        spm_rate=cast(float, config.fim_spm_rate),
        split=None if config.fim_split_sample is None else _one_token(tokenizer, config.fim_split_sample),
        fragment_rate=config.fim_fragment_rate or 0.0,
        no_prefix=config.fim_no_prefix,
        decode=tokenizer.ids_to_text,
        encode=tokenizer.text_to_ids,
    )


def _one_token(tokenizer: Any, text: str) -> int:
    found = tokenizer.tokens_to_ids(text)
    ids = [found] if isinstance(found, int | np.integer) else list(found or [])
    if len(ids) != 1:
        raise ConfigError(f"fim_split_sample: {text!r} is {ids} to the tokenizer, needs one token")
    return int(ids[0])


@dataclass(frozen=True)
class Rearrangement:
    """Moves middles to the end: `self(tokens, draws)` are as many tokens as before.

    Args:
        prefix, middle, suffix, pad, eod: ids of the extra tokens.
        rate, spm_rate, split, fragment_rate, no_prefix: as in the config.
        decode, encode: ids to text and back.

    Of EODs that follow each other, or begin a sample, only the last of a segment stays: Megatron's rule.
    """

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    rate: float
    spm_rate: float
    split: int | None
    fragment_rate: float
    no_prefix: str | None
    decode: Callable[[Any], str]
    encode: Callable[[str], Sequence[int]]

    def __call__(self, tokens: Ids, draws: np.random.RandomState) -> Ids:
        moved = self._each_part(tokens, self.eod, lambda segment: self._segment(segment, draws))[: len(tokens)]
        return np.concatenate([moved, np.full(len(tokens) - len(moved), self.pad, np.int64)])

    def _segment(self, segment: Ids, draws: np.random.RandomState) -> Ids:
        if self.split is None or self.split not in segment:
            return self._cut(segment, self.rate, draws)
        if not draws.binomial(1, self.rate):
            return segment
        return self._each_part(segment, self.split, lambda part: self._cut(part, self.fragment_rate, draws))

    def _each_part(self, tokens: Ids, end: int, change: Callable[[Ids], Ids]) -> Ids:
        """Parts that end with a token, changed; empty ones go with their end, and only the last may be empty."""
        *whole, last = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        changed = [np.append(change(part[:-1]), end) for part in whole if len(part) > 1]
        return np.concatenate([*changed, change(last)])

    def _cut(self, tokens: Ids, rate: float, draws: np.random.RandomState) -> Ids:
        if not draws.binomial(1, rate):
            return tokens
        text = self.decode(tokens)
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return tokens
        first, second = sorted(draws.randint(low=0, high=len(text) + 1, size=2).tolist())
        before, between, after = (list(self.encode(part)) for part in (text[:first], text[first:second], text[second:]))
        if draws.binomial(1, self.spm_rate):
            order = [self.prefix, self.suffix, *after, self.middle, *before, *between]
        else:
            order = [self.prefix, *before, self.suffix, *after, self.middle, *between]
        return np.array(order, np.int64)
