"""Orders of samples that hold whole documents, padded at the end; only documents longer than a sample are cut.

A packing is a rule that puts pieces of documents into samples, and a row in PACKINGS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.packing import ARRAYS, Pack, build_packed_index
from binidx.native.mappings import best_fit, first_fit
from binidx.native.permutations import RandomState
from binidx.order.gpt_order import SMALL, GPTParameters
from binidx.order.opener import IndexOptions
from binidx.order.order_options import OrderOption
from binidx.order.order_protocols import Bounds, Numbers, Source
from binidx.order.requests import Request, SourceRequest
from binidx.order.source_order import SourceOrder, find_positions, join_ranges


@dataclass(frozen=True)
class PieceIndex:
    """Pieces of samples by their position in serving order; implements `SpanIndex`.

    Args:
        pieces: (sequence, first token, number of tokens) of each piece, shape (num_pieces, 3), int32.
        bounds: index in `pieces` of each sample's first piece, then the end, shape (samples of an epoch + 1,), int64.
        shuffle_index: the sample served at each position, shape (num_samples,).
    """

    pieces: NDArray[np.int32]
    bounds: NDArray[np.int64]
    shuffle_index: NDArray[Any]

    def spans(self, served: Sequence[int] | Numbers) -> tuple[Numbers, Bounds]:
        samples = self.shuffle_index[np.asarray(served, np.int64)].astype(np.int64)
        starts, stops = self.bounds[samples], self.bounds[samples + 1]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        return self.pieces[join_ranges(starts, stops)].astype(np.int64), bounds

    def ends(self, served: Sequence[int] | Numbers) -> tuple[Bounds, Numbers, Numbers, Numbers]:
        spans, bounds = self.spans(served)
        return bounds, spans[:, 0], spans[bounds[:-1], 1], spans[bounds[1:] - 1, 1:].sum(axis=1)


class PackedOrder(SourceOrder):
    """Order of packed documents. Each epoch is served completely before the next, so a longer run keeps the order.

    Args:
        parameters: options of the order.
        source: the sequences, one document each.
        arrays: pieces, bounds and shuffle_index, as `PieceIndex` has them.
        ends_documents: see `SourceOrder`.
    """

    array_names = ARRAYS

    def __init__(
        self, parameters: GPTParameters, source: Source, arrays: Mapping[str, Any], *, ends_documents: bool = True
    ) -> None:
        super().__init__(source)
        self.ends_documents = ends_documents
        self.parameters, self.sequence_length = parameters, parameters.sequence_length
        self.set_arrays(arrays)

    @cached_property
    def index(self) -> PieceIndex:
        return PieceIndex(*(vars(self)[name] for name in ARRAYS))

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.parameters.fingerprint(self.source.sequences), "data": self.source.dataset.identity}

    @property
    def samples_per_epoch(self) -> int:
        return len(self.index.bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one epoch, each counted once."""
        pieces = self.index.pieces
        repeated = np.count_nonzero(pieces[:, 1]) * self.parameters.add_extra_token
        return int(pieces[:, 2].sum(dtype=np.int64) - repeated)

    @property
    def fill(self) -> float:
        """Fraction of the tokens of samples that are not pads, 0 to 1."""
        capacity = self.parameters.sequence_length + self.parameters.add_extra_token
        return float(self.index.pieces[:, 2].sum(dtype=np.int64)) / max(1, self.samples_per_epoch * capacity)

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def candidates(self, sequences: Numbers) -> Numbers:
        pieces = find_positions(self.index.pieces[:, 0], sequences)
        samples = np.unique(self.index.bounds.searchsorted(pieces, side="right") - 1)
        return find_positions(self.index.shuffle_index, samples)


PACKINGS: dict[str, Pack] = {"best_fit": best_fit, "first_fit": first_fit}
"""Name of a packing -> its rule."""


@dataclass(frozen=True)
class PackRule:
    """A packing as a rule of a source: see `order.requests.SourceRule`.

    Args:
        parameters: options of the order.
        packing: a name of PACKINGS.
        is_option: whether it is the option `order` of a config; then the last token of each piece has no label.
    """

    parameters: GPTParameters
    packing: str
    is_option: bool = True
    uncounted: ClassVar[str] = "documents are counted as if samples had no pads; a packing serves more samples"

    @property
    def fields(self) -> Mapping[str, Any]:
        return {"packing": self.packing} if self.is_option else {}

    def open(self, source: Source, options: IndexOptions) -> PackedOrder:
        parameters, dataset, documents = self.parameters, source.dataset, source.sequences

        def fill(writer: ArrayWriter) -> None:
            build_packed_index(
                PACKINGS[self.packing],
                writer,
                dataset.sequence_lengths,
                documents,
                parameters.sequence_length,
                parameters.num_samples,
                RandomState(parameters.random_seed),
                extra=int(parameters.add_extra_token),
            )

        fields = {**parameters.fingerprint(documents), "num_samples": parameters.num_samples}
        is_small = len(documents) <= SMALL
        arrays = options.load_or_build(dataset, fields, ARRAYS, fill, is_small=is_small, is_ranged=False)
        return PackedOrder(parameters, source, arrays, ends_documents=self.is_option)


@dataclass(frozen=True)
class BestFit(OrderOption):
    """Order of whole documents, packed by best fit: `index.packing`."""

    PACKING: ClassVar[str] = "best_fit"

    def request(self, inner: Request) -> Request:
        return inner.map_sources(self._pack)

    def _pack(self, source: SourceRequest) -> SourceRequest:
        if isinstance(source.rule, PackRule):
            raise ConfigError(f"order: {source.kind} packs documents by itself; use GPTDataset")
        parameters = source.parameters
        rule = PackRule(replace(parameters, kind=f"{parameters.kind}-{self.PACKING}"), self.PACKING)
        return replace(source, rule=rule)


@dataclass(frozen=True)
class FirstFit(BestFit):
    """Order of whole documents, packed by first fit: `index.packing`."""

    PACKING: ClassVar[str] = "first_fit"
