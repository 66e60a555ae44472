"""The units of a corpus: slices so small that a sample of them is spread all over it. They are counted, not listed.

jsonl                      each 256 KiB
.zst in frames, parquet    blocks of a MiB and more, row groups
.gz, other .zst            the file: it can be read from its beginning only
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.text.slices import JSONL, Input, Slice, plan_slices

UNIT_BYTES = 256 << 10


class Units:
    """All units of some inputs, in their order.

    Attributes:
        sizes: stored bytes of each, shape (num_units,).
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = [each for each in inputs if each.size]
        sizes = [_sizes(each) for each in self._inputs]
        self._bounds = np.cumsum([0, *map(len, sizes)])
        self.sizes: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *sizes])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Slice:
        """One of them, to be read."""
        place = int(np.searchsorted(self._bounds, number, "right")) - 1
        each, number = self._inputs[place], int(number - self._bounds[place])
        if each.format != JSONL:
            return plan_slices([each], 1)[number]
        first, last = number * UNIT_BYTES, min((number + 1) * UNIT_BYTES, each.size)
        return Slice(each.uri, JSONL, each.identity, first, last, first, last - first, None if first else 0)


def _sizes(each: Input) -> NDArray[np.int64]:
    """Stored bytes of its units."""
    if each.format != JSONL:
        return np.array([piece.num_bytes for piece in plan_slices([each], 1)], np.int64)
    sizes = np.full(-(-each.size // UNIT_BYTES), UNIT_BYTES, np.int64)
    sizes[-1] = each.size - (len(sizes) - 1) * UNIT_BYTES
    return sizes
