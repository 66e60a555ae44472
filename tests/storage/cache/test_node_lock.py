"""Locks of a node: the first process, the waiting ones, and the kernel when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from binidx.storage.cache import node_lock
from binidx.storage.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.steps import Steps, run

HOLDER = """
import os, sys, time
from binidx.storage.cache.node_lock import acquire_node_lock
with acquire_node_lock(sys.argv[1]) as lock:
    assert lock.first
    {work}
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{tmp_path}/turns/one.lock"


def holder(path: str, work: str = "pass", printed: list[str] | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(work=work), path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "held\n":
        assert printed is not None
        printed.append(line.strip())
    return process


@pytest.fixture
def held(path: str) -> Iterator[subprocess.Popen[str]]:
    with holder(path) as process:
        yield process
        process.kill()


def test_waiting_processes_read_the_message_of_the_first(path: str) -> None:
    left: list[bytes] = []
    for word in (b"first", b"second", b""):
        with acquire_node_lock(path) as lock:
            assert lock.first
            assert lock.node
            waiting = [start_to_wait(path, left) for _ in range(3)]
            assert not left
            if word:
                lock.leave_message(word)
        [each.join() for each in waiting]
        assert left == [word] * 3, "not the message of an earlier one"
        left.clear()


def start_to_wait(path: str, left: list[bytes]) -> threading.Thread:
    """A thread that waits for the lock, and then appends the message of its holder."""
    waits = threading.Event()

    def wait() -> None:
        with acquire_node_lock(path, waits.set) as lock:
            assert not lock.first
            left.append(lock.message)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(300)
    return thread


def test_the_lock_of_a_killed_process_is_free_at_once(path: str, held: subprocess.Popen[str]) -> None:
    left: list[bytes] = []
    waiting = start_to_wait(path, left)
    assert not left
    held.kill()
    waiting.join()
    assert left == [b""]
    with acquire_node_lock(path) as lock:
        assert lock.first


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(path: str) -> None:
    # The child prints its number when the functions after a fork have run.
    work = "child = os.fork()\n    child or print(os.getpid(), flush=True)\n    time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(work=work), path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with acquire_node_lock(path) as lock:
            assert lock.first
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_check_ends_a_wait(path: str, held: subprocess.Popen[str]) -> None:
    def check() -> None:
        raise TimeoutError("called away")

    with pytest.raises(TimeoutError, match="called away"), acquire_node_lock(path, check):
        pass


def test_two_held_locks_have_different_names_and_that_of_a_killed_holder_stays(tmp_path: Path) -> None:
    with acquire_node_lock(f"{tmp_path}/a") as one, acquire_node_lock(f"{tmp_path}/b") as other:
        assert one.node != other.node
    with holder(f"{tmp_path}/a", "print(lock.node)", said := []) as process:
        process.kill()
    with acquire_node_lock(f"{tmp_path}/a") as lock:
        assert [lock.node] == said


@pytest.mark.parametrize("place", [None, "/proc/nowhere/a.lock"])
def test_without_a_directory_every_process_is_first(place: str | None) -> None:
    with acquire_node_lock(place) as one, acquire_node_lock(place) as other:
        assert one.first
        assert other.first
        one.leave_message(b"not read")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_place_of_a_lock_is_not_followed(path: str, tmp_path: Path, link: Any) -> None:
    """A lock lies in a directory that others may write to, and its name is no secret."""
    (tmp_path / "precious").write_text("of another program")
    os.mkdir(os.path.dirname(path))
    link(tmp_path / "precious", path)
    with acquire_node_lock(path) as lock:
        assert lock.first
        lock.leave_message(b"for waiting processes")
    assert (tmp_path / "precious").read_text() == "of another program"


def test_a_lock_is_removed_by_its_holder_also_after_one_that_was_killed(path: str, held: subprocess.Popen[str]) -> None:
    with acquire_node_lock(f"{os.path.dirname(path)}/two.lock"):
        assert sorted(os.listdir(os.path.dirname(path))) == ["one.lock", "two.lock"]
    held.kill()
    held.wait()
    for _ in range(2):
        with acquire_node_lock(path) as lock:
            assert lock.first
            assert os.listdir(os.path.dirname(path)) == ["one.lock"]
        assert os.listdir(os.path.dirname(path)) == []


def test_a_message_of_a_killed_holder_is_not_read_by_later_processes(path: str) -> None:
    with holder(path, "lock.leave_message(b'of a run that was killed')") as process:
        process.kill()
    with acquire_node_lock(path) as lock:
        assert lock.first
        left: list[bytes] = []
        waiting = start_to_wait(path, left)
    waiting.join()
    assert left == [b""]


def test_a_process_that_locks_a_removed_file_takes_another(path: str) -> None:
    with acquire_node_lock(path):  # makes the directory
        pass
    steps = node_lock.enter(path, lambda: iter(()))  # type: ignore[arg-type,return-value]
    opened = next(steps).perform()
    os.unlink(path)

    def others() -> Steps[NodeLock]:
        answer = opened
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = yield effect

    lock = run(others())
    assert lock.first
    with subprocess.Popen([sys.executable, "-c", LOOKER, path], stdout=subprocess.PIPE, text=True) as other:
        assert other.communicate()[0] == "False\n"
    run(lock.leave())
    assert not os.path.exists(path)


LOOKER = """
import fcntl, os, sys
from binidx.storage.cache.block_files import try_lock
print(try_lock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX))
"""
