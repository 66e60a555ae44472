"""Interfaces between a run and what differs between `.bin` and `.idx`, and packed files.

    steps ── readings ──► samples        GlobalOrder, packed.packed_run.PackedReading
          ◄─ served_at ──

`RunOrder` joins a reading with an order of samples, and answers every question about both.
"""

from __future__ import annotations

from typing import Any, Protocol

from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.schedule import BatchSchedule


class Reading(Protocol):
    """Reads of samples: rank, step and slot of each."""

    @property
    def schedule(self) -> BatchSchedule:
        """Sizes of the steps, and the number of ranks."""

    @property
    def dataloader_type(self) -> str:
        """Name of the rule by which loaders draw samples."""

    @property
    def knows_earlier(self) -> bool:
        """True if the order has the samples that were read before the first step."""

    @property
    def identity(self) -> Any:
        """The values on which the reads depend, as JSON."""

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None if it starts over."""

    def num_steps(self) -> int | None:
        """Return the first step after the run; None if it has no end."""

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of some steps, of one rank or all, sorted by step, rank and slot."""

    def served_at(self, samples: Numbers, stop: int) -> SampleReads:
        """Return all reads of some samples at positions before `stop`, in the order of the steps."""

    def samples_at(self, position: Numbers) -> Numbers:
        """Return the sample at each position."""

    def count_passes(self, num_epochs: int, stop_step: int) -> int:
        """Return the number of passes over a source that have begun before a step, or more.

        Args:
            num_epochs: that of the order.
            stop_step: the step.
        """
