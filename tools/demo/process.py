"""Training in a separate process, which can be killed at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from binidx.errors import BinidxError

from .step import Step


class TrainingProcess:
    """A running `python -m binidx.tools.demo.train`, with an iterator over its steps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._killed = False
        self.pid = process.pid

    def steps(self) -> Iterator[Step]:
        """Yield the records of its steps until it ends or is killed.

        Raises:
            BinidxError: it ended with an error, which is on stderr.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield Step.parse(line)
        status = self._process.wait()
        if status and not self._killed:
            raise BinidxError(f"training process {self.pid}: exit status {status}, needed 0; its words are above")

    def kill(self) -> None:
        """Kill it with SIGKILL, without any clean-up."""
        self._killed = True
        self._process.kill()


@contextmanager
def training_process(plan: Path, *, resume: bool) -> Iterator[TrainingProcess]:
    """Start training in a new Python; it ends with the `with` block at the latest."""
    command = [sys.executable, "-m", "binidx.tools.demo.train", str(plan), *(["--resume"] if resume else [])]
    # OpenMP's threads spin while they wait for each other by default. On a free machine that gains nothing; where
    # others work too it cost two thirds of the speed.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    # Its own session: Ctrl-C reaches us alone, and we end it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield TrainingProcess(process)
        finally:
            process.kill()
