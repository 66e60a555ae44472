"""The one check of responses to range requests, for every transport and provider. No I/O.

    version           the ETag or generation is that of the pinned object; without one, the total is its size
    Content-Length    is the length of the range, where it is sent
    Content-Range     start, end and total are those of the range and of the pinned object
    status            206; 200 with a Content-Range, or for a range that is the whole object

Another version is an `ObjectChangedError`. Any other wrong response is a `ShortReadError`, which is retried a few
times: a proxy may have had a bad moment. Requests carry the version, too (If-Match, generation), so that a store can
refuse them early, but nothing depends on that: a server that ignores If-Match still sends the ETag of the bytes that it
sends. Generic fsspec drivers return bytes without their response: of these only the length is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectChangedError, ShortReadError
from binidx.storage.interfaces import ObjectInfo, Range
from binidx.storage.stores.identity import is_weak

VERSION_HEADERS = {"generation": "x-goog-generation", "etag": "etag", "version": "x-amz-version-id"}
"""Key of an identity -> response header; the first key that an identity has decides. GCS changes the ETag of an object,
but not its generation, when only its metadata changes."""


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response; the mapping's keys are in lower case or case-insensitive."""

    status: int
    headers: Mapping[str, str]


def check_response(info: ObjectInfo, where: Range, head: ResponseHead) -> None:
    """Check that the body of a response is this range of the pinned object, before the body is awaited.

    Raises:
        ObjectChangedError: the response belongs to another version of the object.
        ShortReadError: it belongs to another range, or lacks the headers that prove its range.
    """
    (start, stop), size = where, info.size
    content_range, length = head.headers.get("content-range"), head.headers.get("content-length")
    parsed = parse_content_range(content_range)
    total = parsed[1] if parsed else None
    name = next((each for each in VERSION_HEADERS if each in info.identity), "")
    pinned = str(info.identity.get(name, ""))
    version = head.headers.get(VERSION_HEADERS.get(name, ""))
    if _bare(version) != _bare(pinned) if version and pinned else not pinned and total not in (None, size):
        raise changed(info, {"size": total, name: version})
    if length not in (None, str(stop - start)):
        raise wrong_length(info.uri, where, str(length))
    if content_range is None and head.status == 200:
        if where != (0, size):
            raise wrong_length(info.uri, where, "all")
    elif head.status not in (200, 206) or parsed != (where, size):
        found = f"status {head.status}, Content-Range {content_range}"
        raise _wrong(info.uri, f"wrong response (found {found}; need 206, bytes {start}-{stop - 1}/{size})")
    if not version and pinned and not is_weak(pinned):
        raise _wrong(info.uri, f"response without a version (need {VERSION_HEADERS[name]} {pinned})")


def check_length(uri: str, where: Range, body: bytes) -> bytes:
    """Return the body of a response if it is as long as its range.

    Raises:
        ShortReadError: it is not.
    """
    if len(body) != where[1] - where[0]:
        raise wrong_length(uri, where, len(body))
    return body


def check_unchanged(info: ObjectInfo, identity: Mapping[str, Any]) -> None:
    """Raise ObjectChangedError unless an object still has the identity that it was opened with."""
    if identity != info.identity:
        raise changed(info, identity)


def changed(info: ObjectInfo, now: Mapping[str, Any]) -> ObjectChangedError:
    """Return the error of an object that has another identity now; values of None are unknown."""
    was, found = _in_words(info.identity), _in_words(now)
    return ObjectChangedError(f"{info.uri}: changed since it was opened ({was}, now {found}); open it again")


def wrong_length(uri: str, where: Range, found: int | str) -> ShortReadError:
    """Return the error of a response with another number of bytes than its range."""
    return _wrong(uri, f"{found} bytes for range {where[0]}-{where[1]}, needed {where[1] - where[0]}")


def parse_content_range(text: str | None) -> tuple[Range, int] | None:
    """Return the range and the total of a Content-Range header; None if it is missing or malformed.

    Example:
        >>> parse_content_range("bytes 10-19/300")
        ((10, 20), 300)
    """
    found = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)", text or "")
    return ((int(found[1]), int(found[2]) + 1), int(found[3])) if found else None


def size_and_tail(content_range: str | None, length: int | None) -> tuple[int | None, int]:
    """Return the size of an object whose last bytes were requested, and how many of them the response has.

    A response with the whole object counts as having none: its body is not awaited.
    """
    if (found := parse_content_range(content_range)) is None:
        return length, 0
    (start, stop), size = found
    return size, stop - start if stop == size else 0


def _bare(mark: str) -> str:
    """Return an ETag without its quotes, and without W/: a proxy that compresses weakens it."""
    return mark.removeprefix("W/").strip('"')


def _in_words(identity: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in identity.items() if value is not None)


def _wrong(uri: str, problem: str) -> ShortReadError:
    return ShortReadError(f"{uri}: {problem}; the store or a proxy before it does not honour ranges")
