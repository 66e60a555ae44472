"""What a training process says of each step to the process that watches it: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Step:
    """One step of the run, and what its process has read so far.

    Args:
        number: steps of the run done after this one, counted over all processes.
        batch: hash of the batch.
        loss: of the step, in nats per token, before its update.
        wait_seconds: from asking for the batch to having it.
        seconds: of the whole step, waiting included.
        open_seconds: what opening the datasets took this process.
        requests: to the store, by this process since its start, opening included; so are the next two.
        bytes_asked: what the reads wanted.
        bytes_moved: what came over the wire for it.
        valid_loss: on the valid split, after the last step of the run.
    """

    number: int
    batch: str
    loss: float
    wait_seconds: float
    seconds: float
    open_seconds: float
    requests: int
    bytes_asked: int
    bytes_moved: int
    valid_loss: float | None = None

    def format(self) -> str:
        """One line, without its end."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Step:
        """The step in a line that `format` made."""
        return cls(**json.loads(line))
