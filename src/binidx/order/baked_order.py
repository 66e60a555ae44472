"""Order of a baked run: its samples are stored as sequences, in the order in which the run consumes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.order.blended_order import MembersOrder
from binidx.order.order_protocols import Numbers
from binidx.order.sequences import SequenceOrder


class BakedOrder(MembersOrder):
    """Order of a bake: position i of the run is a sequence of a part.

    Args:
        fingerprint: identity of the order that was baked.
        positions: positions of the run that are stored.
        samples_per_part: number of samples in each part but the last.
        members: the order of each part.
    """

    def __init__(
        self, fingerprint: str, positions: range, samples_per_part: int, members: Sequence[SequenceOrder]
    ) -> None:
        self.fingerprint, self.positions = fingerprint, positions
        self.samples_per_part, self.members = samples_per_part, members

    @property
    def identity(self) -> Any:
        return {"class": "BakedOrder", "fingerprint": self.fingerprint}

    def __len__(self) -> int:
        return self.positions.stop

    def list_sources(self) -> NDArray[np.int16]:
        positions = np.maximum(np.arange(len(self)), self.positions.start)
        return self.locate(positions)[0].astype(np.int16)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        if len(samples) and not (self.positions.start <= samples.min() and samples.max() < self.positions.stop):
            asked, stored = f"{samples.min()} to {samples.max()}", f"{self.positions.start} to {self.positions.stop}"
            raise IndexError(f"positions {asked}: not stored (those from {stored} are)")
        part, number = np.divmod(samples - self.positions.start, self.samples_per_part)
        return part, number

    def find(self, source: int, sequences: Numbers) -> Numbers:
        return self.positions.start + source * self.samples_per_part + sequences
