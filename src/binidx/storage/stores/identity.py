"""Identity of the content of an object, and the one check that a response is of the object that was opened. No I/O.

    {"size": 300, "etag": "\\"9e10\\""}      S3, HTTP
    {"size": 300, "generation": "7"}       GCS, which also has an ETag
    {"size": 300, "mtime": 1700000000.5}   files, and stores that report nothing better

An identity is a dict of JSON values and is persisted. An ETag, generation, version id or inode proves the content; a
size and a time do not, since a second is long.

The check of responses to range requests serves every transport and provider:

    version           the ETag or generation is that of the pinned object; without one, the total is its size, and
                      Last-Modified, if it is sent, is the date at opening, unless `check_dates` is off
    Content-Length    is the length of the range, where it is sent
    Content-Range     start, end and total are those of the range and of the pinned object
    status            206; 200 with a Content-Range, or for a range that is the whole object

Another version is an `ObjectChangedError`. Any other wrong response is a `ShortReadError`, which is retried a few
times: a proxy may have had a bad moment. Requests carry the version, too (If-Match, generation), so that a store can
refuse them early, but nothing depends on that: a server that ignores If-Match still sends the ETag of the bytes that it
sends. Generic fsspec drivers return bytes without their response: of these only the length is checked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from binidx.errors import ObjectChangedError, ShortReadError
from binidx.storage.interfaces import Bytes, Range, VersionMark
from binidx.storage.store_protocols import ObjectInfo

Body = TypeVar("Body", bound=Bytes)
PROVING = ("etag", "generation", "version", "inode")
"""One of these in an identity makes equal identities mean equal bytes, unless the ETag is a weak one."""


TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Names of the time of the last change in the metadata of drivers."""


def identity_from_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity in an object's metadata: fsspec's `info`, or the JSON of GCS."""
    identity: dict[str, Any] = {"size": int(info["size"])}
    versions = {"etag": ("ETag", "etag"), "generation": ("generation",), "version": ("VersionId",)}
    for names in (versions, {"mtime": TIMES}):
        for name, keys in names.items():
            value = next(filter(None, map(info.get, keys)), None)
            if value is not None:
                identity[name] = value if isinstance(value, (int, float)) else str(value)
        if len(identity) > 1:
            break
    return identity


def object_info(uri: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Return an object's metadata as `ObjectInfo`: fsspec's `info`, GCS's JSON or another dict; it must have a size.

    Args:
        info: must have a size; the other keys are those of any driver.
    """
    identity = identity_from_info(info)
    is_pinned = "generation" in identity or not is_weak(identity.get("etag", "W/"))
    date = None if is_pinned else next(filter(None, map(info.get, (*TIMES, "Last-Modified"))), None)
    return ObjectInfo(uri, int(info["size"]), identity, info.get("md5Hash"), second_of(date))


@functools.lru_cache(1024)
def second_of(date: Any) -> int | None:
    """Return a date in whole seconds since the epoch, as fine as Last-Modified; None if it is none.

    Args:
        date: seconds, a datetime, or text: of HTTP (Fri, 20 Nov 2026 03:53:17 GMT), or ISO 8601 as in listings.
    """
    from email.utils import parsedate_to_datetime  # slow to import

    try:
        if isinstance(date, str):
            date = datetime.fromisoformat(date) if date[:1].isdigit() else parsedate_to_datetime(date)
        return int(date.timestamp() if isinstance(date, datetime) else date)
    except (TypeError, ValueError, OverflowError):
        return None


