"""Large ranges of an object, each read by a thread over a connection of its own, straight into its answer's memory.

    signed URL of its driver ──► GET ──► head ──► recv(all of the body) into one buffer

On an event loop an answer comes in the pieces in which it arrives, 16 to 64 KiB mostly; each is a turn of the loop,
some objects and two copies: 0.8 to 2.5 ms of CPU a megabyte. Here the kernel fills the buffer in one call: 0.3 ms. TLS
comes by its records, without a turn of a loop for each.

Nothing is tried twice here. What does not come as it should, the reader asks for in its own way, with its retries and
its errors.
"""

from __future__ import annotations

import atexit
import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from binidx.storage.direct import ADDRESSES, RENEW_SECONDS, Address
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.pinned import Opened
from binidx.storage.ranges import Range, RangeReader

STALL_SECONDS = 15
"""Without a byte; then the reader has its turn."""

IDLE_SECONDS = 10.0
"""A connection that was not used for so long is not used again: stores close them after 20 s and more."""

HEAD_BYTES = 64 << 10


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
    find = next((ADDRESSES[each.__name__] for each in type(fs).__mro__ if each.__name__ in KINDS), None)
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
    return _asked(_connected(address), address, where)


def _asked(connection: _Connection, address: Address, where: Range) -> memoryview:
    try:
        connection.socket.sendall(_question(address, where))
        body = _answer(connection.socket, where)
    except BaseException:
        connection.socket.close()
        raise
    _keep(connection)
    return body


def _question(address: Address, where: Range) -> bytes:
    url = address.url
    headers = {"Host": url.host_port_subcomponent, **address.headers, "Range": f"bytes={where[0]}-{where[1] - 1}"}
    lines = [f"GET {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _answer(stream: socket.socket, where: Range) -> memoryview:
    size = where[1] - where[0]
    head, begun = _head(stream)
    _check(head, where)
    if len(begun) > size:
        raise OSError("more came than was asked for")
    body = np.empty(size, np.uint8)
    view = body.data
    view[: len(begun)] = begun
    _fill(stream, view[len(begun) :])
    return view


def _head(stream: socket.socket) -> tuple[bytes, bytes]:
    """The head of an answer, and what of its body came with it."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        more = stream.recv(HEAD_BYTES)
        if not more or len(data) > HEAD_BYTES:
            raise ConnectionResetError("no answer")
        data += more
    return data[:end], data[end + 4 :]


def _check(head: bytes, where: Range) -> None:
    """OSError unless it is the head of just these bytes, on a connection that stays."""
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    code = status.split(" ")[1:2]
    if code != ["206"] or not status.startswith("HTTP/1.1 "):
        raise OSError(f"answered {status}")
    start, stop = where
    plain = fields.get("content-encoding", "identity") == "identity" and "transfer-encoding" not in fields
    asked = fields.get("content-range", "").startswith(f"bytes {start}-{stop - 1}/")
    stays = fields.get("connection", "keep-alive").lower() == "keep-alive"
    if fields.get("content-length") != str(stop - start) or not (plain and asked and stays):
        raise OSError("answered something else")


def _fill(stream: socket.socket, view: memoryview) -> None:
    # OpenSSL gives one record a call, whatever is asked.
    all_of_it = 0 if isinstance(stream, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        count = stream.recv_into(view, 0, all_of_it)
        if not count:
            raise OSError("the answer was cut off")
        view = view[count:]


@dataclass(frozen=True)
class _Connection:
    place: tuple[Any, ...]
    socket: socket.socket


_idle: dict[tuple[Any, ...], list[tuple[socket.socket, float]]] = {}
"""Connections that wait for their next request, by where they lead and by process: a forked child has its own."""

_idle_lock = threading.Lock()


@atexit.register
def _close_all() -> None:
    with _idle_lock:
        for place, waiting in _idle.items():
            for stream, _ in waiting if place[0] == os.getpid() else []:
                stream.close()


os.register_at_fork(after_in_child=lambda: globals().update(_idle_lock=threading.Lock()))


def _place(address: Address) -> tuple[Any, ...]:
    url = address.url
    return os.getpid(), url.scheme, url.host, url.port, id(_context(address))


def _kept(address: Address) -> _Connection | None:
    place, now = _place(address), time.monotonic()
    with _idle_lock:
        waiting = _idle.get(place, [])
        found, since = waiting.pop() if waiting else (None, 0.0)
        fresh = now - since < IDLE_SECONDS
        old = [] if fresh else [each for each, _ in waiting]
        if not fresh:
            waiting.clear()
    for each in old if fresh or found is None else [found, *old]:
        each.close()
    return _Connection(place, found) if found is not None and fresh else None


def _keep(connection: _Connection) -> None:
    with _idle_lock:
        _idle.setdefault(connection.place, []).append((connection.socket, time.monotonic()))


def _connected(address: Address) -> _Connection:
    url, context = address.url, _context(address)
    stream = socket.create_connection((url.host, url.port), timeout=STALL_SECONDS)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        stream = context.wrap_socket(stream, server_hostname=url.host)
    else:
        # A timeout of Python's would end each call with what is there: the kernel's lets one wait for all of a body.
        stream.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
    return _Connection(_place(address), stream)


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
