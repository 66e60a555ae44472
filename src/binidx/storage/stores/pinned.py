"""The version of an object that was seen at opening: reads give its bytes, or an error once the object is another.

    s3://            If-Match: ETag             412 once it was replaced
    http(s)://       If-Match: ETag             412 from a server that heeds it; a weak ETag may not be sent
    gs://            generation=N               404 once it was replaced, or the old bytes where versions are kept
    files, memory    time of the last change    looked at after each read
    the rest         nothing can be sent        a change shows only where it makes an answer short

Servers may ignore what the first three send: `response_check` compares the version in each of their responses.

What the store did not tell at opening cannot be asked for. Chains (simplecache::s3://) read their own copy, unpinned.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectChangedError, ShortReadError, StorageError
from binidx.storage.interfaces import Range
from binidx.storage.stores import filesystem
from binidx.storage.stores.driver_errors import http_status


@dataclass(frozen=True)
class PinnedObject:
    """An object as it was when it was opened: `path` in its filesystem, `identity` of `filesystem.identity_of`."""

    uri: str
    path: str
    identity: Mapping[str, Any]

    def check(self, now: Mapping[str, Any]) -> None:
        """ObjectChangedError unless it still is."""
        if now != self.identity:
            raise self.changed(now)

    def changed(self, now: Mapping[str, Any]) -> ObjectChangedError:
        """The error of an object that is another by now: a value of None is not known."""
        was, found = _in_words(self.identity), _in_words(now)
        return ObjectChangedError(f"{self.uri}: changed since it was opened ({was}, now {found}); open it again")


CONDITIONS = {"s3": "etag", "s3a": "etag", "gs": "generation", "gcs": "generation", "http": "etag", "https": "etag"}
"""Protocol -> the part of an object's identity that each response carries."""


def is_pinned(uri: str, identity: Mapping[str, Any]) -> bool:
    """Return whether the store, by itself or by `check_response`, returns bytes of this version or an error."""
    protocol = filesystem.protocols(uri)[0]
    mark = identity.get(CONDITIONS.get(protocol, ""))
    return protocol in {"file", "local", "memory"} or (mark is not None and not str(mark).startswith("W/"))


def suggests_change(error: StorageError) -> bool:
    """Whether a read may have failed because the object is another: 404, 412, past the end, too few bytes."""
    cause = error.__cause__
    past_the_end = isinstance(cause, OSError) and cause.errno == errno.EINVAL
    gone_or_short = isinstance(error, (ShortReadError, FileNotFoundError))
    return past_the_end or gone_or_short or http_status(cause) in (404, 412, 416)


def _in_words(identity: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in identity.items() if value is not None)


def cat_ranges(fs: Any, opened: PinnedObject, requests: Sequence[Range]) -> list[bytes]:
    """The bytes of each range from a filesystem without coroutines, in this thread; perhaps shorter than asked.

    Raises:
        ObjectChangedError: a file, or an object in memory, is not the one that was opened.
        Exception: whatever the filesystem raises.
    """
    starts, stops = [start for start, _ in requests], [stop for _, stop in requests]
    # Exceptions would come back in the list as if they were data, were it not for on_error.
    answers: list[bytes] = fs.cat_ranges([opened.path] * len(requests), starts, stops, on_error="raise")
    if LOOKED_AT.intersection(each.__name__ for each in type(fs).__mro__):
        opened.check(filesystem.identity_from_info(fs.info(opened.path)))
    return answers


LOOKED_AT = {"LocalFileSystem", "MemoryFileSystem"}
"""Filesystems where asking costs no round trip."""
