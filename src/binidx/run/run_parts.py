"""Parts of the jobs over a run: ranges of its samples, made with values that each worker process opens once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from binidx.forks import ProcessLock

Value = TypeVar("Value")


@dataclass(frozen=True)
class RangePart:
    """Part that is a range of tokens, samples or other items."""

    name: str
    items: range

    @property
    def size(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        return self.name


class PerProcess(Generic[Value]):
    """Value for all parts of a job, such as an opened dataset, which each worker process opens once.

    Args:
        value: the value in this process.
        open: picklable call that returns it in another process. Default: the value is pickled.
    """

    _opening = ProcessLock()
    _opened: ClassVar[dict[str, Any]] = {}

    def __init__(self, value: Value, open: Callable[[], Value] | None = None) -> None:
        self._value = value
        self._state = uuid.uuid4().hex, open, None if open else value

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": self._state}

    def get(self) -> Value:
        """Return the value; another process keeps the value of the last job."""
        if "_value" in vars(self):
            return self._value
        job, open, value = self._state
        with self._opening():
            if job not in self._opened:
                self._opened.clear()
                self._opened[job] = open() if open else value
            return cast(Value, self._opened[job])
