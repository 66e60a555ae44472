"""Verified copies of one object, part by part or in one stream, which may be compressed on the way.

    source ── read ──► digest ──► part              several parts in flight
                         │
                      CopyState ──► journal         saved by the caller every few seconds
                         │
    target ── read back ─┴─ equal? ──► done         if not, the copy is removed

A part counts as sent once its digest and the store's tag for it are in the state. Another process continues from the
state: it keeps the parts that still exist, and sends the others. Memory: the parts in flight, 256 MiB at most. A stream
to a store without uploads, or of compressed bytes, whose number is known at the end only, begins again when it was
interrupted, unless it had been published.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from binidx.errors import FormatError, ObjectNotFoundError, StorageError
from binidx.json_models import Count, Positive
from binidx.storage.interfaces import Range, RangeReader, Writer
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.stores.driver_errors import PartsLostError
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.multipart import (
    MAX_PARTS,
    MultipartWriter,
    open_parts,
    part_digest,
)
from binidx.storage.writing.publish import create_object, delete_object

PART_BYTES = 8 << 20


@dataclass
class CopyState:
    """Progress of the copy of one object, in JSON values.

    Attributes:
        size: bytes of the source.
        part_bytes: bytes of each part but the last.
        token: continues the upload, see `open_parts`.
        sent: number of a sent part -> (digest, tag).
        done: identity of the target once it is verified.
    """

    size: Count
    part_bytes: Positive
    token: str = ""
    sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    done: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        last = -(-self.size // self.part_bytes)
        if last > MAX_PARTS:
            raise ValueError(f"part_bytes: {last} parts, an object has {MAX_PARTS} at most")
        if any(not 1 <= part <= last for part in self.sent):
            raise ValueError(f"sent: parts {min(self.sent)} to {max(self.sent)}, the object has 1 to {last}")

    @property
    def ranges(self) -> dict[int, Range]:
        """Part number -> its byte range."""
        return dict(enumerate(cut((0, self.size), self.part_bytes), 1))

    @property
    def complete(self) -> bool:
        """True if every part was sent."""
        return self.sent.keys() == self.ranges.keys()

    @property
    def num_in_flight(self) -> int:
        """Number of parts that are read and sent at once."""
        return max(2, min(MAX_IN_FLIGHT, IN_FLIGHT_BYTES // self.part_bytes))


def plan_copy(size: int, part_bytes: int = PART_BYTES) -> CopyState:
    """Return the state of a new copy, in parts of `part_bytes`, or larger ones if there would be too many."""
    needed = -(-size // MAX_PARTS)
    whole_mebibytes = -(-needed // (1 << 20)) << 20
    return CopyState(size, max(part_bytes, whole_mebibytes if needed > part_bytes else 0))


IN_FLIGHT_BYTES = 256 << 20
MAX_IN_FLIGHT = 8
SAVE_SECONDS = 2.0


Unit = Literal["bytes", "rows", "samples", "tokens"]


class ProgressWatcher(Protocol):
    """Receiver of progress and messages of long work."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        """Begin a phase of the work, of which a restarted one has done a part before."""

    def advance(self, count: int) -> None:
        """Add units to those done in this phase."""

    def say(self, message: str) -> None:
        """Show a message."""


class SilentWatcher:
    """Watcher that shows nothing."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None: ...

    def advance(self, count: int) -> None: ...

    def say(self, message: str) -> None: ...


class CorruptCopyError(StorageError):
    """A copy differs from its source; it was removed."""


@dataclass(frozen=True)
class CopyCounts:
    """Counts of parts and bytes of one call of `copy_object`."""

    parts_sent: int = 0
    parts_kept: int = 0
    bytes_sent: int = 0


