"""Record of one training step: a line of JSON from the training process to the watching one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Step:
    """One step of the run, and the reads of its process so far.

    Args:
        number: steps of the run done after this one, counted over all processes.
        batch: hash of the batch.
        loss: loss of the step, in nats per token, before its update.
        wait_seconds: time from the request for the batch to its arrival.
        seconds: time of the whole step, waiting included.
        open_seconds: time that this process needed to open the datasets.
        requests: requests to the store by this process since its start; the next two are counted likewise.
        bytes_asked: bytes that the reads requested.
        bytes_moved: bytes that were transferred for them.
        valid_loss: loss on the valid split, after the last step of the run.
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
        """Return the step as one line, without its end."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Step:
        """Return the step of a line that `format` made."""
        return cls(**json.loads(line))
