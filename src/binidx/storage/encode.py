"""Copy one object and compress it on the way, verified by decoding what arrived.

    source ── read ──┬─► digest ──► CopyState
                     └─► codec ──► target
    target ── read back, decoded ── equal? ──► done   else what arrived is removed

How many bytes come out is known at the end only, so nothing is continued in the middle: what breaks off begins again,
unless it had been published.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from binidx.errors import FormatError, ObjectNotFoundError
from binidx.storage.backends import open_object
from binidx.storage.copy_state import CopyState
from binidx.storage.parts import digest_of, sweep
from binidx.storage.publish import Writer, create_object, delete_object, object_identity
from binidx.storage.ranges import RangeReader
from binidx.storage.resumable import CopyCounts, CorruptCopyError, Watch, in_flight, stands_already, verify_copy
from binidx.storage.segments import CODECS, codec_of

READ_AHEAD = 4
"""Parts of the source read before they are compressed."""


def encode_object(
    source: RangeReader,
    target: str,
    state: CopyState,
    *,
    level: int | None,
    save: Callable[[], None],
    before_publish: Callable[[], None],
    watch: Watch,
    checksum: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyCounts:
    """Bring the bytes of `source` under the name `target`, stored as that name tells.

    Args:
        state: of the plain bytes; a `done` one is left alone.
        checksum: decode all that arrived; False: compare the plain sizes.

    Raises:
        CorruptCopyError: the target did not hold what was sent, and was removed.
        StorageError: a store refuses; what stood there before still does.
    """
    if stands_already(target, state, storage_options):
        return CopyCounts(parts_kept=len(state.sent))
    kept = _was_published(target, state, watch, storage_options)
    if not kept:
        state.sent, state.done = {}, None
        save()
        sweep(target, ".tmp")
        watch.begin(f"compress {target}", state.size, 0)
        with create_object(target, storage_options, before_publish=before_publish) as stored:
            _encode(source, CODECS[codec_of(target)].create(stored, level), state, watch)
            save()  # whoever was overtaken stops here
        _verify(target, state, checksum, watch, storage_options)
    state.done = object_identity(target, storage_options)
    save()
    return CopyCounts(0, len(state.sent)) if kept else CopyCounts(len(state.sent), 0, state.done["size"])


def _encode(source: RangeReader, encoder: AbstractContextManager[Writer], state: CopyState, watch: Watch) -> None:
    """Every part in order, some read ahead."""
    ranges = state.ranges
    read_ahead = in_flight(lambda where: source.read([where])[0], ranges.values(), READ_AHEAD)
    with contextlib.closing(read_ahead) as blocks, encoder as writer:
        for part, data in zip(ranges, blocks, strict=True):
            writer.write(data)
            state.sent[part] = digest_of(data), ""
            watch.advance(len(data))


def _was_published(target: str, state: CopyState, watch: Watch, storage_options: Mapping[str, Any] | None) -> bool:
    """Whether an earlier process published the target, but was killed before it could say so: by its content."""
    if not state.complete:
        return False
    try:
        arrived = functools.partial(open_object, target, storage_options=storage_options, cache=False)
        verify_copy(arrived, target, state, True, watch)
    except (CorruptCopyError, FormatError, ObjectNotFoundError):
        return False
    return True


def _verify(
    target: str, state: CopyState, checksum: bool, watch: Watch, storage_options: Mapping[str, Any] | None
) -> None:
    try:
        arrived = functools.partial(open_object, target, storage_options=storage_options, cache=False)
        verify_copy(arrived, target, state, checksum, watch)
    except (CorruptCopyError, FormatError) as error:
        delete_object(target, storage_options)
        if isinstance(error, CorruptCopyError):
            raise
        raise CorruptCopyError(f"{error}; removed, run it again") from error
