"""The first process of a node, those that wait for it, and what the kernel does when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from binidx.index.cache import node_lock
from binidx.index.cache.node_lock import acquire_node_lock

HOLDER = """
import os, sys, time
from binidx.index.cache.node_lock import acquire_node_lock
with node_turn(sys.argv[1]) as turn:
    assert turn.first
    {work}
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{tmp_path}/turns/one.lock"


def holder(path: str, work: str = "pass") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(work=work), path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def held(path: str) -> Iterator[subprocess.Popen[str]]:
    with holder(path) as process:
        yield process
        process.kill()


def test_those_that_waited_are_told_what_the_first_one_left(path: str) -> None:
    left: list[bytes] = []

    def wait() -> None:
        with acquire_node_lock(path) as turn:
            assert not turn.first
            left.append(turn.left)

    for word in (b"first", b"second", b""):
        with acquire_node_lock(path) as turn:
            assert turn.first
            assert turn.node
            waiting = [threading.Thread(target=wait) for _ in range(3)]
            [each.start() for each in waiting]
            time.sleep(0.1)
            assert not left
            if word:
                turn.leave(word)
        [each.join() for each in waiting]
        assert left == [word] * 3, "what an earlier one left is no news"
        left.clear()


def test_the_lock_of_a_killed_process_is_free_at_once(path: str, held: subprocess.Popen[str]) -> None:
    threading.Timer(0.2, held.send_signal, [signal.SIGKILL]).start()
    began = time.monotonic()
    with acquire_node_lock(path) as turn:
        assert not turn.first
        assert time.monotonic() - began > 0.1
    with acquire_node_lock(path) as turn:
        assert turn.first


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(path: str) -> None:
    # The child tells: by then it is past what it does after a fork.
    work = "child = os.fork()\n    child or print(os.getpid(), flush=True)\n    time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(work=work), path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with acquire_node_lock(path) as turn:
            assert turn.first
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_who_waits_can_be_called_away(path: str, held: subprocess.Popen[str]) -> None:
    def check() -> None:
        raise TimeoutError("called away")

    with pytest.raises(TimeoutError, match="called away"), acquire_node_lock(path, check):
        pass


def test_two_names_of_a_node_are_never_equal_and_one_stays(tmp_path: Path) -> None:
    def name(path: Path) -> str:
        with acquire_node_lock(str(path)) as turn:
            return turn.node

    assert name(tmp_path / "a") == name(tmp_path / "a") != name(tmp_path / "b")


@pytest.mark.parametrize("place", [None, "/proc/nowhere/a.lock"])
def test_without_a_directory_everybody_is_first(place: str | None) -> None:
    with acquire_node_lock(place) as one, acquire_node_lock(place) as other:
        assert one.first
        assert other.first
        one.leave(b"nobody reads it")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_that_somebody_put_in_the_place_of_a_lock_is_not_followed(path: str, tmp_path: Path, link: Any) -> None:
    """In a directory that others may write to: its name is no secret."""
    (tmp_path / "precious").write_text("of another program")
    os.mkdir(os.path.dirname(path))
    link(tmp_path / "precious", path)
    with acquire_node_lock(path) as turn:
        assert turn.first
        turn.leave(b"what waiting processes are told")
    assert (tmp_path / "precious").read_text() == "of another program"


def test_locks_that_nobody_took_for_a_day_are_removed_unless_they_are_held(
    path: str, held: subprocess.Popen[str]
) -> None:
    directory = Path(path).parent
    for name in ("old.lock", "new.lock", "old.txt"):
        (directory / name).touch()
    for name in ("old.lock", "old.txt", "one.lock"):
        os.utime(directory / name, (time.time() - 90_000,) * 2)
    for _ in range(2):  # and it goes on working
        node_lock._sweep.cache_clear()
        with acquire_node_lock(f"{directory}/old.lock") as turn:
            assert turn.first
    assert sorted(os.listdir(directory)) == ["new.lock", "old.lock", "old.txt", "one.lock"]
    os.utime(directory / "old.lock", (time.time() - 90_000,) * 2)
    node_lock._sweep.cache_clear()
    with acquire_node_lock(f"{directory}/new.lock"):
        assert sorted(os.listdir(directory)) == ["new.lock", "old.txt", "one.lock"]


def test_who_locks_a_file_that_was_swept_meanwhile_takes_another(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = node_lock._opened

    def open_and_lose(asked: str | None) -> int | None:
        monkeypatch.setattr(node_lock, "_opened", opened)
        descriptor = opened(asked)
        os.unlink(path)
        return descriptor

    monkeypatch.setattr(node_lock, "_opened", open_and_lose)
    with acquire_node_lock(path) as turn:
        assert turn.first
        with subprocess.Popen([sys.executable, "-c", LOOKER, path], stdout=subprocess.PIPE, text=True) as other:
            assert other.communicate()[0] == "False\n"


LOOKER = """
import fcntl, os, sys
from binidx.index.cache.node_lock import _lock
print(_lock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX))
"""
