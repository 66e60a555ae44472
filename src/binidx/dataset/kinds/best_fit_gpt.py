"""GPT samples of whole documents, packed by best fit; `index.best_fit` has the algorithm and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.gpt import GPTDataset
from binidx.dataset.gpt_index import SMALL, find_positions
from binidx.errors import IndexBuildError
from binidx.index.best_fit import ARRAYS, build_best_fit_index
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import Arrays
from binidx.native.permutations import RandomState


class BestFitGPTDataset(GPTDataset):
    """GPT samples of whole documents, padded at the end; only documents longer than a sample are cut.

    Samples have the keys and shapes of `GPTDataset`'s. With `inter_document_masking` attention stays within a document.
    The order is not Megatron's. Each epoch is served completely before the next, so a run that is extended keeps its
    order.

    Args:
        indexed_dataset: the stored sequences, one document each.
        dataset_path: their prefix, as the user wrote it; part of the identity.
        indexed_indices: sequences of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `GPTDatasetConfig`.

    Attributes:
        pieces: (sequence, first token, number of tokens) of each piece, shape (num_pieces, 3), int32.
        bounds: index in `pieces` of each sample's first piece, then the end, shape (samples of an epoch + 1,), int64.
        shuffle_index: the sample served at each position, shape (num_samples,).

    Raises:
        IndexBuildError: samples are requested of a split without tokens.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.BestFitGPTDataset, [1000, 0, 0], lambda: True, config
        ... )
        >>> train, _, _ = builder.build()

    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling".
    """

    RECORDED_NAME: ClassVar[str] = "BestFitGPTDataset"

    pieces: NDArray[np.int32]
    bounds: NDArray[np.int64]

    def _set_index(self, arrays: Arrays) -> None:
        self.pieces, self.bounds, self.shuffle_index = (arrays[name] for name in ARRAYS)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shuffle_index)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one epoch, each counted once."""
        repeated = np.count_nonzero(self.pieces[:, 1]) * self.config.add_extra_token_to_sequence
        return int(self.pieces[:, 2].sum(dtype=np.int64) - repeated)

    @property
    def fill(self) -> float:
        """Fraction of the tokens of samples that are not pads, 0 to 1."""
        capacity = self.config.sequence_length + self.config.add_extra_token_to_sequence
        return float(self.pieces[:, 2].sum(dtype=np.int64)) / max(1, (len(self.bounds) - 1) * capacity)

    @property
    def num_epochs(self) -> int:
        """Number of epochs in the samples, the last of them perhaps in part."""
        return -(-len(self.shuffle_index) // max(1, len(self.bounds) - 1))

    def find_samples(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        pieces = find_positions(self.pieces[:, 0], sequences)
        return find_positions(self.shuffle_index, np.unique(self.bounds.searchsorted(pieces, side="right") - 1))

    def find_epochs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples // max(1, len(self.bounds) - 1)

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values."""
        return {**super()._fingerprint(), "data": self.dataset.identity}

    @cached_property
    def orders(self) -> PackedPieces:  # type: ignore[override]
        return PackedPieces(self.pieces, self.bounds, self.shuffle_index)

    def _load_or_build(self) -> Arrays:
        if len(self.own_sequences) <= SMALL and not self.config.cache_small_indices:
            self._build(writer := ArrayWriter())
            return writer.arrays
        cache = replace(self._cache, order=None, trusted=None)  # Megatron Core has no such index
        return cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "num_samples": self.num_samples}

    def _build(self, writer: ArrayWriter) -> None:
        try:
            build_best_fit_index(
                writer,
                self.dataset.sequence_lengths,
                self.own_sequences,
                self.config.sequence_length,
                self.num_samples,
                RandomState(self.config.random_seed),
                extra=int(self.config.add_extra_token_to_sequence),
            )
        except IndexBuildError as error:
            raise IndexBuildError(f"{self.dataset_path}, {self.index_split.name} split: {error}") from None


class PackedPieces:
    """Spans of best-fit samples by their position in serving order, with the methods of `native.Orders` for them.

    Args:
        pieces, bounds, shuffle_index: arrays of `BestFitGPTDataset`.
    """

    def __init__(self, pieces: NDArray[np.int32], bounds: NDArray[np.int64], shuffle_index: NDArray[Any]) -> None:
        self._pieces, self._bounds, self._shuffle_index = pieces, bounds, shuffle_index

    def spans(self, served: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of samples, (sequence, first token, number of tokens), and each sample's bounds in them.

        Args:
            served: positions in serving order, B of them.

        Returns:
            int64, shapes (num_pieces, 3) and (B + 1,).
        """
        samples = self._shuffle_index[np.asarray(served, np.int64)].astype(np.int64)
        starts, stops = self._bounds[samples], self._bounds[samples + 1]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        positions = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], stops - starts)
        return self._pieces[positions].astype(np.int64), bounds

    def ends(self, served: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
        """Return bounds and sequences of the pieces of samples, and where each sample starts and stops in its ends.

        Args:
            served: positions in serving order, B of them.

        Returns:
            int64, shapes (B + 1,), (num_pieces,), (B,) and (B,).
        """
        spans, bounds = self.spans(served)
        return bounds, spans[:, 0], spans[bounds[:-1], 1], spans[bounds[1:] - 1, 1:].sum(axis=1)
