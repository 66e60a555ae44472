"""An object whose bytes are all here, on their way to a store: several parts at once, and known by the store's answer.

up to 16 MiB     one PUT
s3, larger       a multipart upload, 8 parts in flight, 128 MiB of memory
the rest         a stream, see `publish`; on GCS the store is asked for the MD5 of what it has then
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from binidx.errors import StorageError
from binidx.storage.open import keep_whole, open_kept
from binidx.storage.ranges import cut
from binidx.storage.stores import filesystem
from binidx.storage.stores.head import look_up
from binidx.storage.stores.s3_multipart import S3Parts
from binidx.storage.threads import REQUESTS
from binidx.storage.writing.multipart import MAX_PARTS, MULTIPART_WRITERS
from binidx.storage.writing.publish import create_object
from binidx.storage.writing.staging import ONE_PUT

IN_FLIGHT = 8
TELL_MD5 = ("gs", "gcs")


def send_object(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Write a remote object, which appears whole, replacing what was there.

    Returns:
        Its identity, as `filesystem.identity_of` will word it: out of the store's answer to this very request, since
        whoever asks afterwards may be told of another writer's object; or of an object whose MD5 says that it has these
        bytes. None where neither is told.

    Raises:
        StorageError: the store refuses; what was there before still is.
    """
    protocol, *chained = filesystem.protocols(uri)
    if chained or protocol not in MULTIPART_WRITERS:
        with create_object(uri, storage_options, durable=False) as out:
            for start, stop in cut((0, len(data)), ONE_PUT):
                out.write(data[start:stop])
        return _known_by_digest(uri, data, storage_options) if protocol in TELL_MD5 and not chained else None
    tag = _put(uri, data, storage_options) if len(data) <= ONE_PUT else _send_parts(uri, data, storage_options)
    return {"size": len(data), "etag": tag} if tag else None


def keep_sent(
    uri: str, data: memoryview, identity: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None = None
) -> memoryview | None:
    """Put what was just sent where the processes of this node look before they ask the store: `kept`.

    Args:
        identity: that `send_object` gave.

    Returns:
        The bytes as they are kept; None where the store did not say what they are, or there is no place for them.
    """
    copy = open_kept(uri, identity, storage_options)
    return keep_whole(copy, data) if copy is not None else None


def _known_by_digest(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    try:
        found = look_up(uri, storage_options)
    except StorageError:
        return None  # what was sent is there; it is only not known by more than its name
    digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return filesystem.identity_from_info(found.info) if found and found.info.get("md5Hash") == digest else None


def _put(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None) -> str:
    with filesystem.storage_errors(uri):
        fs, path = filesystem.open_filesystem(uri, storage_options or {})
        answer = fs.pipe_file(path, bytes(data))
    return str(answer.get("ETag", "")) if isinstance(answer, Mapping) else ""


def _send_parts(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None) -> str:
    with filesystem.storage_errors(uri):
        parts = S3Parts(uri, "", storage_options or {})
    ranges = dict(enumerate(cut((0, len(data)), max(ONE_PUT, -(-len(data) // MAX_PARTS))), 1))
    try:
        with REQUESTS.executor(IN_FLIGHT) as threads:
            sent = {
                part: threads.submit(parts.write, part, where, data[where[0] : where[1]])
                for part, where in ranges.items()
            }
            try:
                tags = {part: each.result() for part, each in sent.items()}
            finally:
                threads.shutdown(cancel_futures=True)
        return parts.publish(tags)
    except BaseException:
        parts.abandon()
        raise
