"""Tokens made up, to try a training script without data: Megatron Core's own, and only for those who ask by name.

    sequence i   1, 2, 3, ... up to its length less one, each modulo the vocabulary; then EOD

What Megatron makes when a config has no blend; here a script that forgot its data is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.gpt import GPTDataset
from binidx.errors import ConfigError
from binidx.format.idx import SequenceIndex, little_endian
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.cache.building import Arrays, Building
from binidx.storage.interfaces import Range
from binidx.storage.ranges import check_ranges

TOKEN_BYTES = 4


class MockGPTLowLevelDataset(IndexedDataset):
    """100,000 sequences of 1 to 4,095 made-up tokens, read as if they lay in a `.bin`.

    Args:
        tokenizer: gives `vocab_size` and `eod`.

    Tokens are int64 from `get` and `[]`, as Megatron's.

    Source: Megatron Core, `MockGPTLowLevelDataset`.
    """

    seed: int = 0
    size: int = 100000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size, self.eod_token = int(tokenizer.vocab_size), int(tokenizer.eod)
        self.path_prefix, self.multimodal, self.mmap, self.storage_options = "mock", False, False, None
        draws = np.random.default_rng(self.seed)
        lengths = draws.integers(low=1, high=self.max_sequence_length, size=self.size, dtype=np.int32)
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        documents = np.arange(self.size + 1, dtype=np.int64)
        self.index = SequenceIndex(np.int32, lengths, TOKEN_BYTES * bounds[:-1], documents, None, int(bounds[-1]))
        self.bin_reader = MadeUp(bounds, self.vocab_size, self.eod_token)
        self._stored = little_endian(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "eod": self.eod_token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(type("Tokens", (), state))  # type: ignore[misc]

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = super().get(idx, offset, length).astype(np.int64)
        return tokens


class MadeUp:
    """The bytes of a `.bin` that is nowhere: a `RangeReader`.

    Args:
        bounds: first token of each sequence, then the end, shape (S + 1,).
        vocab_size, eod: what its tokens are made of.
    """

    uri = "mock.bin"
    identity: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, bounds: NDArray[np.int64], vocab_size: int, eod: int) -> None:
        self.bounds, self.vocab_size, self.eod = bounds, vocab_size, eod
        self.size = TOKEN_BYTES * int(bounds[-1])

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        return [self._made(start // TOKEN_BYTES, stop // TOKEN_BYTES) for start, stop in ranges]

    def _made(self, start: int, stop: int) -> memoryview:
        places = np.arange(start, stop)
        sequence = np.searchsorted(self.bounds, places, side="right")
        tokens = (places - self.bounds[sequence - 1] + 1) % self.vocab_size
        tokens[places + 1 == self.bounds[sequence]] = self.eod
        return tokens.astype(little_endian(np.int32)).view(np.uint8).data


class MockGPTDataset(GPTDataset):
    """GPT samples of made-up tokens, for a config without `blend` and `blend_per_split`.

    Its indices are built anew each time: 2 ms.

    Raises:
        ConfigError: the config has a blend.

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
        return MockGPTLowLevelDataset(config.tokenizer)

    def _load_or_build(self) -> Arrays:
        self._build(building := Building())
        return building.arrays