def copy_object(
    source: RangeReader,
    target: Location,
    state: CopyState,
    *,
    save: Callable[[], None],
    before_publish: Callable[[], None],
    watch: ProgressWatcher,
    codec: str = "raw",
    level: int | None = None,
    checksum: bool = True,
    save_seconds: float = SAVE_SECONDS,
) -> CopyCounts:
    """Copy `source` to `target`, continuing from `state`, which is updated.

    Args:
        state: progress of the copy of these bytes; if it is `done` and the target unchanged, nothing is copied.
        save: writes `state` to a journal; called at the start, every `save_seconds`, before publishing.
        before_publish: called right before the target appears; an exception stops the copy.
        codec: name of the codec with which the bytes are compressed on the way.
        level: level of the compression; None: the codec's default.
        checksum: read back the whole copy, decoded; False: compare the sizes.

    Returns:
        Counts of the parts, and the bytes that were stored.

    Raises:
        CorruptCopyError: the target differed from the source, and was removed.
        StorageError: a store refuses; parts that can be continued, and an object that was there, stay.
    """

    def open_target() -> RangeReader:
        return open_object(target, cache=False, codec=codec)

    def copy_parts(parts: MultipartWriter) -> CopyCounts:
        with _paused_on_error(parts, save):
            counts = _send_missing(source, target, parts, state, save, save_seconds, watch)
            if (staged := parts.staged) is not None:
                _verify(lambda: open_stored(Location(staged)), target, state, checksum, watch)
            before_publish()
            parts.publish({part: tag for part, (_, tag) in state.sent.items()})
        return counts

    counts = CopyCounts(parts_kept=len(state.sent))
    if _is_done(target, state):
        return counts
    if not _was_published(open_target, target, state, watch):
        parts = open_parts(target, state.size, state.token) if codec == "raw" else None
        if parts is not None:
            try:
                counts = copy_parts(parts)
            except (PartsLostError, ObjectNotFoundError) as error:
                if isinstance(error, ObjectNotFoundError) and (not parts.staged or os.path.exists(parts.staged)):
                    raise  # of the source: the parts stay
                # The earlier process, whose state this one continues, lives and has published the parts.
                state.token, state.sent = "", {}
                save()
                counts = copy_parts(open_parts(target, state.size) or parts)
        else:
            state.sent, state.done = {}, None
            save()
            watch.begin(f"{'copy' if codec == 'raw' else 'compress'} {target}", state.size, 0)
            with create_object(target, before_publish=before_publish) as stored:
                _copy_stream(source, codec_named(codec).create(stored, level), state, save, save_seconds, watch)
                save()  # a process that lost its lease stops here
            counts = CopyCounts(len(state.sent), 0, object_identity(target)["size"])
        if parts is None or parts.staged is None:
            try:
                _verify(open_target, target, state, checksum, watch)
            except CorruptCopyError:
                delete_object(target)
                raise
    state.done = object_identity(target)
    save()
    return counts


