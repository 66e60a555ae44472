"""BERT samples: two runs of sentences with some of their tokens masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.assemble.masking import MaskedAssemble, MaskedWordPieceDatasetConfig, concatenate_tokens
from binidx.dataset.config import check_given
from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers

SPECIALS = 3
"""Number of special tokens in a sample, `[cls] A [sep] B [sep]`."""


@dataclass(repr=False)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Config of BERT samples: `MaskedWordPieceDatasetConfig` and one more option.

    Args:
        classification_head: True swaps the two runs of sentences in half of the samples, for a model to predict; each
            sample then has at least two sentences. Required.

    The other arguments are those of `MaskedWordPieceDatasetConfig`; `sequence_length` is at least 5 tokens.

    Raises:
        ConfigError: `classification_head` is missing, or `sequence_length` is too small.

    Source: Megatron Core, `BERTMaskedWordPieceDatasetConfig`. Difference: errors instead of assertions.
    """

    classification_head: bool | None = field(default=None, metadata=affects("order", "samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given(self, "BERT", "classification_head")
        if self.sequence_length < SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {SPECIALS + 2} or more for BERT")


class BERTAssemble(MaskedAssemble):
    """Function that makes BERT samples, as `BERTMaskedWordPieceDataset` describes them."""

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        target, rng = self.begin(number)
        pivot, swapped = self._pivot(len(pieces), rng)
        runs = [concatenate_tokens(pieces[:pivot]), concatenate_tokens(pieces[pivot:])]
        if swapped:
            runs.reverse()
        bounds = trim(len(runs[0]), len(runs[1]), target, rng)
        first, second = (run[start:stop] for run, (start, stop) in zip(runs, bounds, strict=True))
        tokens = self._merge(first, second)
        text, positions, labels, _, _ = self.predict(tokens, target, rng)
        sample = self._make_rows(text, len(first) + 2, positions, labels)
        if number is None:
            sample["loss_mask"][:] = 0
        return {**sample, "is_random": int(swapped), "truncated": int(sum(map(len, runs)) > target)}

    def _merge(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        cls, sep = np.array([[self.config.tokenizer.cls], [self.config.tokenizer.sep]], np.int64)
        return np.concatenate([cls, first, sep, *([second, sep] if len(second) else [])])

    def _pivot(self, num_sentences: int, rng: RandomState) -> tuple[int, bool]:
        """Return the number of the first sentence of run B, and whether runs A and B are swapped."""
        if not self.config.classification_head:
            return num_sentences, False
        pivot = int(rng.randint(low=1, high=num_sentences)) if num_sentences >= 3 else 1
        return pivot, bool(rng.random_sample() < 0.5)

    def _make_rows(
        self, text: list[int], num_first: int, positions: list[int], labels: list[int]
    ) -> dict[str, NDArray[Any]]:
        pad, length = self.pad, self.config.sequence_length
        rows = {name: np.full(length, fill, np.int64) for name, fill in
                (("text", pad), ("types", pad), ("labels", -1), ("padding_mask", 1), ("loss_mask", 0))}  # fmt: skip
        rows["text"][: len(text)] = text
        rows["types"][: len(text)] = 1
        rows["types"][:num_first] = 0
        rows["labels"][positions] = labels
        rows["loss_mask"][positions] = 1
        pads = rows["text"] == pad
        rows["padding_mask"][pads] = pad
        rows["text"][pads] = 0
        rows["labels"][rows["labels"] == pad] = 0
        return rows


def trim(num_first: int, num_second: int, target: int, rng: RandomState) -> list[tuple[int, int]]:
    """Return (start, stop) in each of two runs of tokens, trimmed to `target` tokens in all.

    Until they fit, the longer run loses a token at a random end.

    Args:
        num_first, num_second: numbers of tokens of the two runs.
        target: most tokens of both together.
        rng: a draw below 0.5 removes the first token of a run, another the last.
    """
    bounds = [[0, num_first], [0, num_second]]
    excess = num_first + num_second - target
    for draw in rng.random_sample(max(0, excess)).tolist():
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if draw < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return [(start, stop) for start, stop in bounds]