def same_identity(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two identities agree in all keys that both have, at least one; a listing may omit some keys."""
    both = was.keys() & now.keys()
    return bool(both) and all(was[name] == now[name] for name in both)


def proves_content(identity: Mapping[str, Any]) -> bool:
    """Return whether an identity proves the content: any two objects that have it have the same bytes."""
    return any(not is_weak(identity[name]) for name in PROVING if name in identity)


def same_object(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two identities prove that the bytes are the same; one may have more entries than the other."""
    was, now = one or {}, other or {}
    return proves_content({name: was[name] for name in was if name in now}) and same_identity(was, now)


def is_rewritten(was: VersionMark | None, now: VersionMark | None) -> bool:
    """Return whether an object has another date, or a local file another inode, or a ctime that needs a write.

    chmod, chown and ln change the ctime, too: a write that comes with one of these is not seen. Files of two nodes are
    not compared.
    """
    if was is None or now is None:
        return False
    if isinstance(was, int) or isinstance(now, int):
        return isinstance(was, int) and isinstance(now, int) and was != now
    if was.node != now.node:
        return False
    return was.inode != now.inode or (was.ctime != now.ctime and was.owner == now.owner)


def is_weak(mark: object) -> bool:
    """Return whether a version mark is a weak ETag."""
    return str(mark).startswith("W/")


VERSION_HEADERS = {"generation": "x-goog-generation", "etag": "etag", "version": "x-amz-version-id"}
"""Key of an identity -> response header; the first key that an identity has decides. GCS changes the ETag of an object,
but not its generation, when only its metadata changes."""


def check_response(info: ObjectInfo, where: Range, status: int, headers: Mapping[str, str]) -> None:
    """Check that the body of a response is this range of the pinned object, before the body is awaited.

    Args:
        headers: keys are in lower case or case-insensitive.

    Raises:
        ObjectChangedError: the response belongs to another version of the object.
        ShortReadError: it belongs to another range, or lacks the headers that prove its range.
    """
    (start, stop), size = where, info.size
    content_range, length = headers.get("content-range"), headers.get("content-length")
    header, pinned = info.pin
    is_usual = status == 206 and headers.get(header) == pinned and length == str(stop - start)
    if is_usual and content_range == f"bytes {start}-{stop - 1}/{size}":
        return  # what follows takes four times as long
    parsed = parse_content_range(content_range)
    total = parsed[1] if parsed else None
    name = next((key for key in VERSION_HEADERS if key in info.identity), "")
    pinned = str(info.identity.get(name, ""))
    version = headers.get(VERSION_HEADERS.get(name, ""))
    if _bare(version) != _bare(pinned) if version and pinned else not pinned and total not in (None, size):
        raise changed(info, {"size": total, name: version})
    if info.mark is not None and (not version or name == "version"):
        check_date(info, headers.get("last-modified"))
    if length not in (None, str(stop - start)):
        raise wrong_length(info.uri, where, str(length))
    if content_range is None and status == 200:
        if where != (0, size):
            raise wrong_length(info.uri, where, "all")
    elif status not in (200, 206) or parsed != (where, size):
        found = f"status {status}, Content-Range {content_range}"
        raise _wrong(info.uri, f"wrong response (found {found}; need 206, bytes {start}-{stop - 1}/{size})")
    if not version and pinned and not is_weak(pinned):
        raise _wrong(info.uri, f"response without a version (need {VERSION_HEADERS[name]} {pinned})")


DATES_OFF = ", or set BINIDX_CHECK_DATES=0 if replicas of the store send different dates for one object"
"""End of an error about dates."""


def check_date(info: ObjectInfo, date: Any) -> None:
    """Raise ObjectChangedError if a date is another one than that of an object when it was opened.

    Args:
        date: as in `second_of`.
    """
    if isinstance(info.mark, int) and is_rewritten(info.mark, second := second_of(date)):
        was, now = describe_mark(info.mark), describe_mark(second)
        raise ObjectChangedError(
            f"{info.uri}: changed since it was opened ({was}, now {now}); open it again{DATES_OFF}"
        )


def describe_mark(mark: VersionMark | None) -> str:
    """Return a text for messages."""
    from email.utils import formatdate  # slow to import

    return f"Last-Modified {formatdate(mark, usegmt=True)}" if isinstance(mark, int) else str(mark)


def check_length(uri: str, where: Range, body: Body) -> Body:
    """Return the body of a response if it is as long as its range.

    Args:
        where: the requested range, (start, stop) in bytes.

    Raises:
        ShortReadError: it is not.
    """
    if len(body) != where[1] - where[0]:
        raise wrong_length(uri, where, len(body))
    return body


def check_unchanged(info: ObjectInfo, now: ObjectInfo) -> None:
    """Raise ObjectChangedError unless an object still has the identity, and the date, that it was opened with.

    A HEAD request may report more keys, such as a version, than the listing from which the object was opened.

    Args:
        info: the object, as it was opened.
        now: the object, as the store reports it now.

    Raises:
        ObjectChangedError: another version is stored.
    """
    if now.identity != info.identity and not same_object(info.identity, now.identity):
        raise changed(info, now.identity)
    if "etag" not in now.identity:
        check_date(info, now.mark)


def changed(info: ObjectInfo, now: Mapping[str, Any]) -> ObjectChangedError:
    """Return the error of an object that has another identity now; values of None are unknown."""
    since = "it was recorded" if info.remedy else "it was opened"
    return _changed(info.uri, info.identity, now, since, info.remedy or "open it again")


def check_same(uri: object, was: Mapping[str, Any], now: Mapping[str, Any], since: str, remedy: str) -> None:
    """Raise ObjectChangedError if an object has another identity now, or became a virtual merge, which has "parts".

    Args:
        uri: its name.
        was, now: its identity then and now.
        since: when it had the first identity, for the message: "it was opened".
        remedy: what to do, for the message; empty: a caller adds it.
    """
    if not same_identity(was, now) or ("parts" in was) != ("parts" in now):
        raise _changed(uri, was, now, since, remedy)


def check_pair(prefix: object, was: Mapping[str, Any], now: Mapping[str, Any], since: str, remedy: str) -> None:
    """Do `check_same` for the `.idx` and the tokens of a prefix, whose identities are under "idx" and "bin"."""
    for end in ("idx", "bin"):
        file = f"{prefix}.idx" if end == "idx" else f"tokens of {prefix}"
        check_same(f"{prefix}.parts.json" if "parts" in was[end] else file, was[end], now[end], since, remedy)


def _changed(
    uri: object, was: Mapping[str, Any], now: Mapping[str, Any], since: str, remedy: str
) -> ObjectChangedError:
    problem = f"{uri}: changed since {since} ({_in_words(was)}, now {_in_words(now)})"
    return ObjectChangedError("; ".join(filter(None, (problem, remedy))))


def wrong_length(uri: str, where: Range, found: int | str) -> ShortReadError:
    """Return the error of a response with another number of bytes than its range."""
    return _wrong(uri, f"{found} bytes for range {where[0]}-{where[1]}, needed {where[1] - where[0]}")


def parse_content_range(text: str | None) -> tuple[Range, int] | None:
    """Return the range and the total of a Content-Range header; None if it is missing or malformed.

    Example:
        >>> parse_content_range("bytes 10-19/300")
        ((10, 20), 300)
    """
    match = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)", text or "")
    return ((int(match[1]), int(match[2]) + 1), int(match[3])) if match else None


def size_and_tail(content_range: str | None, length: int | None, tail_bytes: int) -> tuple[int | None, int]:
    """Return the size of an object whose last bytes were requested, and how many of them the response has.

    A response with more than `tail_bytes`, such as the whole object, counts as having none: its body is not awaited.

    Args:
        content_range: header of the response.
        length: bytes of its body; None: not sent.
        tail_bytes: bytes that were requested.
    """
    if (parsed := parse_content_range(content_range)) is None:
        return length, 0
    (start, stop), size = parsed
    return size, stop - start if stop == size and stop - start <= tail_bytes else 0


def _bare(mark: str) -> str:
    """Return an ETag without its quotes, and without W/: a proxy that compresses weakens it."""
    return mark.removeprefix("W/").strip('"')


def _in_words(identity: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in identity.items() if value is not None)


def _wrong(uri: str, problem: str) -> ShortReadError:
    return ShortReadError(f"{uri}: {problem}; the store or a proxy before it does not honour ranges")
