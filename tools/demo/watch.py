"""Watcher of a training process: compares each batch with the order of an uninterrupted run, and prints progress."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean

from binidx.errors import BinidxError

from .plan import Plan
from .screen import Screen
from .step import Step
from .tokenizer import VOCAB_SIZE

MAX_LINES = 12

# A bar this wide is the loss of a blind guess.
BAR_WIDTH = 18
BLIND_LOSS = log(VOCAB_SIZE)


def check_step(step: Step, number: int, order: Sequence[str]) -> None:
    """Raise BinidxError unless this is step `number`, with the batch of an uninterrupted run."""
    if step.number != number:
        raise BinidxError(f"training: found step {step.number}, needed {number}")
    unbroken = order[number - 1]
    if step.batch != unbroken:
        raise BinidxError(f"step {number}: found batch {step.batch}, an unbroken run has {unbroken} there")


def round_interval(num_steps: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 … that gives at most MAX_LINES lines."""
    tens: int = 10 ** max(0, len(str(num_steps)) - 2)
    return next(n * tens for n in (1, 2, 5, 10) if n * tens * MAX_LINES >= num_steps)


class StepLines:
    """One line of output for every few steps, with their means."""

    def __init__(self, plan: Plan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self._interval = round_interval(plan.num_steps)
        self._group: list[Step] = []

    def add(self, step: Step) -> None:
        """Add a step; a line is printed after the first of the run and then at round numbers."""
        self._group.append(step)
        if step.number == 1 or step.number % self._interval == 0:
            self._screen.detail(self._line())
            self._group = []

    def _line(self) -> str:
        loss = fmean(step.loss for step in self._group)
        speed = self._plan.tokens_per_step / fmean(step.seconds for step in self._group)
        wait = 1000 * fmean(step.wait_seconds for step in self._group)
        bar = self._screen.bar(loss / BLIND_LOSS, BAR_WIDTH)
        return f"step {self._group[-1].number:>4}  loss {loss:.2f} {bar} {speed:>6,.0f} tokens/s  wait {wait:4.1f} ms"
