"""Upload of an object that is in memory, identified by the store's response.

up to 16 MiB               one PUT
larger, with multipart     an upload, 8 parts in flight
other stores               a stream; the MD5 that the store reports identifies the object
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from binidx.errors import StorageError
from binidx.storage.open import keep_whole, open_kept
from binidx.storage.ranges import cut
from binidx.storage.requests.metadata import find_object
from binidx.storage.store_protocols import MultipartStore
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import READS
from binidx.storage.writing.part_upload import PartUpload, cut_views
from binidx.storage.writing.publish import create_object
from binidx.storage.writing.staging import ONE_PUT

IN_FLIGHT = 8


def send_object(uri: str, data: memoryview, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Write a remote object, which appears whole, replacing what was there.

    Returns:
        Its identity, as `object_identity` returns it: from the store's response to this very request, since a later
        HEAD request may find another writer's object; or of an object with the MD5 of these bytes. None if the store
        reports neither.

    Raises:
        StorageError: the store refuses; an object that was there stays.
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
    """Put an object that was just sent into the disk cache of this node.

    Args:
        identity: returned by `send_object`.

    Returns:
        The cached bytes; None if there is no identity, or no cache, or no space.
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
        with READS.executor(IN_FLIGHT) as threads:
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
