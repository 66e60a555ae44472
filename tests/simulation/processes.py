"""Simulated driver of effects: processes of nodes, whose shells run in virtual time and can be killed at each effect.

    world = World(seed)
    process = Process(world, Node("node 3"), Objects(world))
    task = process.start(shell(...), "build")        # the same shell that `binidx.storage.effects.run` carries out
    process.kill()                                   # at this moment: its locks go, its requests may still arrive
    world.run(until=60.0)
    task.result, task.error

Each effect is an event of the trace. A request to the store takes a way there, at whose end it happens, and a way back;
the process may be killed, or the response lost, in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from simulation.world import World

from binidx.errors import StorageError
from binidx.storage import effects
from binidx.storage.effects import Steps
from binidx.storage.location import Location


@dataclass
class Node:
    """Machine: its name, the clock's offset of its processes, and (begin, end) in which it has no network."""

    name: str
    clock: float = 0.0
    cuts: list[tuple[float, float]] = field(default_factory=list)


def is_within(times: list[tuple[float, float]], now: float) -> bool:
    return any(begin <= now < end for begin, end in times)


class Objects:
    """Store of small objects. What a write of a killed process does is drawn: it arrives, or it does not.

    Args:
        round_trip: median seconds of a request.
        lost_share: requests that fail; half of them have arrived.
        slow_share: requests that take a hundred times as long.
        is_conditional: whether put-if-absent is atomic; without, two may succeed.
        can_write, can_delete: whether the store allows that.

    Attributes:
        data: URI -> bytes.
        outages: (begin, end) in which all requests fail.
    """

    def __init__(
        self, world: World, *, round_trip: float = 0.03, lost_share: float = 0.0, slow_share: float = 0.0
    ) -> None:
        self.world, self.round_trip, self.lost_share, self.slow_share = world, round_trip, lost_share, slow_share
        self.is_conditional = self.can_write = self.can_delete = True
        self.data: dict[str, bytes] = {}
        self.outages: list[tuple[float, float]] = []

    def one_way(self) -> float:
        """Return the seconds of half a request."""
        draw = self.world.random.random
        return self.round_trip * (0.4 + 0.2 * draw()) * (100.0 if draw() < self.slow_share else 1.0)

    def is_out(self) -> bool:
        return is_within(self.outages, self.world.now)

    def apply(self, effect: effects.Effect[Any]) -> Any:
        """Do what a request asks for, at the moment at which it arrives.

        Raises:
            StorageError: the store does not allow it.
        """
        match effect:
            case effects.ReadObject(location):
                return self.data.get(location.uri)
            case effects.PutIfAbsent(location, data):
                self._check(self.can_write, location.uri)
                if location.uri in self.data and self.is_conditional:
                    return self.data[location.uri] == data  # as of a request that is sent again: `put_if_absent`
                self.data[location.uri] = data
                return True
            case effects.WriteObject(location, data):
                self._check(self.can_write, location.uri)
                self.data[location.uri] = data
            case effects.DeleteObject(location):
                self._check(self.can_delete, location.uri)
                self.data.pop(location.uri, None)
            case effects.ListObjects(folder):
                return [Location(uri) for uri in sorted(self.data) if uri.startswith(f"{folder.uri}/")]
        return None

    def _check(self, allowed: bool, uri: str) -> None:
        if not allowed:
            raise StorageError(f"{uri}: not allowed")


REQUESTS = (
    *(effects.ReadObject, effects.PutIfAbsent, effects.WriteObject, effects.DeleteObject),
    effects.ListObjects,
)


def lost_response(problem: str) -> StorageError:
    """Return the error of a request that got no response, which `is_transient` tells from a refusal."""
    error = StorageError(problem)
    error.__cause__ = TimeoutError(problem)
    return error


