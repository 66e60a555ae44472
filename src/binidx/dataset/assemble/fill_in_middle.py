"""GPT samples with the middle of segments moved to the end (fill in the middle).

    a segment        def area(r): return 3.14 * r * r         between two EODs
    cut at random    prefix         middle       suffix       at two characters
    PSM              <pre> prefix <suf> suffix <mid> middle
    SPM              <pre> <suf> suffix <mid> prefix middle

Each segment is decoded, cut and encoded again, which changes its number of tokens; then the sample is truncated or
padded.

Cost: tokenizing, 100 us a sample and more; tokens are still read in one vectored read a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron_releases import Rule, follows
from binidx.dataset.token_dataset import SourceTokens
from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError

Ids = NDArray[np.int64]
EXTRA_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@runtime_checkable
class TokenizerWrapper(Protocol):
    """Megatron's wrapper of another tokenizer."""

    _tokenizer: Any


@dataclass(repr=False)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Config of fill-in-the-middle samples: `GPTDatasetConfig` and options of the cuts.

    Args:
        fim_rate: fraction of the segments (texts between two EODs) that are cut, 0 to 1; of segments with
            `fim_split_sample`, the fraction whose fragments may be cut. Required.
        fim_spm_rate: fraction of the cut segments in the order suffix, prefix, middle (SPM), 0 to 1; the other segments
            have the order prefix, suffix, middle (PSM). Required.
        fim_extra_tokens: the tokenizer's tokens for "prefix", "middle", "suffix", "pad" and "eod". Required.
        fim_split_sample: token that splits a segment into fragments, each cut by itself, such as files of a repository.
        fim_fragment_rate: fraction of the fragments that are cut, 0 to 1. Required with `fim_split_sample`.
        fim_no_prefix: text that begins with this prefix is not cut.

    The other arguments are those of `GPTDatasetConfig`. The tokenizer, or its `_tokenizer`, has `tokens_to_ids`,
    `ids_to_text` and `text_to_ids`.

    Raises:
        ConfigError: a rate outside 0 to 1, missing tokens, or `inter_document_masking`, since cuts move the bounds of
            documents.

    Source: Megatron-LM, `GPTFIMDatasetConfig`. Difference: errors instead of assertions.
    """

    moves_text = True

    fim_rate: float | None = field(default=None, metadata=affects("samples"))
    fim_spm_rate: float | None = field(default=None, metadata=affects("samples"))
    fim_extra_tokens: Mapping[str, str] | None = field(default=None, metadata=affects("samples"))
    fim_split_sample: str | None = field(default=None, metadata=affects("samples"))
    fim_fragment_rate: float | None = field(default=None, metadata=affects("samples"))
    fim_no_prefix: str | None = field(default=None, metadata=affects("samples"))

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


@dataclass(frozen=True)
class FIMAssemble:
    """Function that makes GPT samples whose segments are cut by draws seeded with the number of the sample.

    Args:
        rows: makes the GPT samples.
        transform: cuts the tokens of a sample.
        seed: seed of the run.
    """

    rows: GPTAssemble
    transform: FIMTransform
    seed: int

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        pieces = []
        for number, (first, stop) in zip(tokens.of.numbers, pairwise(tokens.bounds.tolist()), strict=True):
            sample = np.concatenate([np.empty(0, np.int64), *tokens.pieces[first:stop]]).astype(np.int64)
            pieces.append(self.transform(sample, seed_sample(self.seed, number or 0)))
        return self.rows(tokens._replace(pieces=pieces, bounds=np.arange(len(pieces) + 1)))


def seed_sample(seed: int, number: int) -> np.random.RandomState:
    """Return the random state of one sample: MT19937 seeded by an array of the run's seed and the sample's number."""
    return np.random.RandomState([seed, number % 2**32, number >> 32])


class FIMTransform:
    """Function that moves the middles of segments to the end: `transform(tokens, rng)` keeps the number of tokens.

    Args:
        config: options of the cuts, and the tokenizer.

    An EOD that begins a sample or follows another EOD is dropped: Megatron-LM's rule.

    Raises:
        ConfigError: the tokenizer cannot decode, or lacks a token.
    """

    def __init__(self, config: GPTFIMDatasetConfig) -> None:
        outer = config.tokenizer
        tokenizer = outer._tokenizer if isinstance(outer, TokenizerWrapper) else outer
        try:
            find_ids, self.decode, self.encode = tokenizer.tokens_to_ids, tokenizer.ids_to_text, tokenizer.text_to_ids
        except AttributeError as error:
            name = type(tokenizer).__name__
            raise ConfigError(f"{name}: has no {error.name}, which cuts in the text need; give Megatron's") from None
        if follows(config, Rule.fim_no_special_tokens):
            parameters = inspect.signature(self.decode).parameters.values()
            if any(one.name == "remove_special_tokens" or one.kind is one.VAR_KEYWORD for one in parameters):
                self.decode = partial(self.decode, remove_special_tokens=True)
        names = [(config.fim_extra_tokens or {})[name] for name in EXTRA_TOKENS]
        ids = find_ids(names)
        if unknown := [name for name, token in zip(names, ids, strict=True) if token is None]:
            raise ConfigError(f"fim_extra_tokens: the tokenizer has no {', '.join(unknown)}")
        self.prefix, self.middle, self.suffix, self.pad, self.eod = ids
        self.no_prefix = config.fim_no_prefix
        self.rate, self.spm_rate = config.fim_rate or 0.0, config.fim_spm_rate or 0.0
        self.fragment_rate = config.fim_fragment_rate or 0.0
        separator = config.fim_split_sample
        self.separator = None if separator is None else _check_one(separator, find_ids(separator))

    def __call__(self, tokens: Ids, rng: np.random.RandomState) -> Ids:
        moved = _map_parts(tokens, self.eod, lambda segment: self._cut_segment(segment, rng))[: len(tokens)]
        return np.concatenate([moved, np.full(len(tokens) - len(moved), self.pad, np.int64)])

    def _cut_segment(self, segment: Ids, rng: np.random.RandomState) -> Ids:
        if self.separator is None or self.separator not in segment:
            return self._cut(segment, self.rate, rng)
        if not rng.binomial(1, self.rate):
            return segment
        return _map_parts(segment, self.separator, lambda part: self._cut(part, self.fragment_rate, rng))

    def _cut(self, tokens: Ids, rate: float, rng: np.random.RandomState) -> Ids:
        if not rng.binomial(1, rate):
            return tokens
        text = self.decode(tokens)
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return tokens
        first, second = sorted(rng.randint(low=0, high=len(text) + 1, size=2).tolist())
        parts = text[:first], text[first:second], text[second:]
        before, between, after = (list(self.encode(part)) for part in parts)
        if rng.binomial(1, self.spm_rate):
            order = [self.prefix, self.suffix, *after, self.middle, *before, *between]
        else:
            order = [self.prefix, *before, self.suffix, *after, self.middle, *between]
        return np.array(order, np.int64)


def _check_one(token: str, encoded: Any) -> int:
    """Return the id of a token from `encoded`, the tokenizer's id or ids of it.

    Raises:
        ConfigError: the tokenizer does not encode the token as one id.
    """
    ids = [encoded] if isinstance(encoded, int | np.integer) else list(encoded or [])
    if len(ids) != 1:
        raise ConfigError(f"fim_split_sample: {token!r} is {ids} to the tokenizer, needs one token")
    return int(ids[0])


def _map_parts(tokens: Ids, end: int, change: Callable[[Ids], Ids]) -> Ids:
    """Return the tokens with `change` applied to the parts between `end` tokens.

    An empty part is dropped with its `end`; the last part has none and is never dropped.
    """
    *whole, last = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    changed = [np.append(change(part[:-1]), end) for part in whole if len(part) > 1]
    return np.concatenate([*changed, change(last)])
