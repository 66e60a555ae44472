"""BERT's samples: two runs of sentences, and tokens to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.config import Split
from binidx.dataset.kinds.masked_sentences import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, must_be_given
from binidx.dataset.kinds.masking import join
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset

SPECIALS = 3


"""cls A sep B sep"""


@dataclass
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """What BERT samples need to know besides.

    Args:
        classification_head: half of the samples have their two runs of sentences swapped, for a model to tell; a sample
            then has two sentences at least. Must be given.
    """

    classification_head: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_given(self, "classification_head")
        if self.sequence_length < SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {SPECIALS + 2} or more for BERT")


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of BERT: `[cls] A [sep] B [sep]`, padded to S.

    A sample is a dict of int64 arrays of shape (S,): `text`; `types`, 0 in A and 1 in B; `labels`, the hidden tokens,
    else -1; `padding_mask`, 1 and the pad id behind the text; `loss_mask`, 1 at hidden tokens; and two ints:
    `is_random`, whether A and B were swapped, and `truncated`, whether sentences were cut to fit. Of the hidden tokens
    80 % are `mask`, 10 % any token, 10 % themselves. As in Megatron a pad is 0 in `text`, and the pad id in `types`.

    Source: Megatron Core, `BERTMaskedWordPieceDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "BERTMaskedWordPieceDataset"

    config: BERTMaskedWordPieceDatasetConfig
    config_class = BERTMaskedWordPieceDatasetConfig

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BERTMaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        least = 2 if config.classification_head else 1
        self.sample_index = self._build_sample_index(config.sequence_length - SPECIALS, least)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """The sample of these sentences."""
        with self.draws(idx) as (target, rng):
            pivot, swapped = self._pivot(len(sequences), rng)
            runs = [join(sequences[:pivot]), join(sequences[pivot:])]
            if swapped:
                runs.reverse()
            kept = trim(len(runs[0]), len(runs[1]), target, rng)
            first, second = (run[slice(*bounds)] for run, bounds in zip(runs, kept, strict=True))
            tokens = self._merge(first, second)
            text, positions, labels, _, _ = self._create_masked_lm_predictions(tokens, target, rng)
        sample = self._pad(text, len(first) + 2, positions, labels)
        if idx is None:
            sample["loss_mask"][:] = 0
        return {**sample, "is_random": int(swapped), "truncated": int(sum(map(len, runs)) > target)}

    def _merge(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        cls, sep = np.array([[self.config.tokenizer.cls], [self.config.tokenizer.sep]], np.int64)
        return np.concatenate([cls, first, sep, *([second, sep] if len(second) else [])])

    def _pivot(self, num_sentences: int, rng: RandomState) -> tuple[int, bool]:
        """Where B begins, and whether it comes first."""
        if not self.config.classification_head:
            return num_sentences, False
        pivot = int(rng.randint(low=1, high=num_sentences)) if num_sentences >= 3 else 1
        return pivot, bool(rng.random_sample() < 0.5)

    def _pad(self, text: list[int], num_first: int, positions: list[int], labels: list[int]) -> dict[str, NDArray[Any]]:
        pad, length = self._pad_token_id, self.config.sequence_length
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

    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        if numpy_random_state.random_sample() < 0.8:
            mask: int = self.config.tokenizer.mask
            return mask
        if numpy_random_state.random_sample() >= 0.5:
            return self.token_lookup[numpy_random_state.randint(0, len(self.token_lookup))]
        return None


def trim(num_first: int, num_second: int, target: int, rng: RandomState) -> list[tuple[int, int]]:
    """What is kept of two runs of tokens, (first, end) of each: the longer loses a token of either end, by chance."""
    kept = [[0, num_first], [0, num_second]]
    excess = num_first + num_second - target
    for chance in rng.random_sample(excess).tolist() if excess > 0 else []:
        longer = kept[0] if kept[0][1] - kept[0][0] > kept[1][1] - kept[1][0] else kept[1]
        if chance < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return [(first, end) for first, end in kept]
