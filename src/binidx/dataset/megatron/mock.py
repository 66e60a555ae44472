"""Samples of made-up tokens, to try a training script without data.

    sequence i   1, 2, 3, ... up to its length less one, each modulo the vocabulary; then EOD

Megatron Core makes them for every config without a blend; here only `MockGPTDataset` does, so that a script without its
data fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.errors import ConfigError
from binidx.format.idx import SequenceIndex, little_endian
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.interfaces import Range
from binidx.storage.ranges import check_ranges


class ComputedDataset(IndexedDataset, ABC):
    """Sequences whose tokens are computed when they are read; each is a document.

    Args:
        name: name in the place of a prefix.
        dtype: dtype of a token.
        lengths: number of tokens of each sequence, shape (num_sequences,) int32.

    All attributes that `IndexedDataset` lacks are private, so that `compat.megatron.low_level.LowLevel` can forward any
    other name to a user's dataset.
    """

    is_stored = False

    def __init__(self, name: str, dtype: type[np.signedinteger[Any]], lengths: NDArray[np.int32]) -> None:
        self.path_prefix, self.multimodal, self.mmap, self.storage_options = name, False, False, None
        self.token_digests = {}
        # First token of each sequence, then the end, shape (num_sequences + 1,).
        self._token_bounds = bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._stored = little_endian(dtype)
        starts, documents = self._stored.itemsize * bounds[:-1], np.arange(len(bounds), dtype=np.int64)
        self.index = SequenceIndex(dtype, lengths, starts, documents, None, int(bounds[-1]))
        self.bin_reader = ComputedReader(f"{name}.bin", self.index.num_bytes, self._stored, self._compute_tokens)

    @abstractmethod
    def _compute_tokens(self, start: int, stop: int) -> NDArray[np.signedinteger[Any]]:
        """Return the tokens from `start` to before `stop`, counted over all sequences; shape (stop - start,)."""


@dataclass(eq=False)
class ComputedReader:
    """`RangeReader` of the bytes of computed tokens.

    Args:
        uri: name for errors.
        size: size of all tokens in bytes.
        dtype: dtype of a token in these bytes.
        compute: `ComputedDataset._compute_tokens`.
    """

    uri: str
    size: int
    dtype: np.dtype[Any]
    compute: Callable[[int, int], NDArray[Any]]
    identity: ClassVar[Mapping[str, Any]] = {}

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return the bytes of these ranges, which must begin and end between tokens."""
        check_ranges(self.uri, self.size, ranges)
        tokens = (self.compute(start // self.dtype.itemsize, stop // self.dtype.itemsize) for start, stop in ranges)
        return [part.astype(self.dtype).view(np.uint8).data for part in tokens]


class MockGPTLowLevelDataset(ComputedDataset):
    """100,000 sequences of 1 to 4,095 made-up tokens, read like the sequences of a `.bin`.

    Args:
        tokenizer: has `vocab_size` and `eod`.

    `get` and `[]` return int64, as in Megatron Core.

    Source: Megatron Core, `MockGPTLowLevelDataset`.
    """

    seed: int = 0
    size: int = 100000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size, self.eod_token = int(tokenizer.vocab_size), int(tokenizer.eod)
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(low=1, high=self.max_sequence_length, size=self.size, dtype=np.int32)
        super().__init__("mock", np.int32, lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (SimpleNamespace(vocab_size=self.vocab_size, eod=self.eod_token),)

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = super().get(idx, offset, length).astype(np.int64)
        return tokens

    def _compute_tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        sequence = np.searchsorted(self._token_bounds, positions, side="right")
        tokens: NDArray[np.int64] = (positions - self._token_bounds[sequence - 1] + 1) % self.vocab_size
        tokens[positions + 1 == self._token_bounds[sequence]] = self.eod_token
        return tokens


class MockGPTDataset(GPTDataset):
    """GPT samples of made-up tokens, for a config without `blend` and `blend_per_split`.

    Samples are those of `GPTDataset`. Indices are not cached; building them takes 2 ms.

    Args:
        dataset: the made-up sequences.
        dataset_path: None.
        indices: sequences of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `GPTDatasetConfig` without a blend.

    Raises:
        ConfigError: the config has a blend.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.MockGPTDataset, [1000, 10, 10], lambda: True, config
        ... )
        >>> train, valid, test = builder.build()

    Source: Megatron Core, `MockGPTDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "MockGPTDataset"

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        if not config.mock:
            raise ConfigError("MockGPTDataset: found a blend, needs none; GPTDataset reads it")
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        """Return made-up sequences for the config's tokenizer.

        Args:
            dataset_path: None.
            config: its tokenizer has `vocab_size` and `eod`.

        Returns:
            100,000 sequences.
        """
        return MockGPTLowLevelDataset(config.tokenizer)
