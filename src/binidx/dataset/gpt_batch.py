"""Micro-batches of GPT samples, gathered by C in one call a dataset, the tokens of all datasets read at the same time.

samples ─ locate.c ─►  spans of sequences ─►  ranges of bytes ─ storage ─►  pieces ─ gather.c ─►  rows of the batch
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx import native
from binidx.dataset.masks import build_attention_mask
from binidx.dataset.torch_bridge import Sample, Samples, Tensor, as_tensor
from binidx.format.idx import DType
from binidx.format.pieces import read_pieces
from binidx.native.gather import GPTOutputs, Pieces, gather_samples, scattered_pieces

if TYPE_CHECKING:
    from binidx.dataset.gpt import GPTDataset


@functools.cache
def code_of(dtype: Hashable) -> int:
    """The code of a stored dtype; remembered, since numpy takes 6 us to spell one."""
    return DType.code_from_dtype(dtype)  # type: ignore[arg-type]


def read_gpt_batch(
    requests: Sequence[tuple[GPTDataset, Sequence[int | None], Sequence[int]]], num_rows: int
) -> Samples:
    """One batch out of (dataset, samples, their rows in the batch) of one config."""
    spans = [sample_spans(dataset, idxs) for dataset, idxs, _ in requests]
    pieces = read_pieces([(request[0].dataset, found) for request, (found, _) in zip(requests, spans, strict=True)])
    batch = GPTBatch(requests[0][0], num_rows)
    for (dataset, idxs, rows), (_, bounds), tokens in zip(requests, spans, pieces, strict=True):
        batch.fill(dataset, tokens, bounds, idxs, rows)
    return batch.samples()


def assemble_gpt_sample(dataset: GPTDataset, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
    """One sample of tokens that are here already."""
    stored = [np.ascontiguousarray(sequence, dataset.dataset.index.dtype) for sequence in sequences]
    batch = GPTBatch(dataset, 1)
    pieces = scattered_pieces([memoryview(sequence.view(np.uint8).data) for sequence in stored])
    batch.fill(dataset, pieces, np.array([0, len(stored)], np.int64), [idx], [0])
    return batch.samples()[0]


def sample_spans(dataset: GPTDataset, idxs: Sequence[int | None]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Spans (n, 3) and bounds (B + 1,) of samples in shuffled order; None is sample 0."""
    rows = dataset.shuffle_index[[0 if idx is None else idx for idx in idxs]].astype(np.int64)
    return native.sample_spans(
        dataset.sample_index,
        dataset.document_index,
        dataset.dataset.sequence_lengths,
        rows,
        add_extra_token=dataset.config.add_extra_token_to_sequence,
    )


class GPTBatch:
    """The outputs of a micro-batch of datasets that share a config."""

    def __init__(self, like: GPTDataset, num_rows: int) -> None:
        self.like, self.config = like, like.config
        shape = (num_rows, self.config.sequence_length)
        resets = self.config.reset_position_ids or self.config.reset_attention_mask
        self.out = GPTOutputs(
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.empty(shape, np.float32),
            np.empty(shape, np.int64) if resets else None,
        )

    def fill(
        self,
        dataset: GPTDataset,
        pieces: Pieces,
        bounds: NDArray[np.int64],
        idxs: Sequence[int | None],
        rows: Sequence[int],
    ) -> None:
        """Put the samples `idxs`, whose tokens `pieces` are, into `rows`; None has no loss."""
        index = dataset.dataset.index
        needs_eod = self.config.eod_mask_loss or self.out.positions is not None
        gather_samples(
            pieces,
            bounds,
            np.array(rows, np.int64),
            self.out,
            dtype_code=code_of(cast(Hashable, index.dtype)),
            item_bytes=index.dtype_size,
            pad=dataset._pad_token_id,
            eod=self.config.tokenizer.eod if needs_eod else 0,
            mask_eod=bool(self.config.eod_mask_loss),
        )
        for idx, row in zip(idxs, rows, strict=True):
            if idx is None:
                self.out.loss_mask[row] = 0.0

    def samples(self) -> Samples:
        """The rows as samples, keys in Megatron's order."""
        columns = {"tokens": as_tensor(self.out.tokens), "labels": as_tensor(self.out.labels)}
        if self.config.create_attention_mask:
            columns["attention_mask"] = self._attention_mask()
        columns["loss_mask"] = as_tensor(self.out.loss_mask)
        columns["position_ids"] = self._positions()
        resets = {
            "attention_mask": self.config.reset_attention_mask,
            "position_ids": self.config.reset_position_ids,
        }
        shared = [name for name, has_own in resets.items() if not has_own]
        return Samples(len(self.out.tokens), columns, shared)

    def _positions(self) -> Tensor:
        if self.config.reset_position_ids and self.out.positions is not None:
            return as_tensor(self.out.positions)
        return self.like.shared_positions

    def _attention_mask(self) -> Tensor:
        if self.config.reset_attention_mask and self.out.positions is not None:
            return as_tensor(np.stack([build_attention_mask(positions) for positions in self.out.positions]))
        return self.like.shared_attention_mask
