"""Batches of samples, and how they cross from a DataLoader worker to the trainer.

Samples of different lengths become one row of a batch (THD), and bounds of sequences are padded to equal numbers:

    cu_seqlens of two rows       0 3 8        0 3 8 8       as Megatron's inter-document masking pads them:
                                 0 2 5 8      0 2 5 8       empty sequences at the end

    samples of 2, 4 and 2        a a | b b b b | c c        one row, with the start of each and its end without pads

torch sends each tensor of a worker's batch through a file descriptor of its own: about 100 us a tensor. A GPT batch has
five to seven, of 28 bytes a token. It crosses as one tensor of 4.1 bytes a token:

    row of the block, int32     | tokens, then the last label | positions, unless 0, 1, 2, .. | bits of the loss mask |
                                          S + 1                             S                   S / 32, unless all are 1

The block lies in memory that the loader shares with its workers (`SharedBlocks`), and only its place is sent. A batch
that the block would not give back bit for bit, such as one of 64-bit ids, of weighted losses, or with other values than
tensors that NumPy can show, crosses as it is. Small tensors, such as `dataset_id`, are pickled with the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import (
    Samples,
    Tensor,
    as_tensor,
    collate_by_torch,
    in_worker,
    reading_worker,
    shared_zeros,
)
from binidx.format.idx import DType
from binidx.native.gpt_samples import GPTRows, Recipe
from binidx.native.shared_slots import SharedSlots

LENGTHS = ("original_seq_len", "padded_seq_len")
ROWS = {"tokens": np.int64, "labels": np.int64, "loss_mask": np.float32, "position_ids": np.int64}
"""Keys of which a block is made, each of shape (B, S)."""

ONE = np.float32(1).view(np.uint32)

INLINE_BYTES = 1 << 14
"""Most bytes of a tensor that is pickled with the block."""


@dataclass(frozen=True)
class WorkerBatch:
    """GPT batch as a block.

    Attributes:
        block: int32, a row for each sample.
        length: S.
        has_positions, has_mask: whether the block has positions, and the bits of the loss mask.
        names: keys of the batch, in their order.
        others: tensors that are not in the block; small ones as arrays.
    """

    block: Tensor
    length: int
    has_positions: bool
    has_mask: bool
    names: tuple[str, ...]
    others: Mapping[str, Any]

    def unpack(self, *, pin: bool = False) -> dict[str, Tensor]:
        """Return the batch.

        Args:
            pin: whether its memory is pinned for copies to a GPU.
        """
        block, length, code = self.block.numpy(), self.length, DType.code_from_dtype(np.int32)
        rows = GPTRows(Recipe(length, pad=-1), len(block))
        text = [memoryview(row[: length + 1]).cast("B") for row in block]
        rows.fill(text, np.arange(len(block) + 1), range(len(block)), dtype_code=code, item_bytes=block.itemsize)
        if self.has_positions:
            rows.positions[:] = block[:, length + 1 : 2 * length + 1]
        if self.has_mask:
            bits = np.ascontiguousarray(block[:, block.shape[1] - mask_words(length) :]).view(np.uint8)
            rows.loss_mask[:] = np.unpackbits(bits, axis=1, count=length, bitorder="little")
        arrays = {name: value for name, value in self.others.items() if isinstance(value, np.ndarray)}
        arrays |= {"tokens": rows.tokens, "labels": rows.labels, "loss_mask": rows.loss_mask}
        tensors = {**self.others, **{name: as_tensor(value) for name, value in arrays.items()}}
        tensors["position_ids"] = as_tensor(rows.positions)
        return {name: tensors[name].pin_memory() if pin else tensors[name] for name in self.names}


@dataclass(frozen=True)
class SentBatch:
    """Batch as a worker sends it; the trainer's process unpickles it as a `WorkerBatch`.

    Attributes:
        place: arguments of `receive_block`.
        batch: the batch, which is sent without its block.
    """

    place: tuple[int, int, tuple[int, int]]
    batch: WorkerBatch

    def __reduce__(self) -> Any:
        return _receive_batch, (self.place, {**vars(self.batch), "block": None})


def _receive_batch(place: tuple[int, int, tuple[int, int]], fields: dict[str, Any]) -> WorkerBatch:
    return WorkerBatch(**{**fields, "block": as_tensor(receive_block(*place))})


@dataclass(frozen=True)
class CollateForTrainer:
    """Function that returns the batch of `collate`; in a worker as a `SentBatch` or `WorkerBatch`, if it can be one.

    Args:
        blocks: memory shared with the workers; None: there are no workers.
    """

    blocks: SharedBlocks | None = None

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = collate(samples)
        return pack_batch(batch, self.blocks) if in_worker() else batch

    @classmethod
    def for_workers(cls, num_workers: int, num_ahead: int, num_samples: int, length: int) -> CollateForTrainer:
        """Return the function for new workers.

        Args:
            num_workers: their number; 0 reads in this process.
            num_ahead: batches that a worker sends before the trainer takes them.
            num_samples: samples of a batch, B.
            length: S; 0 if it is unknown.
        """
        if not num_workers or not length:
            return cls()
        return cls(SharedBlocks(num_workers, num_ahead + 2, 4 * num_samples * (2 * length + 1 + mask_words(length))))


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


def pack_batch(batch: Any, blocks: SharedBlocks | None = None) -> Any:
    """Return a batch as a `WorkerBatch`, or as it is if a block would not give it back bit for bit.

    Args:
        batch: the batch.
        blocks: memory for the block, which is then that of a `SentBatch`; None, or no free slot: new memory.
    """
    arrays = {name: _as_array(value) for name, value in batch.items()} if type(batch) is dict else {}
    rows = [array for name in ROWS if (array := arrays.get(name)) is not None]
    has_rows = [array.dtype for array in rows] == [*ROWS.values()] and rows[0].ndim == 2 and rows[0].size
    if not has_rows or len({array.shape for array in rows}) > 1 or any(array is None for array in arrays.values()):
        return batch
    tokens, labels, loss_mask, positions = rows
    length, ones = tokens.shape[1], loss_mask.view(np.uint32) == ONE
    has_positions, has_mask = bool((positions != np.arange(length)).any()), not ones.all()
    is_exact = (
        (labels[:, :-1] == tokens[:, 1:]).all()
        # Numbers of 31 bits: negative ones would be pads to `GPTRows`.
        and all(
            array.min() >= 0 and array.max() < 1 << 31
            for array in (tokens, labels[:, -1], *([positions] if has_positions else ()))
        )
        and (not has_mask or np.count_nonzero(loss_mask.view(np.uint32)) == np.count_nonzero(ones))
    )
    if not is_exact:
        return batch
    columns = [tokens, labels[:, -1:], *([positions] if has_positions else ())]
    words = mask_words(length) if has_mask else 0
    shape = len(tokens), sum(column.shape[1] for column in columns) + words
    slot, block = (blocks and blocks.take(shape)) or (None, np.empty(shape, np.int32))
    np.concatenate(columns, axis=1, out=block[:, : block.shape[1] - words], casting="unsafe")
    if has_mask:
        bits = np.packbits(ones, axis=1, bitorder="little")
        block[:, -1] = 0
        block[:, block.shape[1] - words :].view(np.uint8)[:, : bits.shape[1]] = bits
    others = {name: value for name, value in batch.items() if name not in ROWS}
    small = {name: array for name in others if (array := arrays[name]) is not None and array.nbytes <= INLINE_BYTES}
    packed = WorkerBatch(as_tensor(block), length, has_positions, has_mask, tuple(batch), {**others, **small})
    return packed if blocks is None or slot is None else SentBatch((blocks.number, slot, shape), packed)


def _as_array(value: Any) -> NDArray[Any] | None:
    """Return a tensor as an array; None for another value, or a tensor of a type that NumPy lacks."""
    try:
        return np.asarray(value.numpy())
    except (AttributeError, TypeError, RuntimeError):
        return None


def mask_words(length: int) -> int:
    """Return the number of words with the bits of `length` masks."""
    return -(-length // 32)


MAX_SHARED_BYTES = 32 << 20
"""Most memory of a loader's slots; a container often has no more than twice as much shared memory."""


