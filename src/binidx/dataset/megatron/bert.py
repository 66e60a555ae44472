"""BERT samples: two runs of sentences with some of their tokens masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.assemble.masking import concatenate_tokens
from binidx.dataset.megatron.masked_sentences import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, check_given
from binidx.errors import ConfigError

SPECIALS = 3
"""Number of special tokens in a sample, `[cls] A [sep] B [sep]`."""


@dataclass
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

    classification_head: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given(self, "classification_head")
        if self.sequence_length < SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {SPECIALS + 2} or more for BERT")


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """BERT samples: `[cls] A [sep] B [sep]`, padded to S tokens.

    A sample is a dict of int64 arrays of shape (S,), and two ints:

        text            tokens; 0 at pads
        types           0 in A, 1 in B, the pad id at pads
        labels          original tokens where masked, else -1
        padding_mask    1, and the pad id at pads
        loss_mask       1 where masked
        is_random       1 if A and B were swapped
        truncated       1 if sentences were cut to fit

    Of the masked tokens 80 % become `mask`, 10 % any token, and 10 % stay. `megatron_samples="0.16.1"` draws that token
    from the ids in the order of `inv_vocab`: other samples in each process if the tokenizer has no order of its own.

    Args:
        indexed_dataset: the `.bin`/`.idx` pair, a sequence per sentence.
        dataset_path: its prefix, as given by the user; part of the identity.
        indexed_indices: documents of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `BERTMaskedWordPieceDatasetConfig`.

    Raises:
        IndexBuildError: samples are requested of a split that has none.

    Example:
        >>> sizes = [1000, 10, 10]
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.BERTMaskedWordPieceDataset, sizes, lambda: True, config
        ... )
        >>> train, valid, test = builder.build()

    Source: Megatron Core, `BERTMaskedWordPieceDataset`; the differences are those of `MaskedWordPieceDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "BERTMaskedWordPieceDataset"

    config: BERTMaskedWordPieceDatasetConfig
    config_class = BERTMaskedWordPieceDatasetConfig
    samples_differ = True

    @property
    def token_lookup(self) -> list[int]:
        """All ids of the vocabulary, of which random tokens are drawn."""
        vocabulary = self.config.vocabulary
        return vocabulary.sorted_ids if self.config.megatron_samples == "main" else vocabulary.ids

    def _load_index(self) -> None:
        min_sentences = 2 if self.config.classification_head else 1
        self.sample_index = self._build_sample_index(self.config.sequence_length - SPECIALS, min_sentences)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """Return the sample made of the given sentences.

        Args:
            idx: number of the sample; None is sample 0 without loss.
            sequences: its sentences, each shape (num_tokens,).

        Returns:
            The dict described at the class.
        """
        target, rng = self._begin_sample(idx)
        pivot, swapped = self._pivot(len(sequences), rng)
        runs = [concatenate_tokens(sequences[:pivot]), concatenate_tokens(sequences[pivot:])]
        if swapped:
            runs.reverse()
        bounds = trim(len(runs[0]), len(runs[1]), target, rng)
        first, second = (run[start:stop] for run, (start, stop) in zip(runs, bounds, strict=True))
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
        """Return the number of the first sentence of run B, and whether runs A and B are swapped."""
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
    """Return (start, stop) in each of two runs of tokens, trimmed to `target` tokens in all.

    Until they fit, the longer run loses a token at a random end.
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
