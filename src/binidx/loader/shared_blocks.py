"""Memory in which workers hand blocks to the trainer: slots, allocated once, that both processes map.

    worker     take a slot ─► write a block ─► send its number ─┐
    trainer    free the slot ◄── last array over it is gone ◄───┘

torch shares each tensor in memory of its own, whose pages both processes map anew, and sends a file descriptor for it:
half of the time of a batch. When no slot is free, a block crosses by torch's way.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import reading_worker, shared_zeros
from binidx.native.shared_slots import SharedSlots

MAX_SHARED_BYTES = 32 << 20
"""Most memory of a loader's slots; a container often has no more than twice as much shared memory."""

_numbers = itertools.count()
_blocks: WeakValueDictionary[int, SharedBlocks] = WeakValueDictionary()
"""Blocks of this process's loaders by their number, as torch's queue can hand over no more than a number."""


class SharedBlocks:
    """Slots for the int32 blocks of a loader's workers.

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
