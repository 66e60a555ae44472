"""World in virtual time: events in the order of their times, one seed, a trace, and its digest.

    world = World(seed=7)
    world.later(0.5, "node 3", "wake", wake, argument)    # who and event are words of the trace
    world.run(until=60.0)
    world.digest                                          # equal for one seed, in any process

Nothing sleeps, and there is no thread: `run` takes the earliest event, sets the time to its own, and calls it.

Source: FoundationDB's simulation (Zhou et al. 2021); event queues by `heapq`, ties in the order of their creation.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any, ClassVar

LINES = 100_000
"""Lines that a world keeps unformatted; few worlds have more, and few are asked for their digest."""


class World:
    """Queue of events.

    Args:
        seed: of all random choices in the world.
        num_kept: lines of the trace that are kept for a reader: the last ones. The digest is of all.

    Attributes:
        now: virtual time in seconds.
        random: its source of random choices.
        num_events: events so far; `num_events_in_all`: of all worlds of this process.
        trace: the last lines: time, who, event, action. A line is formatted when it is asked for, or leaves.
        invariants: functions that are called after each event, and raise if their claim does not hold.
    """

    num_events_in_all: ClassVar[int] = 0

    def __init__(self, seed: int, num_kept: int = 200) -> None:
        self.seed, self.now, self.num_events = seed, 0.0, 0
        self.random = random.Random(seed)
        self._num_kept, self._lines = num_kept, list[tuple[float, str, str, str | None]]()
        self.invariants: list[Callable[[], None]] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[float, int, str, str, Callable[..., Any], tuple[Any, ...]]] = []
        self._num_created = 0

    @property
    def digest(self) -> str:
        digest = self._digest.copy()
        digest.update("".join(map(_line, self._lines)).encode())
        return digest.hexdigest()

    @property
    def trace(self) -> list[str]:
        return [*map(_line, self._lines[-self._num_kept :])]

    def later(self, seconds: float, who: str, event: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function after some seconds; what it returns is the action that the trace shows."""
        self._num_created += 1
        heapq.heappush(self._queue, (self.now + seconds, self._num_created, who, event, function, arguments))

    def run(self, until: float) -> None:
        """Run all events before a time, and those that they create.

        Raises:
            AssertionError: an invariant does not hold; its notes are the seed, and the last lines of the trace.
        """
        queue, pop, lines = self._queue, heapq.heappop, self._lines
        while queue and queue[0][0] < until:
            self.now, _, who, event, function, arguments = pop(queue)
            self.num_events += 1
            World.num_events_in_all += 1
            try:
                action = function(*arguments)
                for check in self.invariants:
                    check()
            except AssertionError as error:
                error.add_note("\n".join([f"seed {self.seed}", *self.trace, f"{self.now:.6f} {who}: {event}"]))
                raise
            lines.append((self.now, who, event, None if action is None else str(action)))
            if len(lines) >= LINES:
                self._digest.update("".join(map(_line, lines[: -self._num_kept])).encode())
                del lines[: -self._num_kept]
        self.now = max(self.now, until)


def _line(parts: tuple[float, str, str, str | None]) -> str:
    now, who, event, action = parts
    return f"{now:.6f} {who}: {event}" + (f" -> {action}" if action is not None else "")
