"""Copy one object part by part: continued after a break, and verified by reading back what arrived.

    source ── read ──► digest ──► part        several parts in flight
                         │
                      CopyState ──► saved now and then, by whoever called
                         │
    target ── read back ─┴─ equal? ──► done   else what arrived is removed

A part counts as sent once its digest and the store's tag for it are in the state. A successor keeps the parts that are
still there as the state says, and sends the others. Memory: the parts in flight, 256 MiB at most.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.storage.backends import open_stored
from binidx.storage.copy_state import PART_BYTES, CopyState
from binidx.storage.parts import Parts, digest_of, open_parts
from binidx.storage.publish import delete_object, object_identity
from binidx.storage.ranges import Range, RangeReader, cut

IN_FLIGHT_BYTES = 256 << 20
MAX_IN_FLIGHT = 8
SAVE_SECONDS = 2.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class Watch(Protocol):
    """Who looks on."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """A stretch of work starts."""

    def advance(self, num_bytes: int) -> None:
        """So much more of it is done."""

    def say(self, message: str) -> None:
        """Something worth a line."""


class Silent:
    """A Watch that looks away."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def say(self, message: str) -> None: ...


class CorruptCopyError(StorageError):
    """What arrived is not what was sent; it was removed."""


@dataclass(frozen=True)
class CopyCounts:
    """What one call did."""

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
    watch: Watch,
    checksum: bool = True,
    save_seconds: float = SAVE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyCounts:
    """Bring the bytes of `source` under the name `target`, continuing from `state`, which is kept up to date.

    Args:
        save: keeps `state` where a successor finds it; called at the start, every `save_seconds`, before publishing.
        before_publish: last look before the target appears; what it raises stops the copy.
        checksum: read back all that arrived; False: compare the sizes.

    Raises:
        CorruptCopyError: the target did not hold what was sent, and was removed.
        StorageError: a store refuses; what can be continued stays.
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
            # A broken connection or Ctrl-C loses nothing; only a kill loses what was sent since the last save.
            with contextlib.suppress(Exception):
                save()
            parts.pause()
            raise
        if parts.staged is None:
            _verify_published(target, state, checksum, watch, storage_options)
    state.done = object_identity(target, storage_options)
    save()
    return counts


def same_content(left: RangeReader, right: RangeReader, watch: Watch) -> bool:
    """Whether two objects hold the same bytes; reads both, up to the first difference."""
    if left.size != right.size:
        return False
    watch.begin(f"compare {right.uri}", left.size, 0)
    ranges = cut((0, left.size), PART_BYTES)
    equals = in_flight(lambda where: left.read([where]) == right.read([where]), ranges, MAX_IN_FLIGHT)
    with contextlib.closing(equals):
        for (start, stop), equal in zip(ranges, equals, strict=True):
            if not equal:
                return False
            watch.advance(stop - start)
    return True


def in_flight(function: Callable[[Item], Result], items: Iterable[Item], count: int) -> Generator[Result, None, None]:
    """`map` over threads, in order, with no more than `count` items taken up but not yet given out.

    Close it: until then threads may be at work, and what they work on must stay open.
    """
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(count, thread_name_prefix="binidx-copy")
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
    """Whether an earlier process got as far as `done`, and nobody replaced the target since."""
    try:
        return state.done is not None and object_identity(target, storage_options) == state.done
    except ObjectNotFoundError:
        return False


def _was_published(target: str, state: CopyState, watch: Watch, storage_options: Mapping[str, Any] | None) -> bool:
    """Whether an earlier process published the target, but was killed before it could say so: by its content."""
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
    parts: Parts,
    state: CopyState,
    save: Callable[[], None],
    save_seconds: float,
    watch: Watch,
) -> CopyCounts:
    """Send every part that is not there yet."""
    ranges = state.ranges
    state.token, state.done = parts.token, None
    save()  # before anything that takes time: what is not written down here would be left behind
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


def _kept(parts: Parts, state: CopyState, watch: Watch) -> dict[int, tuple[str, str]]:
    """What an earlier process sent and is still there as it was."""
    kept, ranges = {}, state.ranges
    if state.sent:
        watch.begin(
            "check what is there", sum(stop - start for start, stop in (ranges[part] for part in state.sent)), 0
        )
    for part, mark in state.sent.items():
        if parts.kept(part, ranges[part], *mark):
            kept[part] = mark
        watch.advance(ranges[part][1] - ranges[part][0])
    return kept


def _send(
    source: RangeReader, parts: Parts, missing: Mapping[int, Range]
) -> Generator[tuple[int, tuple[str, str]], None, None]:
    """Carry parts over; gives each one's number, digest and tag once it is there."""

    def carry(item: tuple[int, Range]) -> tuple[memoryview | None, str, str]:
        data = source.read([item[1]])[0]
        digest = digest_of(data)
        return (data, digest, "") if parts.ordered else (None, digest, parts.write(*item, data))

    largest = max((stop - start for start, stop in missing.values()), default=1)
    count = max(2, min(MAX_IN_FLIGHT, IN_FLIGHT_BYTES // largest))
    carried = in_flight(carry, missing.items(), count)
    with contextlib.closing(carried):
        for (part, where), (data, digest, tag) in zip(missing.items(), carried, strict=True):
            if data is not None:
                parts.write(part, where, data)
            yield part, (digest, tag)


def _verify_published(
    target: str, state: CopyState, checksum: bool, watch: Watch, storage_options: Mapping[str, Any] | None
) -> None:
    try:
        verify_copy(
            functools.partial(open_stored, target, storage_options=storage_options), target, state, checksum, watch
        )
    except CorruptCopyError:
        delete_object(target, storage_options)
        raise


def verify_copy(
    open_arrived: Callable[[], RangeReader], target: str, state: CopyState, checksum: bool, watch: Watch
) -> None:
    """CorruptCopyError unless what arrived is what was sent to `target`."""
    if checksum:
        watch.begin(f"verify {target}", state.size, 0)
    arrived = open_arrived()
    if arrived.size != state.size:
        raise CorruptCopyError(f"{target}: {arrived.size} bytes arrived, needed {state.size}; removed, run it again")
    if not checksum:
        return
    ranges = state.ranges
    digests = in_flight(lambda where: digest_of(arrived.read([where])[0]), ranges.values(), MAX_IN_FLIGHT)
    with contextlib.closing(digests):
        for (part, (start, stop)), digest in zip(ranges.items(), digests, strict=True):
            if digest != state.sent[part][0]:
                raise CorruptCopyError(f"{target}: bytes {start} to {stop} arrived wrong; removed, run it again")
            watch.advance(stop - start)
