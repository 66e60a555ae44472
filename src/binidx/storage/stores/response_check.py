"""The one check of responses to range requests, for every transport and provider. No I/O.

    version           the ETag or generation is that of the pinned object; without one, the total is its size
    Content-Length    is the length of the range, where it is sent
    Content-Range     start, end and total are those of the range and of the pinned object
    status            206; 200 with a Content-Range, or for a range that is the whole object

Another version is an `ObjectChangedError`. Any other wrong response is a `ShortReadError`, which is retried a few
times: a proxy may have had a bad moment. Requests name the version, too (`pinned`), so that a store can refuse them
early, but nothing depends on that: a server that ignores If-Match still sends the ETag of the bytes that it sends.

Generic fsspec drivers return bytes without their response: of these only the length is checked (`check_length`), and
`unpinned` looks at the object before and after.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from binidx.errors import ShortReadError
from binidx.storage.interfaces import Range
from binidx.storage.stores.pinned import PinnedObject

MARKS = {"generation": "x-goog-generation", "etag": "etag", "version": "x-amz-version-id"}
"""Key of an identity -> response header; the first key that an identity has decides. GCS changes the ETag of an object,
but not its generation, when only its metadata changes."""


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response; the mapping's keys are in lower case or case-insensitive."""

    status: int
    headers: Mapping[str, str]


def check_response(opened: PinnedObject, where: Range, head: ResponseHead) -> None:
    """Check that the body of a response is this range of the pinned object, before it is waited for.

    Raises:
        ObjectChangedError: the response belongs to another version of the object.
        ShortReadError: it belongs to another range, or does not tell.
    """
    (start, stop), size = where, opened.identity["size"]
    said, length = head.headers.get("content-range"), head.headers.get("content-length")
    place = parse_content_range(said)
    total = place[1] if place else None
    name, pinned = _version_of(opened)
    version = head.headers.get(MARKS.get(name, ""))
    if _bare(version) != _bare(pinned) if version and pinned else not pinned and total not in (None, size):
        raise opened.changed({"size": total, name: version})
    if length not in (None, str(stop - start)):
        raise wrong_length(opened.uri, where, str(length))
    if said is None and head.status == 200:
        if where != (0, size):
            raise wrong_length(opened.uri, where, "all")
    elif head.status not in (200, 206) or place != (where, size):
        found = f"status {head.status}, Content-Range {said}"
        raise _wrong(opened.uri, f"wrong response (found {found}; need 206, bytes {start}-{stop - 1}/{size})")
    if not version and pinned and not pinned.startswith("W/"):
        raise _wrong(opened.uri, f"response without a version (need {MARKS[name]} {pinned})")


def check_length(uri: str, where: Range, body: bytes) -> bytes:
    """Return the body of a response if it is as long as its range."""
    if len(body) != where[1] - where[0]:
        raise wrong_length(uri, where, len(body))
    return body


def wrong_length(uri: str, where: Range, found: int | str) -> ShortReadError:
    return _wrong(uri, f"{found} bytes for range {where[0]}-{where[1]}, needed {where[1] - where[0]}")


def parse_content_range(text: str | None) -> tuple[Range, int] | None:
    """The range and the total of a Content-Range header; None if it is missing or malformed.

    Example:
        >>> parse_content_range("bytes 10-19/300")
        ((10, 20), 300)
    """
    found = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)", text or "")
    return ((int(found[1]), int(found[2]) + 1), int(found[3])) if found else None


def _version_of(opened: PinnedObject) -> tuple[str, str]:
    """The deciding key of an identity, and its value; both empty if the store tells no version."""
    name = next((each for each in MARKS if each in opened.identity), "")
    return name, str(opened.identity.get(name, ""))


def _bare(mark: str) -> str:
    """An ETag without its quotes, and without W/: a proxy that compresses weakens it."""
    return mark.removeprefix("W/").strip('"')


def _wrong(uri: str, problem: str) -> ShortReadError:
    return ShortReadError(f"{uri}: {problem}; the store or a proxy before it does not honour ranges")
