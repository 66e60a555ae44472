"""Slots of memory that processes share: one writes an array, another reads it and frees the slot (`native/slots.c`)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import borrow


class SharedSlots:
    """Equal slots, each free or taken.

    Args:
        memory: shared memory of zeros, shape (num_slots, 1 + words), 8 bytes each: the state of a slot, and its array.
    """

    def __init__(self, memory: NDArray[np.float64]) -> None:
        self.memory, self.slot_bytes = memory, 8 * (memory.shape[1] - 1)

    def take(self, slot: int, shape: tuple[int, int]) -> NDArray[np.int32] | None:
        """Return the array in a slot, uninitialized, which is then taken; None if it is taken or too small."""
        fits = 4 * shape[0] * shape[1] <= self.slot_bytes
        return self._array(self._words(slot) + 1, shape) if fits and lib.binidx_take_slot(self._words(slot)) else None

    def receive(self, slot: int, shape: tuple[int, int]) -> NDArray[np.int32]:
        """Return the array in a taken slot; the slot is free when the last view of the array is gone."""

        # A forked child has the array, too, and must not free the slot. The memory must outlive the array.
        # At exit the module's names may be gone, so all are arguments.
        def give(
            words: Any, memory: Any = self.memory, getpid: Any = os.getpid, pid: int = os.getpid(), lib: Any = lib
        ) -> None:
            if memory is not None and getpid() == pid:
                lib.binidx_give_slot(words - 1)

        return self._array(ffi.gc(self._words(slot) + 1, give), shape)

    def _words(self, slot: int) -> Any:
        return ffi.cast("int64_t *", borrow(self.memory)) + slot * self.memory.shape[1]

    @staticmethod
    def _array(words: Any, shape: tuple[int, int]) -> NDArray[np.int32]:
        return np.frombuffer(ffi.buffer(words, 4 * shape[0] * shape[1]), np.int32).reshape(shape)
