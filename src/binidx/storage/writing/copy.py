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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from binidx.errors import FormatError, ObjectNotFoundError, StorageError
from binidx.json_models import Count, Positive
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.stores.driver_errors import PartsLostError
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.multipart import MAX_PARTS, MultipartWriter, matches_digest, open_parts, part_digest
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
    """Return the state of a new copy.

    Args:
        size: bytes of the source.
        part_bytes: bytes of a part; more if there would be too many parts.
    """
    needed = -(-size // MAX_PARTS)
    whole_mebibytes = -(-needed // (1 << 20)) << 20
    return CopyState(size, max(part_bytes, whole_mebibytes if needed > part_bytes else 0))


IN_FLIGHT_BYTES = 256 << 20
MAX_IN_FLIGHT = 8
SAVE_SECONDS = 2.0


Unit = Literal["bytes", "rows", "samples", "tokens", "indices", ""]
"""Name of what is counted; "" for work of which only the time is shown."""


class ProgressWatcher(Protocol):
    """Receiver of progress and messages of long work."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        """Begin a phase of the work, of which a restarted one has done a part before.

        Args:
            what: name of the phase.
            total, done: units of the whole phase, and of the part done before.
        """

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
    """Counts of parts and bytes of one `ObjectCopy`."""

    parts_sent: int = 0
    parts_kept: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True)
class ObjectCopy:
    """Copy of `source` to `target`, which continues from `state`, and updates it.

    Args:
        state: progress of the copy of these bytes; if it is `done` and the target unchanged, nothing is copied.
        save: writes `state` to a journal; called at the start, every `save_seconds`, before publishing. It raises if
            another process has taken the copy over.
        before_publish: called right before the target appears; an exception stops the copy.
        codec: name of the codec with which the bytes are compressed on the way.
        level: level of the compression; None: the codec's default.
        checksum: read back the whole copy, decoded; False: compare the sizes.
    """

    source: RangeReader
    target: Location
    state: CopyState
    save: Callable[[], None]
    before_publish: Callable[[], None]
    watch: ProgressWatcher
    codec: str
    level: int | None
    checksum: bool
    save_seconds: float

    def run(self) -> CopyCounts:
        """Copy, verify and publish the object.

        Returns:
            Counts of the parts, and the bytes that were stored.

        Raises:
            CorruptCopyError: the target differed from the source, and was removed.
            StorageError: a store refuses; parts that can be continued, and an object that was there, stay.
        """
        target, state = self.target, self.state
        counts = CopyCounts(parts_kept=len(state.sent))
        if self._is_done():
            return counts
        if not self._was_published():
            parts = open_parts(target, state.size, state.token) if self.codec == "raw" else None
            counts = self._send_stream() if parts is None else self._send_parts(parts)
            if parts is None or parts.staged is None:
                try:
                    self._verify(self._open_target, self.checksum)
                except CorruptCopyError:
                    delete_object(target)
                    raise
        state.done = object_identity(target)
        self.save()
        return counts

    def _open_target(self) -> RangeReader:
        return open_object(self.target, cache=False, codec=self.codec)

    def _is_done(self) -> bool:
        """Return whether an earlier process finished the copy, and the target was not replaced since."""
        try:
            return self.state.done is not None and object_identity(self.target) == self.state.done
        except ObjectNotFoundError:
            return False

    def _was_published(self) -> bool:
        """Return whether an earlier process was killed right after publishing: the target has the content."""
        if not self.state.complete or not self.state.sent:
            return False
        try:
            self._verify(self._open_target, checksum=True)
        except (CorruptCopyError, ObjectNotFoundError):
            return False
        return True

    def _send_parts(self, parts: MultipartWriter) -> CopyCounts:
        """Send the missing parts and publish the object."""
        try:
            return self._send_and_publish(parts)
        except (PartsLostError, ObjectNotFoundError) as error:
            if isinstance(error, ObjectNotFoundError) and (not parts.staged or os.path.exists(parts.staged)):
                raise  # of the source: the parts stay
        # The earlier process, whose state this one continues, lives and has published the parts.
        self.state.token, self.state.sent = "", {}
        self.save()
        again = open_parts(self.target, self.state.size)
        assert again is not None
        return self._send_and_publish(again)

    def _send_and_publish(self, parts: MultipartWriter) -> CopyCounts:
        """Do `_send_parts` once; after a failure the parts stay for another process, unless the copy is corrupt."""
        try:
            counts = self._send_missing(parts)
            if (staged := parts.staged) is not None:
                self._verify(lambda: open_stored(Location(staged)), self.checksum)
            self.before_publish()
            parts.publish({part: tag for part, (_, tag) in self.state.sent.items()})
        except CorruptCopyError:
            parts.abandon()
            raise
        except BaseException:
            # A broken connection or Ctrl-C loses nothing; a kill loses the parts since the last save.
            with contextlib.suppress(Exception):
                self.save()
            parts.pause()
            raise
        return counts

    def _send_missing(self, parts: MultipartWriter) -> CopyCounts:
        """Send every part that does not exist yet."""
        state, ranges = self.state, self.state.ranges
        state.token, state.done = parts.token, None
        self.save()  # first of all: an upload that is in no journal would stay in the store
        state.sent = self._existing_parts(parts)
        missing = {part: ranges[part] for part in ranges if part not in state.sent}
        missing_bytes = sum(stop - start for start, stop in missing.values())
        counts = CopyCounts(len(missing), len(state.sent), missing_bytes)
        self.watch.begin(f"copy {self.target}", state.size, state.size - missing_bytes)

        def send(part: int) -> tuple[str, str]:
            [data] = self.source.read([missing[part]])
            return part_digest(data), parts.write(part, missing[part], data)

        with contextlib.closing(map_in_flight(send, missing, state.num_in_flight)) as marks:
            self._record(zip(missing, marks, strict=True))
        self.save()
        return counts

    def _existing_parts(self, parts: MultipartWriter) -> dict[int, tuple[str, str]]:
        """Return the parts of an earlier process that still exist unchanged."""
        existing, ranges, sent = {}, self.state.ranges, self.state.sent
        if sent:
            num_bytes = sum(stop - start for start, stop in map(ranges.__getitem__, sent))
            self.watch.begin("check the parts sent before", num_bytes, 0)
        for part, mark in sent.items():
            if parts.has_part(part, ranges[part], *mark):
                existing[part] = mark
            self.watch.advance(ranges[part][1] - ranges[part][0])
        return existing

    def _send_stream(self) -> CopyCounts:
        """Write every part in order, some read ahead, and publish the object."""
        state = self.state
        state.sent, state.done = {}, None
        self.save()
        self.watch.begin(f"{'copy' if self.codec == 'raw' else 'compress'} {self.target}", state.size, 0)
        with create_object(self.target, before_publish=self.before_publish) as stored:
            read_ahead = map_in_flight(
                lambda where: self.source.read([where])[0], state.ranges.values(), state.num_in_flight
            )
            with contextlib.closing(read_ahead) as blocks, codec_named(self.codec).create(stored, self.level) as writer:

                def write(data: memoryview) -> tuple[str, str]:
                    writer.write(data)
                    return part_digest(data), ""

                self._record(zip(state.ranges, map(write, blocks), strict=True))
            self.save()  # a process that lost its lease stops here
        return CopyCounts(len(state.sent), 0, object_identity(self.target)["size"])

    def _record(self, sent: Iterable[tuple[int, tuple[str, str]]]) -> None:
        """Add parts, as they are sent, to the state, and save it every few seconds."""
        ranges, saved = self.state.ranges, time.monotonic()
        for part, mark in sent:
            self.state.sent[part] = mark
            self.watch.advance(ranges[part][1] - ranges[part][0])
            if time.monotonic() - saved >= self.save_seconds:
                self.save()
                saved = time.monotonic()

    def _verify(self, open_copy: Callable[[], RangeReader], checksum: bool) -> None:
        """Raise CorruptCopyError unless a copy has the source's size and, with `checksum`, the digests of its parts."""
        target, state = self.target, self.state
        if checksum:
            self.watch.begin(f"verify {target}", state.size, 0)
        try:
            copy = open_copy()
            if copy.size != state.size:
                raise CorruptCopyError(
                    f"{target}: {copy.size} bytes arrived, needed {state.size}; removed, run it again"
                )
            ranges = state.ranges if checksum else {}

            def is_right(part: int) -> bool:
                return matches_digest(copy.read([ranges[part]])[0], state.sent[part][0])

            with contextlib.closing(map_in_flight(is_right, ranges, state.num_in_flight)) as answers:
                for (start, stop), right in zip(ranges.values(), answers, strict=True):
                    if not right:
                        raise CorruptCopyError(
                            f"{target}: bytes {start} to {stop} arrived wrong; removed, run it again"
                        )
                    self.watch.advance(stop - start)
        except FormatError as error:
            raise CorruptCopyError(f"{error}; removed, run it again") from error


def same_content(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects have the same bytes; reads both, up to the first difference.

    Args:
        watch: shows the compared bytes.
    """
    if left.size != right.size:
        return False
    watch.begin(f"compare {right.uri}", left.size, 0)
    ranges = cut((0, left.size), PART_BYTES)

    def is_equal(where: Range) -> bool:  # two memoryviews would compare item by item, ten times slower
        here, there = (np.frombuffer(reader.read([where])[0], np.uint8) for reader in (left, right))
        return np.array_equal(here, there)

    with contextlib.closing(map_in_flight(is_equal, ranges, MAX_IN_FLIGHT)) as equals:
        for (start, stop), equal in zip(ranges, equals, strict=True):
            if not equal:
                return False
            watch.advance(stop - start)
    return True
