"""Verified copies of one object, part by part (`copy_object`) or compressed on the way (`encode_object`).

    source ── read ──► digest ──► part              several parts in flight
                         │
                      CopyState ──► journal         saved by the caller every few seconds
                         │
    target ── read back ─┴─ equal? ──► done         if not, the copy is removed

A part counts as sent once its digest and the store's tag for it are in the state. Another process continues from the
state: it keeps the parts that still exist, and sends the others. Memory: the parts in flight, 256 MiB at most. The size
of a compressed object is known at its end only, so an interrupted one begins again, unless it had been published.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from binidx.errors import FormatError, ObjectNotFoundError, StorageError
from binidx.json_models import Count, Positive
from binidx.storage.codecs.segments import CODECS, codec_of
from binidx.storage.interfaces import Range, RangeReader, Writer
from binidx.storage.open import open_object, open_stored
from binidx.storage.ranges import cut
from binidx.storage.threads import READS
from binidx.storage.writing.multipart import MAX_PARTS, MultipartWriter, open_parts, part_digest, sweep
from binidx.storage.writing.publish import create_object, delete_object, object_identity

PART_BYTES = 8 << 20


@dataclass
class CopyState:
    """Progress of the copy of one object, in JSON values.

    Attributes:
        size: bytes of the source.
        part_bytes: of each part but the last.
        token: continues the upload, see `open_parts`.
        sent: part -> (digest, tag).
        done: identity of the target once it is verified.
    """

    size: Count
    part_bytes: Positive
    token: str = ""
    sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    done: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        last = -(-self.size // self.part_bytes)
        if any(not 1 <= part <= last for part in self.sent):
            raise ValueError(f"sent: parts {min(self.sent)} to {max(self.sent)}, the object has 1 to {last}")

    @property
    def ranges(self) -> dict[int, Range]:
        """part -> its bytes."""
        return dict(enumerate(cut((0, self.size), self.part_bytes), 1))

    @property
    def complete(self) -> bool:
        """True if every part was sent."""
        return self.sent.keys() == self.ranges.keys()


def plan_copy(size: int, part_bytes: int = PART_BYTES) -> CopyState:
    """Return the state of a new copy, in parts of `part_bytes`, or larger ones if there would be too many."""
    needed = -(-size // MAX_PARTS)
    whole_mebibytes = -(-needed // (1 << 20)) << 20
    return CopyState(size, max(part_bytes, whole_mebibytes if needed > part_bytes else 0))


IN_FLIGHT_BYTES = 256 << 20
MAX_IN_FLIGHT = 8
SAVE_SECONDS = 2.0
Item = TypeVar("Item")
Result = TypeVar("Result")


class ProgressWatcher(Protocol):
    """Receiver of progress and messages of long work."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """Begin a phase of the work."""

    def advance(self, num_bytes: int) -> None:
        """Add bytes to those done in this phase."""

    def say(self, message: str) -> None:
        """Show a message."""


class SilentWatcher:
    """Watcher that shows nothing."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def say(self, message: str) -> None: ...


class CorruptCopyError(StorageError):
    """A copy differs from its source; it was removed."""


@dataclass(frozen=True)
class CopyCounts:
    """Parts and bytes of one call."""

    parts_sent: int = 0
    parts_kept: int = 0
    bytes_sent: int = 0


