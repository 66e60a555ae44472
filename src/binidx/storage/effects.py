"""Effects: the requests, pauses, names and threads that the shell of a machine needs, and how this process has them.

How a shell yields them: see `steps`, whose names are here, too. Those of lock files are in `cache.node_lock`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.storage.cache.block_files import remove_unlocked
from binidx.storage.location import Location
from binidx.storage.requests.listing import list_matches
from binidx.storage.requests.remote_object import read_small
from binidx.storage.steps import Call as Call
from binidx.storage.steps import Effect as Effect
from binidx.storage.steps import Now as Now
from binidx.storage.steps import Result as Result
from binidx.storage.steps import Sleep as Sleep
from binidx.storage.steps import Steps as Steps
from binidx.storage.steps import run as run
from binidx.storage.threads import READS
from binidx.storage.writing.publish import delete_object, put_if_absent, write_object

Arguments = ParamSpec("Arguments")

# Time and chance


@dataclass(frozen=True)
class Chance(Effect[float]):
    """Return a random number, uniform between two bounds."""

    low: float
    high: float

    def perform(self) -> float:
        return random.uniform(self.low, self.high)


@dataclass(frozen=True)
class NewName(Effect[str]):
    """Return a name that nothing else has."""

    def perform(self) -> str:
        return uuid.uuid4().hex


@dataclass(frozen=True)
class ProcessName(Effect[str]):
    """Return the machine and number of this process, for people."""

    def perform(self) -> str:
        return f"{socket.gethostname()}, process {os.getpid()}"


@dataclass(frozen=True)
class ProcessNumber(Effect[int]):
    """Return the number of this process on its machine."""

    def perform(self) -> int:
        return os.getpid()


@dataclass(frozen=True)
class Log(Effect[None]):
    """Log a message.

    Args:
        logger: name of the logger.
        level: as in `logging`.
    """

    logger: str
    level: int
    message: str

    def perform(self) -> None:
        logging.getLogger(self.logger).log(self.level, "%s", self.message)


# Functions that a shell is given, and threads


@dataclass(frozen=True)
class CallInThread(Effect["Future[Result]"]):
    """Call a function that may never return, in a thread that the end of the process does not wait for."""

    function: Callable[..., Result]
    arguments: tuple[Any, ...] = ()

    def perform(self) -> Future[Result]:
        future = Future[Result]()

        def call() -> None:
            try:
                future.set_result(self.function(*self.arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        return future


@dataclass(frozen=True)
class WaitForFutures(Effect["list[Future[Any]]"]):
    """Wait until one of some futures is done, at most for some seconds; return all that are, in their order."""

    futures: Sequence[Future[Any]]
    seconds: float

    def perform(self) -> list[Future[Any]]:
        futures.wait(self.futures, self.seconds, futures.FIRST_COMPLETED)
        return [future for future in self.futures if future.done()]


@dataclass(frozen=True)
class AtOnce(Effect["list[Result]"]):
    """Carry out several requests at once; return their results, or raise the first error when all have ended."""

    effects: Sequence[Effect[Result]]

    def perform(self) -> list[Result]:
        return READS.map(lambda effect: effect.perform(), self.effects)


@dataclass(frozen=True)
class Start(Effect[Any]):
    """Carry out another shell beside this one, in a thread that the end of the process does not wait for."""

    steps: Steps[object]
    name: str

    def perform(self) -> threading.Thread:
        thread = threading.Thread(target=run, args=(self.steps,), name=self.name, daemon=True)
        thread.start()
        return thread


@dataclass(frozen=True)
class WaitForTask(Effect[bool]):
    """Wait for a started shell, at most for some seconds; return whether it has ended."""

    task: Any
    seconds: float

    def perform(self) -> bool:
        self.task.join(self.seconds)
        return not self.task.is_alive()


@dataclass(frozen=True)
class NewSignal(Effect[Any]):
    """Return a new signal between shells of a process."""

    def perform(self) -> threading.Event:
        return threading.Event()


@dataclass(frozen=True)
class SetSignal(Effect[None]):
    """Set a signal, once and for all."""

    signal: Any

    def perform(self) -> None:
        self.signal.set()


@dataclass(frozen=True)
class WaitForSignal(Effect[bool]):
    """Wait until a signal is set, at most for some seconds; return whether it is."""

    signal: Any
    seconds: float

    def perform(self) -> bool:
        return bool(self.signal.wait(self.seconds))


# Small objects in a store


@dataclass(frozen=True)
class ReadObject(Effect["bytes | None"]):
    """Return the bytes of a small object; None if there is none.

    Args:
        patient: whether it outlasts outages; False: for shells with deadlines of their own.
    """

    location: Location
    patient: bool = True

    def perform(self) -> bytes | None:
        return read_small(self.location, patient=self.patient)


@dataclass(frozen=True)
class PutIfAbsent(Effect[bool]):
    """Write an object unless there is another one; return whether it has these bytes now.

    Args:
        durable: whether it is synced on a disk; else a lost node may lose it.
        patient: as of `ReadObject`.
    """

    location: Location
    data: bytes
    durable: bool = False
    patient: bool = True

    def perform(self) -> bool:
        return put_if_absent(self.location, self.data, durable=self.durable, patient=self.patient)


@dataclass(frozen=True)
class WriteObject(Effect[None]):
    """Write or replace an object, at once.

    Args:
        durable, patient: as of `PutIfAbsent`.
    """

    location: Location
    data: bytes
    durable: bool = False
    patient: bool = True

    def perform(self) -> None:
        write_object(self.location, [self.data], durable=self.durable, patient=self.patient)


@dataclass(frozen=True)
class DeleteObject(Effect[None]):
    """Delete an object, if there is one.

    Args:
        patient: as of `ReadObject`.
    """

    location: Location
    patient: bool = True

    def perform(self) -> None:
        delete_object(self.location, patient=self.patient)


@dataclass(frozen=True)
class ListObjects(Effect["list[Location]"]):
    """Return the objects below a folder, without hidden ones, by name."""

    folder: Location

    def perform(self) -> list[Location]:
        with contextlib.suppress(ObjectNotFoundError):
            return [self.folder.beside(uri) for uri in list_matches(self.folder + "/")]
        return []


@dataclass(frozen=True)
class RemoveFolder(Effect[None]):
    """Remove a folder of a disk, and what killed writers left in it, unless it holds something else.

    Staging files of living writers, such as another call of the same job, are locked: they stay, and the folder, too.
    """

    folder: Location

    def perform(self) -> None:
        if (path := self.folder.local_path) is not None:
            with contextlib.suppress(OSError):
                for staging in Path(path).glob("*.tmp"):
                    remove_unlocked(str(staging))
                os.rmdir(path)


def suppressed(steps: Steps[Result], error: type[Exception] = StorageError) -> Steps[Result | None]:
    """Carry out steps; return None if they raise `error`."""
    with contextlib.suppress(error):
        return (yield from steps)
    return None


def blocking(shell: Callable[Arguments, Steps[Result]]) -> Callable[Arguments, Result]:
    """Return a function that carries out a shell in the calling thread."""

    @functools.wraps(shell)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return run(shell(*args, **kwargs))

    return call