class Signal:
    """Signal between tasks of a process."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        self.is_set = True
        for wake in self.waiting:
            wake()
        self.waiting.clear()


@dataclass
class Task:
    """Shell that runs in a process.

    Attributes:
        result, error: of the shell, when it has ended; `ended` is set then.
        called: task of the function that it has called, and waits for.
        num_resumed: how often it was resumed, without what an interrupt has made void.
    """

    name: str
    steps: Generator[effects.Effect[Any], Any, Any]
    result: Any = None
    error: BaseException | None = None
    ended: Signal = field(default_factory=Signal)
    called: Task | None = None
    num_resumed: int = 0


class Process:
    """Process of a node. Other kinds of effects are added to `performers`: a function of the effect and the task.

    Args:
        objects: store of its requests.
        pause: most seconds between an effect and the next one: what the processor takes, and its queue.

    Attributes:
        is_alive: False once it was killed.
        on_kill: called when it is killed, as for its locks.
        on_effect: called before each effect; may kill or stop the process.
    """

    def __init__(self, world: World, node: Node, objects: Objects, name: str = "process", pause: float = 0.001) -> None:
        self.world, self.node, self.objects, self.pause = world, node, objects, pause
        self.name = f"{node.name} {name}"
        self.is_alive, self.stopped_until = True, 0.0
        self.on_kill: list[Callable[[], None]] = []
        self.on_effect: list[Callable[[effects.Effect[Any], Task], None]] = []
        self.tasks: list[Task] = []
        self.performers: dict[type, Callable[[Any, Task], None]] = {
            effects.Now: lambda effect, task: self.answer(task, world.now + node.clock),
            effects.Sleep: lambda effect, task: self.answer(task, None, effect.seconds),
            effects.Chance: lambda effect, task: self.answer(task, world.random.uniform(effect.low, effect.high)),
            effects.NewName: lambda effect, task: self.answer(task, f"{world.random.getrandbits(64):016x}"),
            effects.ProcessName: lambda effect, task: self.answer(task, self.name),
            effects.ProcessNumber: lambda effect, task: self.answer(task, int(self.name.rpartition(" ")[2])),
            effects.Log: lambda effect, task: self.answer(task, None),
            effects.Call: self._call,
            effects.Start: lambda effect, task: self.answer(task, self.start(effect.steps, effect.name)),
            effects.WaitForTask: lambda effect, task: self._wait(effect.task.ended, effect.seconds, task),
            effects.NewSignal: lambda effect, task: self.answer(task, Signal()),
            effects.SetSignal: lambda effect, task: self.answer(task, effect.signal.set()),
            effects.WaitForSignal: lambda effect, task: self._wait(effect.signal, effect.seconds, task),
            effects.AtOnce: self._at_once,
            effects.CallInThread: self._call_in_thread,
            effects.WaitForFutures: self._wait_for_futures,
            effects.RemoveFolder: lambda effect, task: self.answer(task, None),
            **dict.fromkeys(REQUESTS, self._request),
        }

    def start(self, steps: Steps[Any], name: str) -> Task:
        """Begin to carry out a shell; return its task."""
        task = Task(name, steps)
        self.tasks.append(task)
        self.answer(task, None)
        return task

    def kill(self) -> None:
        """End the process at this moment: no effect of its shells is carried out any more."""
        if self.is_alive:
            self.is_alive = False
            for release in self.on_kill:
                release()
            for task in self.tasks:
                _discard(task.steps)

    def stop(self, seconds: float) -> None:
        """Stop the process for some seconds, as SIGSTOP does; what happens to it meanwhile comes when it goes on."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def answer(self, task: Task, value: Any, seconds: float = 0.0, error: BaseException | None = None) -> None:
        """Give a shell the result of its effect after some seconds, or let it raise."""
        pause = seconds + self.pause * self.world.random.random()
        event = f"{task.name}: " + (f"{type(error).__name__}" if error else short(value))
        self.world.later(pause, self.name, event, self._resume, task, task.num_resumed, value, error)

    def interrupt(self, task: Task) -> None:
        """Raise KeyboardInterrupt in a shell, or in the function that it has called, in place of its next result."""
        while task.called is not None and not task.called.ended.is_set:
            task = task.called
        task.num_resumed += 1
        self.answer(task, None, error=KeyboardInterrupt())

    def _resume(self, task: Task, num_resumed: int, value: Any, error: BaseException | None) -> str | None:
        if not self.is_alive:
            return "(killed)"
        if num_resumed != task.num_resumed:
            return "(interrupted)"
        if self.world.now < self.stopped_until:
            self.answer(task, value, self.stopped_until - self.world.now, error)
            return "(stopped)"
        task.num_resumed += 1
        try:
            effect = task.steps.send(value) if error is None else task.steps.throw(error)
        except StopIteration as end:
            task.result = end.value
            return self._end(task, f"returns {short(end.value)}")
        except AssertionError:
            raise
        except (Exception, KeyboardInterrupt) as raised:
            task.error = raised
            return self._end(task, f"raises {type(raised).__name__}")
        for hook in self.on_effect:
            hook(effect, task)
        if not self.is_alive:
            return f"(killed before {short(effect)})"
        self.performers[type(effect)](effect, task)
        return short(effect)

    def _end(self, task: Task, action: str) -> str:
        self.tasks.remove(task)
        task.ended.set()
        return action

    def _call(self, effect: effects.Call[Any], task: Task) -> None:
        try:
            result = effect.function(*effect.arguments)
        except AssertionError:
            raise
        except Exception as error:
            return self.answer(task, None, error=error)
        if isinstance(result, effects.Effect):
            return self.performers[type(result)](result, task)
        if not isinstance(result, Generator):
            return self.answer(task, result)
        task.called = inner = self.start(result, f"{task.name} {getattr(effect.function, '__name__', 'call')}")
        turn = task.num_resumed

        def end() -> None:
            if turn == task.num_resumed:
                self.answer(task, inner.result, error=inner.error)

        inner.ended.waiting.append(end)
        return None

    def _call_in_thread(self, effect: effects.CallInThread[Any], task: Task) -> None:
        inner, future = self.start(iter(effects.Call(effect.function, effect.arguments)), task.name), Future[Any]()

        def settle() -> None:
            # The caller takes errors for those of the thing that it asks: one of the call itself would be hidden.
            assert not isinstance(inner.error, TypeError | AttributeError | NameError), repr(inner.error)
            future.set_exception(inner.error) if inner.error else future.set_result(inner.result)

        inner.ended.waiting.append(settle)
        self.answer(task, future)

    def _at_once(self, effect: effects.AtOnce[Any], task: Task) -> None:
        tasks = [self.start(iter(single), f"{task.name} {place}") for place, single in enumerate(effect.effects)]

        def end() -> None:
            if all(inner.ended.is_set for inner in tasks):
                error = next((inner.error for inner in tasks if inner.error), None)
                self.answer(task, [inner.result for inner in tasks], error=error)

        for inner in tasks:
            inner.ended.waiting.append(end)
        if not tasks:
            end()

    def _wait_for_futures(self, effect: effects.WaitForFutures, task: Task) -> None:
        signal = Signal()
        for future in effect.futures:
            future.add_done_callback(lambda _: signal.set())
        self._wait(signal, effect.seconds, task, lambda _: [future for future in effect.futures if future.done()])

    def _wait(self, signal: Signal, seconds: float, task: Task, result: Callable[[bool], Any] = bool) -> None:
        is_over, turn = False, task.num_resumed

        def end(value: bool) -> None:
            nonlocal is_over
            if not is_over and turn == task.num_resumed:
                is_over = True
                self.answer(task, result(value))

        if signal.is_set:
            return end(True)
        signal.waiting.append(lambda: end(True))
        return self.world.later(seconds, self.name, f"{task.name}: time is over", lambda: end(signal.is_set))

    def _request(self, effect: effects.Effect[Any], task: Task) -> None:
        event = f"{task.name}: arrives"
        self.world.later(self.objects.one_way(), self.name, event, self._arrive, effect, task, task.num_resumed)

    def _arrive(self, effect: effects.Effect[Any], task: Task, num_resumed: int) -> str:
        draw, objects = self.world.random.random, self.objects
        if not self.is_alive and draw() < 0.5:
            return "lost"
        lost, error, value = draw() < objects.lost_share, None, None
        if objects.is_out() or is_within(self.node.cuts, self.world.now) or (lost and draw() < 0.5):
            error = lost_response("no response")
        else:
            try:
                value = objects.apply(effect)
            except StorageError as refusal:
                error = refusal
            if lost:
                error = lost_response("the response is lost")
        if num_resumed == task.num_resumed:
            self.answer(task, value, objects.one_way(), error)
        return "lost" if lost else f"{short(value)}"


class _KilledError(BaseException):
    """Ends the generators of a killed process."""


def _discard(steps: Steps[Any]) -> None:
    """End a generator without its effects: Python would complain of one that still yields when it is collected."""
    with contextlib.suppress(_KilledError, StopIteration):
        while True:
            steps.throw(_KilledError())


def short(value: object) -> str:
    """Return at most 100 characters of a value for the trace, always the same: no address, no order of a set."""
    kind = type(value)
    if value is None or kind is int or kind is float or kind is bool:
        return repr(value)
    if kind is str or kind is bytes:
        text = repr(value[:100])  # type: ignore[index]
    elif isinstance(value, effects.Effect):
        text = f"{kind.__name__}({', '.join([short(getattr(value, name)) for name in _field_names(kind)])})"
    elif kind is Location:
        text = value.uri  # type: ignore[attr-defined]
    elif kind is tuple or kind is list:
        text = f"({', '.join(map(short, value[:50]))})"  # type: ignore[index]
    else:
        text = getattr(value, "__name__", kind.__name__) if callable(value) else kind.__name__
    return text if len(text) <= 100 else f"{text[:97]}..."


@functools.cache
def _field_names(kind: Any) -> list[str]:
    return [found.name for found in dataclasses.fields(kind)]
