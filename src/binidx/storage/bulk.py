"""Large ranges of an object, each read by a thread over a connection of its own, straight into its answer's memory.

    signed URL of its driver ──► http.client ──► readinto(all of the body)

On an event loop an answer comes in the pieces in which it arrives, 16 to 64 KiB mostly; each is a turn of the loop,
some objects and two copies: 0.8 to 2.5 ms of CPU a megabyte. Here the kernel writes into the buffer: 0.6 ms.

Nothing is tried twice here. What does not come as it should, the reader asks for in its own way, with its retries and
its errors.
"""

from __future__ import annotations

import atexit
import os
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any

import numpy as np

from binidx.storage.address import RENEW_SECONDS, Address, address_of
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.pinned import Opened
from binidx.storage.ranges import Range, RangeReader

STALL_SECONDS = 15
"""Without a byte; then the reader has its turn."""

IDLE_SECONDS = 10.0
"""A connection that was not used for so long is not used again: stores close them after 20 s and more."""

TRIES = 3
"""Of one object that failed, before the rest of it is left to its reader."""


class _NotHereError(Exception):
    """This object cannot be asked for from here."""


class BulkReader:
    """Ranges of an object on S3 or GCS, of some hundred KiB and more; of any other, as its reader reads them."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._address: Address | None = None
        self._until = 0.0
        # Tries that are left: each that fails costs a request more.
        self._tries = TRIES if isinstance(reader, FsspecObject) and reader.goes_direct else 0
        self._lock = threading.Lock()

    def read(self, where: Range) -> memoryview:
        """One range; any of its threads may ask, at the same time.

        Raises:
            As the reader's `read`.
        """
        found = self._tried(where) if self._tries > 0 else None
        return self._reader.read([where])[0] if found is None else found

    def _tried(self, where: Range) -> memoryview | None:
        began = time.monotonic()
        try:
            found = _fetched(self._current(), where)
        except Exception:  # whatever it is, the reader meets it too if it matters, and tells it in its own words
            self._tries -= 1
            return None
        size = where[1] - where[0]
        seconds = time.monotonic() - began
        assert isinstance(self._reader, FsspecObject)
        self._reader.stats.add(requests=1, bytes_asked=size, bytes_moved=size, seconds=seconds)
        return found

    def _current(self) -> Address:
        with self._lock:
            if self._address is None or time.monotonic() > self._until:
                self._address = _address_of(self._reader)
                self._until = time.monotonic() + RENEW_SECONDS
            return self._address


def _address_of(reader: Any) -> Address:
    """Where and as whom its driver would ask.

    Raises:
        _NotHereError: it cannot be asked from here.
        NotDirectError: nor without its driver.
    """
    from fsspec.asyn import sync

    fs, path = reader.place()
    find = address_of(fs, KINDS)
    if find is None:
        raise _NotHereError
    found: Address = sync(fs.loop, find, fs, Opened(reader.uri, path, reader.identity))
    return found


KINDS = ("S3FileSystem", "GCSFileSystem")
"""Filesystems whose addresses say all: options of an http session may say more."""


def _fetched(address: Address, where: Range) -> memoryview:
    kept = _kept(address)
    if kept is not None:
        try:
            return _asked(kept, address, where)
        except ConnectionError:  # the store closed it meanwhile
            pass
    return _asked(_new(address), address, where)


def _asked(connection: HTTPConnection, address: Address, where: Range) -> memoryview:
    start, stop = where
    try:
        headers = {**address.headers, "Range": f"bytes={start}-{stop - 1}"}
        connection.request("GET", address.url.raw_path_qs, headers=headers)
        answer = connection.getresponse()
        _check(answer, where)
        body = np.empty(stop - start, np.uint8).data
        _fill(answer, body)
    except BaseException:
        connection.close()
        raise
    _keep(address, connection)
    return body


def _check(answer: HTTPResponse, where: Range) -> None:
    """OSError unless just these bytes come, on a connection that stays."""
    start, stop = where
    told = answer.getheader("Content-Range", ""), answer.getheader("Content-Encoding", "identity")
    if answer.status != 206 or answer.length != stop - start or answer.will_close:
        raise OSError(f"answered {answer.status}, {answer.length} bytes")
    if not told[0].startswith(f"bytes {start}-{stop - 1}/") or told[1] != "identity":
        raise OSError(f"answered {told}")


def _fill(answer: HTTPResponse, view: memoryview) -> None:
    while view:
        count = answer.readinto(view)
        if not count:
            raise OSError("the answer was cut off")
        view = view[count:]


_idle: dict[tuple[Any, ...], list[tuple[HTTPConnection, float]]] = {}
"""Connections that wait for their next request, by where they lead and by process: a forked child has its own."""

_idle_lock = threading.Lock()


@atexit.register
def _close_all() -> None:
    with _idle_lock:
        for place, waiting in _idle.items():
            for connection, _ in waiting if place[0] == os.getpid() else []:
                connection.close()


os.register_at_fork(after_in_child=lambda: globals().update(_idle_lock=threading.Lock()))


def _place(address: Address) -> tuple[Any, ...]:
    url = address.url
    return os.getpid(), url.scheme, url.host, url.port, id(_context(address))


def _kept(address: Address) -> HTTPConnection | None:
    now = time.monotonic()
    with _idle_lock:
        waiting = _idle.get(_place(address), [])
        old = [each for each, since in waiting if now - since >= IDLE_SECONDS]
        waiting[:] = [(each, since) for each, since in waiting if now - since < IDLE_SECONDS]
        found = waiting.pop()[0] if waiting else None
    for each in old:
        each.close()
    return found


def _keep(address: Address, connection: HTTPConnection) -> None:
    with _idle_lock:
        _idle.setdefault(_place(address), []).append((connection, time.monotonic()))


def _new(address: Address) -> HTTPConnection:
    url, context = address.url, _context(address)
    if context is None:
        return HTTPConnection(url.host, url.port, timeout=STALL_SECONDS)
    return HTTPSConnection(url.host, url.port, timeout=STALL_SECONDS, context=context)


def _context(address: Address) -> ssl.SSLContext | None:
    """The certificates of its session; None: it is plain HTTP.

    Raises:
        _NotHereError: they are not told.
    """
    if address.url.scheme != "https":
        return None
    found = getattr(address.session.connector, "_ssl", None)
    if isinstance(found, ssl.SSLContext):
        return found
    raise _NotHereError
