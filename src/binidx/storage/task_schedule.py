"""Order of background tasks: the one that has been due for the longest time runs next.

    event                           the task is due
    added                           after its `seconds`
    token: its object is gone       at once; it leaves then
    token: a further task           at once; it leaves then
    run                             after its `seconds`; one without leaves
    failed, and its object is gone  after its `seconds`, to leave then
    exit                            at once, as all others; then the exit's own task

A token is due at its arrival, so tokens hold up no task that is due, however many there are, and tasks that are always
due hold up no token. The thread takes at most one token before each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

Task = Callable[[], object]


@dataclass(eq=False)
class ScheduledTask:
    """Task under its key, the time at which it is due, the seconds between two runs, and whether its object is gone."""

    key: Task
    task: Task
    due: float
    seconds: float = inf
    is_gone: bool = False


class TaskSchedule:
    """Tasks of one thread, by their keys. Other threads may only call `add`, and take tasks from the dictionary.

    Args:
        exit_seconds: longest time that the end of a process waits.
    """

    def __init__(self, exit_seconds: float = 10.0) -> None:
        self.tasks, self.exit_seconds, self._exit_at = dict[Task, ScheduledTask](), exit_seconds, inf

    def add(self, key: Task, task: Task, seconds: float, now: float) -> None:
        """Add a task that runs once, or every `seconds`."""
        self.tasks[key] = ScheduledTask(key, task, now + seconds, seconds)

    def receive(self, token: Task, now: float) -> None:
        """Let the task of a key be due, or the token itself."""
        scheduled = self.tasks.setdefault(token, ScheduledTask(token, token, now))
        scheduled.due, scheduled.is_gone = min(scheduled.due, now), True

    def exit(self, done: Task, now: float) -> None:
        """Let all tasks be due, and then another one."""
        for scheduled in [*self.tasks.values()]:
            scheduled.due = min(scheduled.due, now)
        self.receive(done, now)

    def exit_wait(self, now: float) -> float:
        """Return for how many seconds an exit waits, which are counted from the first call on."""
        self._exit_at = min(self._exit_at, now + self.exit_seconds)
        return max(0.0, self._exit_at - now)

    def wait(self, now: float) -> float:
        """Return the seconds until a task is due."""
        return max(0.0, min([1e9, *(scheduled.due - now for scheduled in [*self.tasks.values()])]))

    def next(self, now: float) -> ScheduledTask | None:
        """Return the task that runs now; None if there is none."""
        first = min([*self.tasks.values()], key=lambda scheduled: scheduled.due, default=None)
        if first is None or first.due > now:
            return None
        first.due = now + first.seconds
        return self.tasks.pop(first.key, None) if first.is_gone or first.seconds == inf else first

    def fail(self, failed: ScheduledTask, now: float) -> None:
        """Let a task run again whose object is gone; the others do, unless they run once."""
        if failed.seconds < inf:
            failed.due = now + failed.seconds
            self.tasks[failed.key] = failed