_numbers = itertools.count()


_blocks: WeakValueDictionary[int, SharedBlocks] = WeakValueDictionary()
"""Blocks of this process's loaders by their number, as torch's queue can hand over no more than a number."""


class SharedBlocks:
    """Slots for the int32 blocks of a loader's workers: memory, allocated once, that both processes map.

        worker     take a slot ─► write a block ─► send its number ─┐
        trainer    free the slot ◄── last array over it is gone ◄───┘

    torch shares each tensor in memory of its own, whose pages both processes map anew, and sends a file descriptor for
    it: half of the time of a batch. When no slot is free, a block crosses by torch's way.

    Args:
        num_workers: number of workers; each has slots of its own.
        num_slots: slots of a worker; fewer if they would need more than `MAX_SHARED_BYTES`.
        slot_bytes: size of the largest block.
    """

    def __init__(self, num_workers: int, num_slots: int, slot_bytes: int) -> None:
        words = 1 + -(-slot_bytes // 8)
        self.number, self.num_slots = next(_numbers), min(num_slots, MAX_SHARED_BYTES // (8 * words * num_workers))
        self.memory = shared_zeros(max(1, num_workers * self.num_slots), words)
        _blocks[self.number] = self

    def take(self, shape: tuple[int, int]) -> tuple[int, NDArray[np.int32]] | None:
        """Return a free slot of this worker and the array in it; None if none is free, or the array is too large."""
        slots, first = SharedSlots(self.memory.numpy()), reading_worker()[0] * self.num_slots
        arrays = ((slot, slots.take(slot, shape)) for slot in range(first, first + self.num_slots))
        return next(((slot, array) for slot, array in arrays if array is not None), None)


def receive_block(number: int, slot: int, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Return the block that a worker wrote to a slot of this process's `SharedBlocks` of this number."""
    return SharedSlots(_blocks[number].memory.numpy()).receive(slot, shape)