def copy_object(
    source: RangeReader,
    target: str,
    state: CopyState,
    *,
    save: Callable[[], None],
    before_publish: Callable[[], None],
    watch: ProgressWatcher,
    checksum: bool = True,
    save_seconds: float = SAVE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyCounts:
    """Copy `source` to `target`, continuing from `state`, which is updated.

    Args:
        save: writes `state` to a journal; called at the start, every `save_seconds`, before publishing.
        before_publish: called right before the target appears; an exception stops the copy.
        checksum: read back the whole copy; False: compare the sizes.

    Raises:
        CorruptCopyError: the target differed from the source, and was removed.
        StorageError: a store refuses; parts that can be continued stay.
    """
    counts = CopyCounts(parts_kept=len(state.sent))
    if stands_already(target, state, storage_options):
        return counts
    if not _was_published(target, state, watch, storage_options):
        parts = open_parts(target, state.size, state.token, storage_options)
        try:
            counts = _fill(source, target, parts, state, save, save_seconds, watch)
            if parts.staged is not None:
                verify_copy(functools.partial(open_stored, parts.staged), target, state, checksum, watch)
            before_publish()
            parts.publish({part: tag for part, (_, tag) in state.sent.items()})
        except CorruptCopyError:
            parts.abandon()
            raise
        except BaseException:
            # A broken connection or Ctrl-C loses nothing; a kill loses the parts since the last save.
            with contextlib.suppress(Exception):
                save()
            parts.pause()
            raise
        if parts.staged is None:
            _verify_published(target, state, checksum, watch, storage_options)
    state.done = object_identity(target, storage_options)
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


def map_in_flight(
    function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Generator[Result, None, None]:
    """`map` over threads, in order, with at most `count` items in work or waiting to be yielded.

    Close it: until then threads may use the items, which must stay open.
    """
    pending: deque[Future[Result]] = deque()
    pool = READS.executor(count)
    try:
        for item in items:
            if len(pending) == count:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def stands_already(target: str, state: CopyState, storage_options: Mapping[str, Any] | None) -> bool:
    """Return whether an earlier process finished the copy, and the target was not replaced since."""
    try:
        return state.done is not None and object_identity(target, storage_options) == state.done
    except ObjectNotFoundError:
        return False


def _was_published(
    target: str, state: CopyState, watch: ProgressWatcher, storage_options: Mapping[str, Any] | None
) -> bool:
    """Return whether an earlier process was killed right after publishing: the target has the content."""
    if not state.complete or not state.sent:
        return False
    try:
        verify_copy(functools.partial(open_stored, target, storage_options=storage_options), target, state, True, watch)
    except (CorruptCopyError, ObjectNotFoundError):
        return False
    return True


def _fill(
    source: RangeReader,
    target: str,
    parts: MultipartWriter,
    state: CopyState,
    save: Callable[[], None],
    save_seconds: float,
    watch: ProgressWatcher,
) -> CopyCounts:
    """Send every missing part."""
    ranges = state.ranges
    state.token, state.done = parts.token, None
    save()  # first of all: an upload that is in no journal would stay in the store
    state.sent = _kept(parts, state, watch)
    kept = sum(stop - start for start, stop in (ranges[part] for part in state.sent))
    counts = CopyCounts(len(ranges) - len(state.sent), len(state.sent), state.size - kept)
    watch.begin(f"copy {target}", state.size, kept)
    saved = time.monotonic()
    missing = {part: where for part, where in ranges.items() if part not in state.sent}
    with contextlib.closing(_send(source, parts, missing)) as sent:
        for part, mark in sent:
            state.sent[part] = mark
            watch.advance(ranges[part][1] - ranges[part][0])
            if time.monotonic() - saved >= save_seconds:
                save()
                saved = time.monotonic()
    save()
    return counts


def _kept(parts: MultipartWriter, state: CopyState, watch: ProgressWatcher) -> dict[int, tuple[str, str]]:
    """Return the parts of an earlier process that still exist unchanged."""
    kept, ranges = {}, state.ranges
    if state.sent:
        watch.begin(
            "check the parts sent before", sum(stop - start for start, stop in (ranges[part] for part in state.sent)), 0
        )
    for part, mark in state.sent.items():
        if parts.kept(part, ranges[part], *mark):
            kept[part] = mark
        watch.advance(ranges[part][1] - ranges[part][0])
    return kept


def _send(
    source: RangeReader, parts: MultipartWriter, missing: Mapping[int, Range]
) -> Generator[tuple[int, tuple[str, str]], None, None]:
    """Send parts; yield the number, digest and tag of each once it is stored."""

    def carry(item: tuple[int, Range]) -> tuple[memoryview | None, str, str]:
        data = source.read([item[1]])[0]
        digest = part_digest(data)
        return (data, digest, "") if parts.ordered else (None, digest, parts.write(*item, data))

    largest = max((stop - start for start, stop in missing.values()), default=1)
    count = max(2, min(MAX_IN_FLIGHT, IN_FLIGHT_BYTES // largest))
    carried = map_in_flight(carry, missing.items(), count)
    with contextlib.closing(carried):
        for (part, where), (data, digest, tag) in zip(missing.items(), carried, strict=True):
            if data is not None:
                parts.write(part, where, data)
            yield part, (digest, tag)


def _verify_published(
    target: str, state: CopyState, checksum: bool, watch: ProgressWatcher, storage_options: Mapping[str, Any] | None
) -> None:
    try:
        verify_copy(
            functools.partial(open_stored, target, storage_options=storage_options), target, state, checksum, watch
        )
    except CorruptCopyError:
        delete_object(target, storage_options)
        raise


def verify_copy(
    open_arrived: Callable[[], RangeReader], target: str, state: CopyState, checksum: bool, watch: ProgressWatcher
) -> None:
    """Raise CorruptCopyError unless the copy has the digests of the parts that were sent to `target`."""
    if checksum:
        watch.begin(f"verify {target}", state.size, 0)
    arrived = open_arrived()
    if arrived.size != state.size:
        raise CorruptCopyError(f"{target}: {arrived.size} bytes arrived, needed {state.size}; removed, run it again")
    if not checksum:
        return
    ranges = state.ranges
    digests = map_in_flight(lambda where: part_digest(arrived.read([where])[0]), ranges.values(), MAX_IN_FLIGHT)
    with contextlib.closing(digests):
        for (part, (start, stop)), digest in zip(ranges.items(), digests, strict=True):
            if digest != state.sent[part][0]:
                raise CorruptCopyError(f"{target}: bytes {start} to {stop} arrived wrong; removed, run it again")
            watch.advance(stop - start)


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
    watch: ProgressWatcher,
    checksum: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyCounts:
    """Copy `source` to `target`, in the codec of its name.

    Args:
        state: of the plain bytes; a `done` one is left alone.
        checksum: decode the whole copy; False: compare the plain sizes.

    Raises:
        CorruptCopyError: the target differed from the source, and was removed.
        StorageError: a store refuses; an object that was there stays.
    """
    if stands_already(target, state, storage_options):
        return CopyCounts(parts_kept=len(state.sent))
    kept = _encode_was_published(target, state, watch, storage_options)
    if not kept:
        state.sent, state.done = {}, None
        save()
        sweep(target, ".tmp")
        watch.begin(f"compress {target}", state.size, 0)
        with create_object(target, storage_options, before_publish=before_publish) as stored:
            _encode(source, CODECS[codec_of(target)].create(stored, level), state, watch)
            save()  # a process that lost its lease stops here
        _verify(target, state, checksum, watch, storage_options)
    state.done = object_identity(target, storage_options)
    save()
    return CopyCounts(0, len(state.sent)) if kept else CopyCounts(len(state.sent), 0, state.done["size"])


def _encode(
    source: RangeReader, encoder: AbstractContextManager[Writer], state: CopyState, watch: ProgressWatcher
) -> None:
    """Compress every part in order, some read ahead."""
    ranges = state.ranges
    read_ahead = map_in_flight(lambda where: source.read([where])[0], ranges.values(), READ_AHEAD)
    with contextlib.closing(read_ahead) as blocks, encoder as writer:
        for part, data in zip(ranges, blocks, strict=True):
            writer.write(data)
            state.sent[part] = part_digest(data), ""
            watch.advance(len(data))


def _encode_was_published(
    target: str, state: CopyState, watch: ProgressWatcher, storage_options: Mapping[str, Any] | None
) -> bool:
    """Return whether an earlier process was killed right after publishing: the target has the content."""
    if not state.complete:
        return False
    try:
        arrived = functools.partial(open_object, target, storage_options=storage_options, cache=False)
        verify_copy(arrived, target, state, True, watch)
    except (CorruptCopyError, FormatError, ObjectNotFoundError):
        return False
    return True


def _verify(
    target: str, state: CopyState, checksum: bool, watch: ProgressWatcher, storage_options: Mapping[str, Any] | None
) -> None:
    try:
        arrived = functools.partial(open_object, target, storage_options=storage_options, cache=False)
        verify_copy(arrived, target, state, checksum, watch)
    except (CorruptCopyError, FormatError) as error:
        delete_object(target, storage_options)
        if isinstance(error, CorruptCopyError):
            raise
        raise CorruptCopyError(f"{error}; removed, run it again") from error
