"""A claim: an object that says somebody is at work on something, and by its changes that he is alive.

    {"holder": "9f3c...", "state": "building", "beat": 7, "where": "node7, process 4242", "node": "...", "error": "",
     "done": {...}}

    taken        put-if-absent: of many one gets it. A store without that lets two have it
    held         rewritten every BEAT_SECONDS by a thread of the holder, and when a part of the work is done
    let go       deleted; rewritten as "free" where nobody may delete
    failed       "failed", with the traceback: for those that saw it held
    unpublished  the work is done, but others cannot have it: for those that saw it held
    dead         not changed for DEAD_SECONDS by the clock of the one who looks: no clocks are compared
    taken over   of those that find it dead, or ended before they came, one puts `{uri}-after-{holder}` and rewrites it

It only saves work. Whoever cannot write it, or lost patience, works without; so the work must be such that two may do
it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import xxhash

from binidx.errors import FormatError, StorageError
from binidx.json_models import JsonFile
from binidx.storage.writing.publish import create_object, delete_object, put_if_absent, read_small

BUILDING, FREE, FAILED, UNPUBLISHED = "building", "free", "failed", "unpublished"


BEAT_SECONDS = 3.0


"""Between two rewritings; Google takes one a second of an object."""


DEAD_SECONDS = 20.0


"""Six beats, so that a store that stalls, or a machine that swaps, is not taken for dead at once."""


LAST_BEAT_SECONDS = 5.0


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseRecord:
    """What a claim says.

    Args:
        holder: of one holding, and no other.
        where: machine and process, for people.
        node: of the lock that the holder has on its node: `node_lock`. Empty: of none.
        error: the traceback of what failed.
        done: what the holder tells of the work so far.
    """

    holder: str
    state: str = BUILDING
    beat: int = 0
    where: str = ""
    node: str = ""
    error: str = ""
    done: Mapping[str, Any] = field(default_factory=dict)

    def format(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


WORD_FILE = JsonFile(LeaseRecord)


def parse_lease_record(data: bytes) -> LeaseRecord:
    """Of bytes that are none of ours, a holder of that name: it can be watched, and taken over."""
    try:
        return WORD_FILE.decode(data, "")
    except FormatError:
        return LeaseRecord(f"unknown-{xxhash.xxh3_64_hexdigest(data)}")


@dataclass(frozen=True)
class Lease:
    """A claim under a URI."""

    uri: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def read(self) -> LeaseRecord | None:
        """What it says now; None: it is nobody's. One request."""
        data = read_small(self.uri, self.storage_options)
        return None if data is None else parse_lease_record(data)

    def take(self, node: str = "") -> HeldLease | None:
        """Hold it, unless somebody does.

        Raises:
            StorageError: the store does not let us write.
        """
        word = new_lease_record(node)
        return HeldLease(self, word) if self._put(self.uri, word) else None

    def take_over(self, ended: LeaseRecord, node: str = "") -> HeldLease | None:
        """Hold what a dead or earlier holder left, unless another does.

        Raises:
            StorageError: the store does not let us write.
        """
        word = new_lease_record(node)
        if not self._put(self._marker(ended), word):
            return None
        try:
            # Who won before us, and took his marker away already, stands there by now.
            standing = self.read()
            if standing is not None and standing.holder != ended.holder:
                return None
            self.write(word)
            return HeldLease(self, word)
        finally:
            self.free_again(ended)

    def free_again(self, ended: LeaseRecord) -> None:
        """Let others take over, where who began to has died: else nobody ever could."""
        with contextlib.suppress(StorageError):
            delete_object(self._marker(ended), self.storage_options)

    def _marker(self, ended: LeaseRecord) -> str:
        return f"{self.uri}-after-{ended.holder}"

    def write(self, word: LeaseRecord) -> None:
        with create_object(self.uri, self.storage_options, durable=False) as out:
            out.write(word.format())

    def _put(self, uri: str, word: LeaseRecord) -> bool:
        return put_if_absent(uri, word.format(), self.storage_options, durable=False)


def new_lease_record(node: str) -> LeaseRecord:
    return LeaseRecord(uuid.uuid4().hex, where=f"{socket.gethostname()}, process {os.getpid()}", node=node)


class HeldLease:
    """A claim that is ours until the block ends; an exception is left in it for those that wait.

    Attributes:
        published: set to False in the block: what was done there is of no use to others.
    """

    def __init__(self, claim: Lease, word: LeaseRecord) -> None:
        self.claim, self.word = claim, word
        self.published = True
        self._ended, self._done = False, word.done
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="binidx-claim", daemon=True)

    def __enter__(self) -> HeldLease:
        self._thread.start()
        return self

    def tell(self, done: Mapping[str, Any]) -> None:
        """Those that watch, of the work so far, which takes the place of what was told before. Returns at once."""
        self._done = done
        self._news.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended = True
        self._news.set()
        self._thread.join(LAST_BEAT_SECONDS)
        if self._thread.is_alive():
            return  # a beat on its way to a store that stalls could come after our last word: others find it dead
        try:
            self._leave(error)
        except StorageError as trouble:
            logger.info("%s: not let go, others find it dead in %.0f s: %s", self.claim.uri, DEAD_SECONDS, trouble)

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            text = "".join(traceback.format_exception(error))
            self.claim.write(dataclasses.replace(self.word, state=FAILED, error=text))
        elif error is None and not self.published:
            self.claim.write(dataclasses.replace(self.word, state=UNPUBLISHED))
        else:
            self._let_go()

    def _let_go(self) -> None:
        try:
            delete_object(self.claim.uri, self.claim.storage_options)
        except StorageError:
            self.claim.write(dataclasses.replace(self.word, state=FREE))

    def _beat(self) -> None:
        while True:
            self._news.wait(BEAT_SECONDS)
            self._news.clear()
            if self._ended:
                return
            self.word = dataclasses.replace(self.word, beat=self.word.beat + 1, done=self._done)
            try:
                self.claim.write(self.word)
            except StorageError as trouble:
                logger.debug("%s: not renewed: %s", self.claim.uri, trouble)


class LeaseWatcher:
    """What one who waits has seen of a claim, by its own clock."""

    def __init__(self, claim: Lease) -> None:
        self.claim = claim
        self.word: LeaseRecord | None = None
        self._changed = time.monotonic()
        self._seen_at_work: set[str] = set()

    def look(self) -> LeaseRecord | None:
        """What it says now; what it said before, while the store does not answer."""
        with contextlib.suppress(StorageError):
            word = self.claim.read()
            if word != self.word:
                self.word, self._changed = word, time.monotonic()
            if word is not None and word.state == BUILDING:
                self._seen_at_work.add(word.holder)
        return self.word

    def begin_again(self) -> None:
        """Count the silence from now on."""
        self._changed = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._changed

    @property
    def seen_at_work(self) -> bool:
        """Whether the holder was at work when we looked before; else its word is of an earlier run, maybe."""
        return self.word is not None and self.word.holder in self._seen_at_work
