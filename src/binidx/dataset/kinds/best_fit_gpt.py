"""GPT samples of documents packed whole, chosen by name alone: `index.best_fit` has the picture and the price."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.gpt import GPTDataset
from binidx.dataset.gpt_index import SMALL
from binidx.errors import IndexBuildError
from binidx.index.best_fit import ARRAYS, build_best_fit_index
from binidx.index.cache.building import Arrays, Building
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.manifest import origin_of
from binidx.native.permutations import RandomState


class BestFitGPTDataset(GPTDataset):
    """Samples of whole documents, padded at the end; only what is longer than a sample is cut.

    Its samples have `GPTDataset`'s keys and shapes. With `inter_document_masking` attention stays within a document.
    Not Megatron's order. An epoch is served before the next, so a run that grows keeps its order.

    Attributes:
        pieces: (sequence, first token, tokens) of each piece, shape (num_pieces, 3), int32.
        bounds: where each sample begins in them, shape (samples of an epoch + 1,).

    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling".
    """

    RECORDED_NAME: ClassVar[str] = "BestFitGPTDataset"

    pieces: NDArray[np.int32]
    bounds: NDArray[np.int64]

    def _set_index(self, arrays: Arrays) -> None:
        self.pieces, self.bounds, self.shuffle_index = (arrays[name] for name in ARRAYS)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    @property
    def num_tokens(self) -> int:
        """Of an epoch, each counted once."""
        again = np.count_nonzero(self.pieces[:, 1]) * self.config.add_extra_token_to_sequence
        return int(self.pieces[:, 2].sum(dtype=np.int64) - again)

    @property
    def fill(self) -> float:
        """The share of all places in samples that tokens take; the rest are pads."""
        capacity = self.config.sequence_length + self.config.add_extra_token_to_sequence
        return float(self.pieces[:, 2].sum(dtype=np.int64)) / max(1, (len(self.bounds) - 1) * capacity)

    def epochs_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples // max(1, len(self.bounds) - 1)

    @property
    def order_identity(self) -> Any:
        return {**super()._fingerprint(), "data": self.dataset.identity}

    @cached_property
    def orders(self) -> PackedPieces:  # type: ignore[override]
        return PackedPieces(self.pieces, self.bounds, self.shuffle_index)

    def _load_or_build(self) -> Arrays:
        if len(self.own_sequences) <= SMALL and not self.config.cache_small_indices:
            self._build(building := Building())
            return building.arrays
        where = self._cache
        origin = origin_of(self.dataset)
        cache = IndexCache(
            where.directory, where.name, where.storage_options, origin=origin, context=self.build_context
        )
        return cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "num_samples": self.num_samples}

    def _build(self, building: Building) -> None:
        try:
            build_best_fit_index(
                building,
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
    """Where the samples lie, in the terms of `native.Orders`: spans by the number under which one is served."""

    def __init__(self, pieces: NDArray[np.int32], bounds: NDArray[np.int64], shuffle_index: NDArray[Any]) -> None:
        self._pieces, self._bounds, self._shuffle_index = pieces, bounds, shuffle_index

    def spans(self, served: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sequence, first, count) of all pieces, shape (n, 3), and where each sample begins in them."""
        samples = self._shuffle_index[np.asarray(served, np.int64)].astype(np.int64)
        starts, stops = self._bounds[samples], self._bounds[samples + 1]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], stops - starts)
        return self._pieces[places].astype(np.int64), bounds
