"""Batches of samples, and how they cross from a DataLoader worker to the trainer.

Samples of different lengths become one row of a batch (THD), and bounds of sequences are padded to equal numbers:

    cu_seqlens of two rows       0 3 8        0 3 8 8       as Megatron's inter-document masking pads them:
                                 0 2 5 8      0 2 5 8       empty sequences at the end

    samples of 2, 4 and 2        a a | b b b b | c c        one row, with the start of each and its end without pads

torch sends each tensor of a worker's batch through a file descriptor of its own: about 100 us a tensor. A GPT batch has
five to seven, of 28 bytes a token. It crosses as one tensor of 4.1 bytes a token:

    row of the block, int32     | tokens, then the last label | positions, unless 0, 1, 2, .. | bits of the loss mask |
                                          S + 1                             S                          S / 32

A batch that the block would not give back bit for bit, such as one of 64-bit ids or of weighted losses, crosses as it
is. Small tensors, such as `dataset_id`, are pickled with the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import Samples, Tensor, as_tensor, collate_by_torch, in_worker

LENGTHS = ("original_seq_len", "padded_seq_len")
ROWS = {"tokens": np.int64, "labels": np.int64, "loss_mask": np.float32, "position_ids": np.int64}
"""Keys of which a block is made, each of shape (B, S)."""

INLINE_BYTES = 1 << 14
"""Most bytes of a tensor that is pickled with the block."""


@dataclass(frozen=True)
class WorkerBatch:
    """GPT batch as a block.

    Attributes:
        block: int32, a row for each sample.
        length: S.
        names: keys of the batch, in their order.
        others: tensors that are not in the block; small ones as arrays.
    """

    block: Tensor
    length: int
    names: tuple[str, ...]
    others: Mapping[str, Any]

    def unpack(self, *, pin: bool = False) -> dict[str, Tensor]:
        """Return the batch.

        Args:
            pin: whether its memory is pinned for copies to a GPU.
        """
        block, length = self.block.numpy(), self.length
        bits = np.ascontiguousarray(block[:, block.shape[1] - _mask_words(length) :]).view(np.uint8)
        arrays = {name: value for name, value in self.others.items() if isinstance(value, np.ndarray)}
        arrays["tokens"] = block[:, :length].astype(np.int64)
        arrays["labels"] = block[:, 1 : length + 1].astype(np.int64)
        arrays["loss_mask"] = np.unpackbits(bits, axis=1, count=length, bitorder="little").astype(np.float32)
        arrays["position_ids"] = np.empty((len(block), length), np.int64)
        has_positions = block.shape[1] > length + 1 + _mask_words(length)
        arrays["position_ids"][:] = block[:, length + 1 : 2 * length + 1] if has_positions else np.arange(length)
        tensors = {**self.others, **{name: as_tensor(array) for name, array in arrays.items()}}
        return {name: tensors[name].pin_memory() if pin else tensors[name] for name in self.names}


def collate_for_trainer(samples: Sequence[Any]) -> Any:
    """Return the batch of `collate`; in a worker as a `WorkerBatch`, if it can be one."""
    batch = collate(samples)
    return pack_batch(batch) if in_worker() else batch


def collate(samples: Sequence[Any]) -> Any:
    """Return a batch: the tensors of which the samples are rows (`Samples`), else the samples stacked by torch.

    Samples of different lengths become one row; `cu_seqlens` are padded to equal lengths.
    """
    if isinstance(samples, Samples):
        return samples.stack()
    if isinstance(samples[0], Mapping) and all(name in samples[0] for name in LENGTHS):
        return _pack(samples)
    return collate_by_torch(_pad_bounds(samples))


def _pack(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row of all samples: their tensors concatenated, each of shape (1, T).

    Also `cu_seqlens`, the cumulative original lengths, and `cu_seqlens_padded`, the start of each sequence, then T:
    int32, each of shape (1, num_sequences + 1); `max_seqlen`, with pads, int32 (1,); scalars of samples become (B,).

    Source: ours; the keys are those of Megatron-LM's packing scheduler.
    """
    original, padded = (np.concatenate([np.asarray(sample[name]) for sample in samples]) for name in LENGTHS)
    batch: dict[str, Any] = {}
    for name, value in samples[0].items():
        if name not in LENGTHS:
            values = [np.asarray(sample[name]) for sample in samples]
            batch[name] = as_tensor(np.concatenate(values)[None] if value.ndim else np.stack(values))
    for name, lengths in (("cu_seqlens", original), ("cu_seqlens_padded", padded)):
        batch[name] = as_tensor(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)[None])
    batch["max_seqlen"] = as_tensor(padded.max(keepdims=True))
    return batch


def _pad_bounds(samples: Sequence[Any]) -> list[Any]:
    """Return the samples with `cu_seqlens`, if they have them, padded to equal lengths by repeating the last bound."""
    if not isinstance(samples[0], Mapping) or "cu_seqlens" not in samples[0]:
        return [*samples]
    bounds = [np.asarray(sample["cu_seqlens"]) for sample in samples]
    most = max(map(len, bounds))
    even = [np.pad(own, (0, most - len(own)), mode="edge") for own in bounds]
    return [{**sample, "cu_seqlens": as_tensor(own)} for sample, own in zip(samples, even, strict=True)]


def pack_batch(batch: Any) -> Any:
    """Return a batch as a `WorkerBatch`, or as it is if a block would not give it back bit for bit."""
    is_gpt = isinstance(batch, Mapping) and batch.keys() >= ROWS.keys()
    if not is_gpt or any(batch[name].ndim != 2 for name in ROWS):
        return batch
    rows = {name: batch[name].numpy() for name in ROWS}
    if any(array.dtype != kind for array, kind in zip(rows.values(), ROWS.values(), strict=True)):
        return batch
    if (block := _build_block(**rows)) is None:
        return batch
    others = {name: value for name, value in batch.items() if name not in ROWS}
    small = {name: value.numpy() for name, value in others.items() if value.nbytes <= INLINE_BYTES}
    return WorkerBatch(as_tensor(block), rows["tokens"].shape[1], tuple(batch), {**others, **small})


def _build_block(
    tokens: NDArray[Any], labels: NDArray[Any], loss_mask: NDArray[Any], position_ids: NDArray[Any]
) -> NDArray[np.int32] | None:
    """Return the block of a batch; None if the batch is not made of it bit for bit."""
    count, length = tokens.shape
    counts_up = bool((position_ids == np.arange(length)).all())
    words = _mask_words(length)
    block = np.zeros((count, length + 1 + (0 if counts_up else length) + words), np.int32)
    block[:, :length], block[:, length : length + 1] = tokens, labels[:, -1:]
    if not counts_up:
        block[:, length + 1 : 2 * length + 1] = position_ids
        if (block[:, length + 1 : 2 * length + 1] != position_ids).any():
            return None
    has_loss = loss_mask == 1
    bits = np.packbits(has_loss, axis=1, bitorder="little")
    block[:, block.shape[1] - words :].view(np.uint8)[:, : bits.shape[1]] = bits
    is_exact = (block[:, :length] == tokens).all() and (block[:, 1 : length + 1] == labels).all()
    # A mask of -0.0 is no mask of 0.0 bit for bit.
    is_mask = (loss_mask.view(np.uint32) == np.where(has_loss, np.float32(1).view(np.uint32), np.uint32(0))).all()
    return block if is_exact and is_mask else None


def _mask_words(length: int) -> int:
    return -(-length // 32)