def same_content(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects have the same bytes; reads both, up to the first difference."""
    if left.size != right.size:
        return False
    watch.begin(f"compare {right.uri}", left.size, 0)
    ranges = cut((0, left.size), PART_BYTES)
    equals = map_in_flight(lambda where: left.read([where]) == right.read([where]), ranges, MAX_IN_FLIGHT)
    with contextlib.closing(equals):
        for (start, stop), equal in zip(ranges, equals, strict=True):
            if not equal:
                return False
            watch.advance(stop - start)
    return True


def _is_done(target: Location, state: CopyState) -> bool:
    """Return whether an earlier process finished the copy, and the target was not replaced since."""
    try:
        return state.done is not None and object_identity(target) == state.done
    except ObjectNotFoundError:
        return False


def _was_published(
    open_target: Callable[[], RangeReader], target: Location, state: CopyState, watch: ProgressWatcher
) -> bool:
    """Return whether an earlier process was killed right after publishing: the target has the content."""
    if not state.complete or not state.sent:
        return False
    try:
        _verify(open_target, target, state, True, watch)
    except (CorruptCopyError, ObjectNotFoundError):
        return False
    return True


@contextlib.contextmanager
def _paused_on_error(parts: MultipartWriter, save: Callable[[], None]) -> Iterator[None]:
    """Keep the parts for another process if the block fails; remove those of a corrupt copy."""
    try:
        yield
    except CorruptCopyError:
        parts.abandon()
        raise
    except BaseException:
        # A broken connection or Ctrl-C loses nothing; a kill loses the parts since the last save.
        with contextlib.suppress(Exception):
            save()
        parts.pause()
        raise


def _send_missing(
    source: RangeReader,
    target: Location,
    parts: MultipartWriter,
    state: CopyState,
    save: Callable[[], None],
    save_seconds: float,
    watch: ProgressWatcher,
) -> CopyCounts:
    """Send every part that does not exist yet."""
    ranges = state.ranges
    state.token, state.done = parts.token, None
    save()  # first of all: an upload that is in no journal would stay in the store
    state.sent = _existing_parts(parts, state, watch)
    done_bytes = sum(stop - start for start, stop in map(ranges.__getitem__, state.sent))
    counts = CopyCounts(len(ranges) - len(state.sent), len(state.sent), state.size - done_bytes)
    watch.begin(f"copy {target}", state.size, done_bytes)
    missing = {part: where for part, where in ranges.items() if part not in state.sent}

    def send(part: int) -> tuple[str, str]:
        [data] = source.read([missing[part]])
        return part_digest(data), parts.write(part, missing[part], data)

    saved = time.monotonic()
    with contextlib.closing(map_in_flight(send, missing, state.num_in_flight)) as sent:
        for (part, (start, stop)), mark in zip(missing.items(), sent, strict=True):
            state.sent[part] = mark
            watch.advance(stop - start)
            if time.monotonic() - saved >= save_seconds:
                save()
                saved = time.monotonic()
    save()
    return counts


def _existing_parts(parts: MultipartWriter, state: CopyState, watch: ProgressWatcher) -> dict[int, tuple[str, str]]:
    """Return the parts of an earlier process that still exist unchanged."""
    found, ranges = {}, state.ranges
    if state.sent:
        num_bytes = sum(stop - start for start, stop in map(ranges.__getitem__, state.sent))
        watch.begin("check the parts sent before", num_bytes, 0)
    for part, mark in state.sent.items():
        if parts.has_part(part, ranges[part], *mark):
            found[part] = mark
        watch.advance(ranges[part][1] - ranges[part][0])
    return found


def _copy_stream(
    source: RangeReader,
    encoder: AbstractContextManager[Writer],
    state: CopyState,
    save: Callable[[], None],
    save_seconds: float,
    watch: ProgressWatcher,
) -> None:
    """Write every part in order, some read ahead. `save` raises if another process has taken the copy over."""
    ranges, saved = state.ranges, time.monotonic()
    read_ahead = map_in_flight(lambda where: source.read([where])[0], ranges.values(), state.num_in_flight)
    with contextlib.closing(read_ahead) as blocks, encoder as writer:
        for part, data in zip(ranges, blocks, strict=True):
            writer.write(data)
            state.sent[part] = part_digest(data), ""
            watch.advance(len(data))
            if time.monotonic() - saved >= save_seconds:
                save()
                saved = time.monotonic()


def _verify(
    open_copy: Callable[[], RangeReader], target: Location, state: CopyState, checksum: bool, watch: ProgressWatcher
) -> None:
    """Raise CorruptCopyError unless the copy has the source's size and, with `checksum`, the digests of its parts."""
    if checksum:
        watch.begin(f"verify {target}", state.size, 0)
    try:
        copy = open_copy()
        if copy.size != state.size:
            raise CorruptCopyError(f"{target}: {copy.size} bytes arrived, needed {state.size}; removed, run it again")
        ranges = state.ranges if checksum else {}
        digests = map_in_flight(lambda where: part_digest(copy.read([where])[0]), ranges.values(), state.num_in_flight)
        with contextlib.closing(digests):
            for (part, (start, stop)), digest in zip(ranges.items(), digests, strict=True):
                if digest != state.sent[part][0]:
                    raise CorruptCopyError(f"{target}: bytes {start} to {stop} arrived wrong; removed, run it again")
                watch.advance(stop - start)
    except FormatError as error:
        raise CorruptCopyError(f"{error}; removed, run it again") from error
