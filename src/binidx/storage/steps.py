"""Shells of machines as generators of effects, and how a thread carries them out.

    def build() -> Steps[bytes]:
        data = yield from ReadObject(location)       # of the type that the effect returns
        yield from Sleep(0.5)
        return data

    run(build())

A shell is a generator that yields effects, and imports no clock, thread, lock, file or source of chance. `run` carries
them out in this thread; `tests/simulation` carries out the same ones in virtual time, where a process can be killed at
each. An effect that fails raises its error where it was yielded, so `try` and `finally` work as in plain code.

Source: sans-I/O (h11, quinn-proto); effects by generators as in trio's first prototypes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Result = TypeVar("Result", covariant=True)


class Effect(Generic[Result]):
    """One thing that a shell asks for."""

    def perform(self) -> Result:
        """Do it in this process and thread."""
        raise NotImplementedError

    def __iter__(self) -> Generator[Effect[Any], Any, Result]:
        """Yield the effect itself; return its result: `result = yield from effect`."""
        result: Result = yield self
        return result


Steps = Generator[Effect[Any], Any, Result]
"""A shell, or a part of one, and the type of its result."""


def run(steps: Steps[Result]) -> Result:
    """Carry out all effects of a shell in this thread; return its result."""
    error: BaseException | None = None
    try:
        while True:
            try:
                return _carry_out(steps, error)
            except BaseException as raised:
                if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                    raise
                error = raised  # an interrupt beside an effect: the shell cleans up
    finally:
        error = None  # its traceback holds this frame


def _carry_out(steps: Steps[Result], error: BaseException | None) -> Result:
    answer: Any = None
    try:
        while True:
            try:
                effect = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as end:
                result: Result = end.value
                return result
            try:
                answer = error = None
                answer = effect.perform()
            except BaseException as raised:
                error = raised
    finally:
        error = None


@dataclass(frozen=True)
class Sleep(Effect[None]):
    """Pause this shell."""

    seconds: float

    def perform(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Now(Effect[float]):
    """Return the seconds of a clock that never goes back."""

    def perform(self) -> float:
        return time.monotonic()


@dataclass(frozen=True)
class Call(Effect[Result]):
    """Call a function that the shell was given. In a simulation it may yield effects itself."""

    function: Callable[..., Result]
    arguments: tuple[Any, ...] = ()

    def perform(self) -> Result:
        return self.function(*self.arguments)
