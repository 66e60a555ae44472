"""Drivers of effects: a shell returns the same, and cleans up the same, in a process and in a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from simulation.processes import Node, Objects, Process
from simulation.world import World

from binidx.errors import StorageError
from binidx.storage import effects
from binidx.storage.effects import Steps
from binidx.storage.location import Location

Driver = Callable[[Steps[Any]], Any]


def simulated(steps: Steps[Any]) -> Any:
    """Carry out a shell in a simulated process; return its result."""
    world = World(1)
    process = Process(world, Node("node 0"), Objects(world))
    task = process.start(steps, "shell")
    world.run(100.0)
    assert not process.tasks, "the shell has not ended"
    if task.error is not None:
        raise task.error
    return task.result


@pytest.fixture(params=[effects.run, simulated])
def driver(request: pytest.FixtureRequest) -> Driver:
    return request.param  # type: ignore[no-any-return]


def test_objects_are_put_once_replaced_and_deleted(driver: Driver, tmp_path: Path) -> None:
    location = Location.of(tmp_path / "object")

    def shell() -> Steps[list[Any]]:
        first = yield from effects.ReadObject(location)
        won = yield from effects.PutIfAbsent(location, b"one")
        lost = yield from effects.PutIfAbsent(location, b"two")
        again = yield from effects.PutIfAbsent(location, b"one")
        kept = yield from effects.ReadObject(location)
        yield from effects.WriteObject(location, b"three")
        replaced = yield from effects.ReadObject(location)
        yield from effects.DeleteObject(location)
        return [first, won, lost, again, kept, replaced, (yield from effects.ReadObject(location))]

    assert driver(shell()) == [None, True, False, True, b"one", b"three", None]


def test_requests_at_once_return_in_order_and_the_first_error_is_raised_when_all_have_ended(
    driver: Driver, tmp_path: Path
) -> None:
    folder = Location.of(tmp_path)
    names = [folder / name for name in ("b", "a", "c")]

    def fail(name: str) -> None:
        raise StorageError(name)

    def shell() -> Steps[list[Any]]:
        won = yield from effects.AtOnce([effects.PutIfAbsent(name, b"x", durable=True) for name in names])
        again = yield from effects.PutIfAbsent(names[0], b"x")
        listed = yield from effects.ListObjects(folder)
        try:
            yield from effects.AtOnce([effects.Call(fail, ("1",)), effects.Call(fail, ("2",))])
        except StorageError as error:
            problem = str(error)
        none = yield from effects.AtOnce([effects.Call(str)][:0])
        read = yield from effects.AtOnce([effects.ReadObject(name) for name in (*names, folder / "d")])
        yield from effects.AtOnce([effects.DeleteObject(name) for name in names])
        left = yield from effects.ListObjects(folder)
        yield from effects.RemoveFolder(folder)
        return [won, again, [found.name for found in listed], problem, none, read, left]

    assert driver(shell()) == [[True] * 3, True, ["a", "b", "c"], "1", [], [b"x", b"x", b"x", None], []]


def test_futures_are_awaited_until_one_is_done_or_time_is_over(driver: Driver) -> None:
    never = Future[str]()

    def shell() -> Steps[list[Any]]:
        done = yield from effects.CallInThread(str.upper, ("done",))
        failed = yield from effects.CallInThread(int, ("x",))
        first = yield from effects.WaitForFutures([never, done], 60.0)
        yield from effects.WaitForFutures([failed], 60.0)
        nothing = yield from effects.WaitForFutures([never], 0.001)
        return [first == [done], done.result(), type(failed.exception()), nothing]

    assert driver(shell()) == [True, "DONE", ValueError, []]


def test_an_error_is_raised_where_its_effect_was_yielded_and_the_rest_is_cleaned_up(driver: Driver) -> None:
    done = []

    def fail() -> None:
        raise StorageError("broken")

    def shell() -> Steps[str]:
        try:
            yield from effects.Call(fail)
        except StorageError as error:
            done.append(str(error))
        try:
            yield from effects.Call(int, ("x",))
        finally:
            done.append((yield from effects.Call(str.upper, ("cleaned up",))))
        return "not reached"

    with pytest.raises(ValueError, match="invalid literal"):
        driver(shell())
    assert done == ["broken", "CLEANED UP"]


def test_a_started_shell_runs_beside_the_first_one_until_a_signal(driver: Driver) -> None:
    beats = []

    def heartbeat(signal: Any) -> Steps[None]:
        while not (yield from effects.WaitForSignal(signal, 0.005)):
            beats.append((yield from effects.Now()))

    def shell() -> Steps[tuple[bool, bool]]:
        signal = yield from effects.NewSignal()
        task = yield from effects.Start(heartbeat(signal), "heartbeat")
        while not beats:
            yield from effects.Sleep(0.01)
        before = yield from effects.WaitForTask(task, 0.0)
        yield from effects.SetSignal(signal)
        return before, (yield from effects.WaitForTask(task, 60.0))

    assert driver(shell()) == (False, True)
    assert beats == sorted(beats)


def test_an_interrupt_between_two_effects_lets_the_shell_clean_up() -> None:
    done = []

    def shell() -> Steps[None]:
        try:
            raise KeyboardInterrupt
        finally:
            done.append((yield from effects.Call(len, ("four",))))

    with pytest.raises(KeyboardInterrupt):
        effects.run(shell())
    assert done == [4]


def test_a_killed_process_does_nothing_more_and_its_last_write_arrives_or_not() -> None:
    left = set()
    for seed in range(20):
        world = World(seed)
        objects = Objects(world)
        process = Process(world, Node("node 0"), objects)

        def shell() -> Steps[None]:
            try:
                yield from effects.WriteObject(Location.of("s3://bucket/a"), b"a")
                yield from effects.WriteObject(Location.of("s3://bucket/b"), b"b")
            finally:
                yield from effects.WriteObject(Location.of("s3://bucket/c"), b"c")

        process.start(shell(), "shell")
        world.later(0.04, "world", "kill", process.kill)
        world.run(10.0)
        left.add(tuple(sorted(objects.data)))
    assert left == {("s3://bucket/a",), ("s3://bucket/a", "s3://bucket/b")}


def test_a_hook_sees_each_effect_before_it_is_carried_out_and_may_kill_the_process() -> None:
    world = World(1)
    objects = Objects(world)
    process = Process(world, Node("node 0"), objects)
    seen = []

    def shell() -> Steps[None]:
        yield from effects.Sleep(1.0)
        yield from effects.WriteObject(Location.of("s3://bucket/a"), b"a")

    def hook(effect: effects.Effect[Any], task: Any) -> None:
        seen.append(type(effect).__name__)
        if isinstance(effect, effects.WriteObject):
            process.kill()

    process.on_effect.append(hook)
    process.start(shell(), "shell")
    world.run(10.0)
    assert seen == ["Sleep", "WriteObject"]
    assert not objects.data


def test_a_node_without_network_gets_no_response_and_others_do() -> None:
    world = World(1)
    objects = Objects(world)
    location = Location.of("s3://bucket/a")
    tasks = [
        Process(world, node, objects).start(effects.suppressed(iter(effects.PutIfAbsent(location, b"a"))), "put")
        for node in (Node("node 0", cuts=[(0.0, 1.0)]), Node("node 1"))
    ]
    world.run(10.0)
    assert [task.result for task in tasks] == [None, True]
