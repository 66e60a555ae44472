"""Is what was fetched of the content that was opened? Asked before it is kept, of stores that cannot be told which one.

s3, gs             each response tells its ETag or generation: `response_check`
http(s)            the same, with a strong ETag
files, memory      looked at after each read
the rest           looked at here, once for a fetch: one request more for a batch, and never new bytes under old names
"""

from __future__ import annotations

from typing import Any

from binidx.storage import filesystem
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.pinned import Opened
from binidx.storage.publish import object_identity
from binidx.storage.ranges import RangeReader

CONDITIONS = {"s3": "etag", "s3a": "etag", "gs": "generation", "gcs": "generation", "http": "etag", "https": "etag"}
LOOKED_AT = {"file", "local", "memory"}


def check_content(reader: RangeReader) -> None:
    """What lies at the bottom of a stack of readers still is what was opened.

    Raises:
        ObjectChangedError, ObjectNotFoundError: it is not.
    """
    stored: Any = reader
    while hasattr(stored, "reader"):
        stored = stored.reader
    if isinstance(stored, FsspecObject) and not is_pinned(stored):
        Opened(stored.uri, stored.uri, stored.identity).check(object_identity(stored.uri, stored.storage_options))


def is_pinned(stored: FsspecObject) -> bool:
    """Whether its store gives bytes of this content or an error."""
    protocol = filesystem.protocols(stored.uri)[0]
    mark = stored.identity.get(CONDITIONS.get(protocol, ""))
    return protocol in LOOKED_AT or (mark is not None and not str(mark).startswith("W/"))
