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
from binidx.storage.interfaces import MultipartStore
from binidx.storage.open import keep_whole, open_kept
from binidx.storage.ranges import cut
from binidx.storage.requests.head import find_object
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import copy_threads
from binidx.storage.writing.part_upload import PartUpload, cut_views
from binidx.storage.writing.publish import create_object
from binidx.storage.writing.staging import ONE_PUT

IN_FLIGHT = 8


def send_object(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Write a remote object, which appears whole, replacing what was there.

    Returns:
        Its identity, as `filesystem.identity_of` will word it: out of the store's answer to this very request, since
        whoever asks afterwards may be told of another writer's object; or of an object whose MD5 says that it has these
        bytes. None where neither is told.

    Raises:
        StorageError: the store refuses; what was there before still is.
    """
    store, options = open_store(uri, storage_options), storage_options or {}
    if not isinstance(store, MultipartStore):
        with create_object(uri, options, durable=False) as out:
            for start, stop in cut((0, len(data)), ONE_PUT):
                out.write(data[start:stop])
        return _identified_by_digest(uri, data, options)
    if len(data) <= ONE_PUT:
        with storage_errors(uri):
            tag = store.put(uri, cut_views(data))
    else:
        tag = _send_parts(store, uri, data, options)
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


def _identified_by_digest(uri: str, data: memoryview, storage_options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the identity of an object if the store reports an MD5, and it is that of the data."""
    try:
        found = find_object(uri, storage_options)
    except StorageError:
        return None  # the object is there; only its identity is unknown
    if found is None or found.info.md5 is None:
        return None
    digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return dict(found.info.identity) if found.info.md5 == digest else None


def _send_parts(store: MultipartStore, uri: str, data: memoryview, storage_options: Mapping[str, Any]) -> str:
    parts = PartUpload(store, uri, "", storage_options)
    ranges = dict(enumerate(cut((0, len(data)), max(ONE_PUT, -(-len(data) // store.max_parts))), 1))
    try:
        with copy_threads(IN_FLIGHT) as threads:
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
