"""Samples of made-up tokens, to try a training script without data.

    sequence i   1, 2, 3, ... up to its length less one, each modulo the vocabulary; then EOD

Megatron Core makes them for every config without a blend; here only `MockGPTDataset` does, so that a script without its
data fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.text_and_images import BlackImageAssemble, MultimodalDatasetConfig
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.format.tokens import digest_index, identify_sequences, index_of


class ComputedTokens(ABC):
    """Sequences whose tokens are computed when they are read; each is a document. Implements `Tokens`.

    Args:
        name: name in the place of a prefix.
        dtype: dtype of a token.
        lengths: number of tokens of each sequence, shape (num_sequences,) int32.

    All attributes that `IndexedDataset` lacks are private, so that `compat.megatron.low_level.LowLevel` can forward any
    other name to a user's dataset.
    """

    def __init__(self, name: str, dtype: type[np.signedinteger[Any]], lengths: NDArray[np.int32]) -> None:
        self.path_prefix, self.dtype, self.sequence_lengths = name, np.dtype(dtype), lengths

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the lengths; see `SequencesInFiles.identity`."""
        index = index_of(self)
        return identify_sequences(index, digest_index(index))

    def read(self, spans: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the tokens of spans (sequence, first, count), shape (n, 3)."""
        return [self._compute(*span).astype(self.dtype, copy=False) for span in spans.tolist()]

    @abstractmethod
    def _compute(self, sequence: int, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens of a sequence from its token `first`, shape (count,)."""


class MockGPTLowLevelDataset(ComputedTokens):
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

    def __getitem__(self, idx: Any) -> Any:
        """Return the tokens of a sequence, or a list of those of a slice."""
        if isinstance(idx, slice):
            return [self.get(sequence) for sequence in range(len(self))[idx]]
        return self.get(idx)

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Return `length` tokens of a sequence from its token `offset`; by default all that follow."""
        sequence = range(len(self))[idx]
        return self._compute(sequence, offset, self.sequence_lengths[sequence] - offset if length is None else length)

    def _compute(self, sequence: int, first: int, count: int) -> NDArray[np.int64]:
        end = self.sequence_lengths.item(sequence)
        if not 0 <= first <= first + count <= end:
            raise ValueError(f"mock: {count} tokens from {first} of sequence {sequence}, which has {end}")
        tokens = np.arange(first + 1, first + count + 1) % self.vocab_size
        if count and first + count == end:
            tokens[-1] = self.eod_token
        return tokens


class MockGPTDataset(GPTDataset):
    """GPT samples of made-up tokens, for a config without `blend` and `blend_per_split`.

    Samples are those of `GPTDataset`. Indices are not cached; building them takes 2 ms.

    The arguments are those of `MegatronDataset`, as in Megatron Core: `dataset` is a `MockGPTLowLevelDataset`,
    `dataset_path` is None, and `config` is a `GPTDatasetConfig` without a blend.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.MockGPTDataset, [1000, 10, 10], lambda: True, config
        ... )
        >>> train, valid, test = builder.build()

    Source: Megatron Core, `MockGPTDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "MockGPTDataset"

    __init__ = MegatronDataset.__init__  # with the names of its arguments

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        """Return made-up sequences for the config's tokenizer.

        Args:
            dataset_path: None.
            config: its tokenizer has `vocab_size` and `eod`.

        Returns:
            100,000 sequences.

        Raises:
            ConfigError: the config has a blend.
        """
        if not config.mock:
            raise ConfigError("MockGPTDataset: found a blend, needs none; GPTDataset reads it")
        return MockGPTLowLevelDataset(config.tokenizer)


class MockMultimodalDataset(GPTDataset):
    """GPT samples of made-up tokens, each with a black `image`: float32, shape (3, image_h, image_w).

    The arguments are those of `MockGPTDataset`, with a `MultimodalDatasetConfig`.

    Source: Megatron Core, `MockMultimodalDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "MockMultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig

    __init__ = MegatronDataset.__init__
    build_low_level_dataset = staticmethod(MockGPTDataset.build_low_level_dataset)

    def assemble_for(self, config: MultimodalDatasetConfig) -> Assemble:
        return BlackImageAssemble(super().assemble_for(config), config)
