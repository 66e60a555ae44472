"""Which objects are kept in a directory, and in which: all in a cache_dir; index files without one, too."""

from __future__ import annotations

import logging

from binidx.errors import ConfigError
from binidx.storage.cache_layout import CHUNK_BYTES
from binidx.storage.disk_cache import DiskCache, UncacheableError
from binidx.storage.index_dir import directory_of_index
from binidx.storage.ranges import RangeReader
from binidx.storage.settings import ReadSettings

logger = logging.getLogger(__name__)

READ_WHOLE = (".idx", ".npy", ".bundle")
"""Arrays that are looked at for as long as a run lasts: one block each, so that they are views of one map, shared by
all processes of the node, and not copied into the memory of each."""
WHOLE_CHUNK_BYTES = 1 << 20
"""Of what is read whole: a chunk is some 20 us of Python, which 64 KiB need to come from a disk."""


def with_disk_cache(reader: RangeReader, settings: ReadSettings, *, whole: bool = False) -> RangeReader:
    """The reader, over the directory of the settings if there is one, and if its content can be told from another.

    Args:
        whole: it is read whole: an index file has a directory of its own where there is no cache_dir.
    """
    is_index = reader.uri.endswith(READ_WHOLE)
    place: tuple[str, int | None] | None = None
    if settings.cache_dir is not None:
        place = settings.cache_dir, settings.cache_bytes
    elif whole and is_index:
        place = directory_of_index(settings)
    if place is None:
        return reader
    directory, limit = place
    if "://" in directory:
        raise ConfigError(f"cache_dir: found {directory}, needs a directory of this machine")
    chunk_bytes = settings.cache_chunk_bytes or (WHOLE_CHUNK_BYTES if is_index else CHUNK_BYTES)
    one_block = max(1, -(-reader.size // chunk_bytes)) * chunk_bytes if is_index else None
    try:
        return DiskCache(reader, directory, limit, chunk_bytes=chunk_bytes, block_bytes=one_block)
    except UncacheableError as error:
        logger.info("%s", error)
        return reader


def keep_whole(reader: DiskCache, data: memoryview) -> memoryview | None:
    """Keep the whole content, which is at hand: nobody here has to fetch it.

    Returns:
        The bytes as they are kept; None where they cannot be.
    """
    cached, chunks = reader.cached, range(-(-reader.size // reader.content.chunk_bytes))
    if cached.writable and cached.lacking(chunks) and cached.room.reserve(len(data)) and not cached.keep(0, data):
        cached.room.give_back(len(data))
    return cached.views([(0, len(data))])[0][0]
