"""The contracts as functions, and small objects that meet them: for our tests and for those of your own readers.

    check_range_reader(lambda data: MyReader(store(data)))
    check_object_store(lambda name, data: (MyStore(), put(name, data)))

A contract takes a factory, so that every implementation and every stack of two is one more row of its parameters. Each
check is a function that a failing test names.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from binidx.errors import BinidxError, ObjectNotFoundError, ShortReadError
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import (
    BlockingStore,
    ComposingStore,
    ListableStore,
    ListRequest,
    MultipartStore,
    ObjectInfo,
    Prices,
    Range,
    RangeReader,
    ReadableStore,
    Store,
    WritableStore,
)
from binidx.storage.stores.driver_errors import translated
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import io_loop

Make = Callable[[bytes], RangeReader]


"""A reader over an object with this content."""


# Three chunks of 64 KiB and a last one that is short; no two places look alike.
CONTENT = random.Random(0).randbytes(200_003)


SECONDS_OF_A_CHILD = 30.0


class MemoryObject(InMemory):
    """Bytes in memory as an object: `asked` remembers the ranges of each read; other `data` may take its place."""

    def __init__(self, data: bytes, uri: str = "memory-object") -> None:
        super().__init__(uri, data)
        self.asked: list[list[Range]] = []

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        self.asked.append(list(ranges))
        return super().read(ranges)

    def __reduce__(self) -> tuple[type[MemoryObject], tuple[bytes, str]]:
        return MemoryObject, (bytes(self.data), self.uri)


class FaultyObject:
    """A reader whose next reads fail as told: each takes one of `faults`, raises it, or reads if it is None.

    When the faults are used up every read is good.
    """

    def __init__(self, reader: RangeReader, faults: Sequence[Exception | None]) -> None:
        self.uri, self.size = reader.uri, reader.size
        self.reader = reader
        self.faults = list(faults)

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the content, as the reader below saw it."""
        found: dict[str, Any] = getattr(self.reader, "identity", {})
        return found

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return self.reader.read(ranges)

    def __reduce__(self) -> tuple[type[FaultyObject], tuple[RangeReader, list[Exception | None]]]:
        return FaultyObject, (self.reader, self.faults)


def check_range_reader(make: Make) -> None:
    """A reader keeps the promises of `RangeReader`, or the check that fails says which one it breaks.

    Takes tens of reads, eight threads and, where there is one, a fork.

    Raises:
        AssertionError: the promise is broken.
    """
    reader = make(CONTENT)
    for check in CHECKS:
        check(reader)
    check_empty_object(make(b""))


def check_size_and_uri(reader: RangeReader) -> None:
    needed(isinstance(reader, RangeReader), f"{type(reader).__name__} is no RangeReader: it needs uri, size and read")
    needed(reader.size == len(CONTENT), f"size {reader.size} of an object of {len(CONTENT)} bytes")
    needed(bool(reader.uri), "an empty uri: errors could name nothing")


def check_views_are_read_only_bytes(reader: RangeReader) -> None:
    for view in reader.read([(3, 10), (65_530, 65_546), (0, 0)]):
        needed(isinstance(view, memoryview), f"a {type(view).__name__} for a range, needed a memoryview")
        needed(view.readonly, "a view that can be written to")
        needed(view.itemsize == view.ndim == 1 and view.contiguous, f"a view of {view.format}, needed plain bytes")


def check_answers_come_in_the_order_asked(reader: RangeReader) -> None:
    needed(reader.read([]) == [], "answers to no ranges")
    assert_reads(reader, [(0, 1)])
    assert_reads(reader, [(199_000, 200_003), (5, 5_000), (0, 1), (150_000, 150_001)])
    assert_reads(reader, [(10, 20), (10, 20), (5, 25), (15, 30), (12, 13)])


def check_ranges_may_be_empty_or_everything(reader: RangeReader) -> None:
    size = reader.size
    assert_reads(reader, [(0, 0), (size, size), (7, 7), (0, size), (size - 1, size), (70_000, 70_000)])


def check_random_ranges_are_slices(reader: RangeReader) -> None:
    for ranges in random_reads(seed=1, count=10):
        assert_reads(reader, ranges)


def check_what_lies_outside_is_refused(reader: RangeReader) -> None:
    """Before anything is returned; and the reader goes on working."""
    size = reader.size
    for outside in [(0, size + 1), (size, size + 1), (size + 5, size + 5), (-1, 1), (-5, -1), (3, 2)]:
        try:
            found = reader.read([(0, 1), outside])
        except ShortReadError as error:
            needed(reader.uri in str(error), f"the error does not name {reader.uri}: {error}")
        else:
            raise AssertionError(f"{outside} of {size} bytes gave {list(map(len, found))} bytes, needed ShortReadError")
        assert_reads(reader, [(0, 1)])


def check_views_outlive_later_reads(reader: RangeReader) -> None:
    reads = list(random_reads(seed=2, count=20))
    views = [reader.read(ranges) for ranges in reads]
    gc.collect()
    for ranges, found in zip(reads, views, strict=True):
        assert_equal(found, ranges)


def check_threads_may_share_it(reader: RangeReader) -> None:
    def work(seed: int) -> None:
        for ranges in random_reads(seed, count=5):
            assert_reads(reader, ranges)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def check_it_pickles(reader: RangeReader) -> None:
    twin = pickle.loads(pickle.dumps(reader))
    needed((twin.uri, twin.size) == (reader.uri, reader.size), f"{reader.uri}: a pickle became {twin.uri}")
    for ranges in random_reads(seed=3, count=3):
        assert_reads(twin, ranges)
    assert_reads(reader, [(0, 10)])


def check_a_fork_may_go_on_reading(reader: RangeReader) -> None:
    """Child and parent at once, after the parent has read."""
    if not hasattr(os, "fork"):
        return

    def work(seed: int) -> None:
        for ranges in random_reads(seed, count=10):
            assert_reads(reader, ranges)

    work(4)
    children = [forked(lambda seed=seed: work(seed)) for seed in (5, 6)]  # type: ignore[misc]
    work(7)
    for child in children:
        needed(ended_well(child), "a forked child did not read what it asked")


def check_empty_object(reader: RangeReader) -> None:
    needed(reader.size == 0, f"size {reader.size} of an empty object")
    needed([bytes(view) for view in reader.read([(0, 0), (0, 0)])] == [b"", b""], "bytes of an empty object")
    try:
        reader.read([(0, 1)])
    except ShortReadError:
        return
    raise AssertionError("a byte of an empty object was read, needed ShortReadError")


def assert_reads(reader: RangeReader, ranges: Sequence[Range]) -> None:
    assert_equal(reader.read(ranges), ranges)


def assert_equal(views: Sequence[memoryview], ranges: Sequence[Range]) -> None:
    needed(len(views) == len(ranges), f"{len(views)} answers to {len(ranges)} ranges")
    for view, (start, stop) in zip(views, ranges, strict=True):
        found = f"{len(view)} bytes" if isinstance(view, memoryview) else f"a {type(view).__name__}"
        needed(view == CONTENT[start:stop], f"range {start}-{stop}: {found} that are not those of the object")


def needed(kept: bool, otherwise: str) -> None:
    """Not an assert: python -O takes those out, and any reader would pass."""
    if not kept:
        raise AssertionError(otherwise)


def random_reads(seed: int, count: int) -> Iterator[list[Range]]:
    """Lists of ranges, most of them short, some long, in no order."""
    choose = random.Random(seed)
    for _ in range(count):
        starts = [choose.randrange(len(CONTENT)) for _ in range(choose.randrange(1, 12))]
        yield [(start, min(start + int(choose.paretovariate(0.3)), len(CONTENT))) for start in starts]


def forked(work: Callable[[], None]) -> int:
    """The pid of a child that works and ends with 0, or with 1 if it raises."""
    with warnings.catch_warnings():
        # Python 3.12 warns whenever a process with threads forks; that readers survive this is what is checked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended_well(pid: int) -> bool:
    """Wait for a child; one that hangs is killed."""
    deadline = time.monotonic() + SECONDS_OF_A_CHILD
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


MakeObject = Callable[[str, bytes], tuple[Store, str]]
"""Puts an object of this name and content into a store, replacing it; returns the store and the URI of the object."""


def check_object_store(make: MakeObject) -> None:
    """Check that a store keeps the promises of `storage.interfaces`: those of reading, and of each protocol it has.

    Args:
        make: see `MakeObject`; the names are in one folder, which is empty at first.

    Raises:
        AssertionError: a promise is broken.

    Example:
        >>> check_object_store(lambda name, data: (MyStore(), put(name, data)))  # doctest: +SKIP
    """
    store, uri = make("data", CONTENT)
    needed(isinstance(store, ReadableStore | BlockingStore), f"{type(store).__name__} is no store that can be read")
    needed(store.max_in_flight > 0 and store.max_gap >= 0, "no requests in flight, or a gap below 0")
    needed(isinstance(store.prices(), Prices), "no prices")
    info = head_once(store, uri)
    needed((info.uri, info.size, info.identity["size"]) == (uri, len(CONTENT), len(CONTENT)), f"{uri}: is {info}")
    needed(head_once(store, uri) == info, f"{uri}: another identity at the second look")
    for each in (store, pickle.loads(pickle.dumps(store))):
        for where in [(0, 1), (3, 65_546), (0, len(CONTENT)), (len(CONTENT) - 5, len(CONTENT))]:
            needed(fetch_once(each, info, where) == CONTENT[slice(*where)], f"{uri}: wrong bytes for {where}")
    needed(store.get(uri, len(CONTENT)) == CONTENT, f"{uri}: `get` returns other bytes")
    needed(store.get(uri, 10)[:11] == CONTENT[:11], f"{uri}: `get` does not return the first bytes")
    check_absence(store, f"{uri}-none")
    _, empty = make("empty", b"")
    needed(head_once(store, empty).size == 0 and store.get(empty, 10) == b"", f"{empty}: is not empty")
    check_replacement(make)
    for protocol, check in STORE_CHECKS.items():
        if isinstance(store, protocol):
            check(store, uri)


def head_once(store: Any, uri: str) -> ObjectInfo:
    """Return what a store reports of an object; checks the last bytes if they come along."""
    if isinstance(store, BlockingStore):
        return store.head_now(uri)
    run = asyncio.run_coroutine_threadsafe
    info, none = run(store.head(uri), io_loop()).result()
    again, tail = run(store.head(uri, tail_bytes=7), io_loop()).result()
    right = tail == CONTENT[-7:] or info.size != len(CONTENT)
    needed(none == b"" and (tail == b"" or right), f"{uri}: wrong last bytes")
    needed(again == info, f"{uri}: another identity with the last bytes")
    return cast(ObjectInfo, info)


def fetch_once(store: Any, info: ObjectInfo, where: Range) -> bytes:
    if isinstance(store, BlockingStore):
        return store.fetch_now(info, [where])[0]
    return bytes(asyncio.run_coroutine_threadsafe(store.fetch(info, where), io_loop()).result())


def check_absence(store: Any, uri: str) -> None:
    for request in (lambda: head_once(store, uri), lambda: store.get(uri, 10)):
        try:
            found = request()
        except Exception as error:
            ours = error if isinstance(error, BinidxError) else translated(uri, error)
            needed(isinstance(ours, ObjectNotFoundError), f"{uri}: there is none, but the error is {error!r}")
        else:
            raise AssertionError(f"{uri}: there is none, but the store reports {found!r:.80}")


def check_replacement(make: MakeObject) -> None:
    """A store that pins never returns bytes of another version."""
    store, uri = make("replaced", b"old" * 100)
    info = head_once(store, uri)
    time.sleep(0.02)  # the time of a file's last change is as fine as the kernel's tick
    make("replaced", b"new" * 100)
    needed(head_once(store, uri).identity != info.identity or not store.pins(info), f"{uri}: replaced, same identity")
    try:
        found = fetch_once(store, info, (0, 3))
    except Exception:
        return
    needed(found == b"old" or not store.pins(info), f"{uri}: pinned, but bytes of another version")


def check_writing(store: WritableStore, uri: str) -> None:
    new, pieces = f"{uri}-put", [memoryview(CONTENT[:100_000]), memoryview(CONTENT[100_000:])]
    store.put(new, pieces)
    needed(store.get(new, len(CONTENT)) == CONTENT, f"{new}: `put` wrote other bytes")
    store.put(new, [memoryview(b"replaced")])
    try:
        store.put(new, [memoryview(b"again")], if_absent=True)
    except FileExistsError:
        pass
    else:
        raise AssertionError(f"{new}: replaced although `if_absent`")
    needed(store.get(new, 100) == b"replaced", f"{new}: replaced although `if_absent`")
    store.delete(new)
    check_absence(store, new)
    store.put(new, [memoryview(b"first")], if_absent=True)
    needed(store.get(new, 100) == b"first", f"{new}: `put` with `if_absent` wrote other bytes")
    store.delete(new)


def check_multipart(store: MultipartStore, uri: str) -> None:
    new, part = f"{uri}-parts", random.Random(3).randbytes(store.min_part)
    upload = store.upload(new)
    tags = {2: upload.write(2, [memoryview(b"last")])}
    check_absence(store, new)
    upload = store.upload(new, upload.token)
    needed(dict(upload.arrived()) == {2: (4, tags[2])}, f"{new}: {dict(upload.arrived())} arrived, needed part 2")
    tags[1] = upload.write(1, [memoryview(part)])
    upload.complete(tags)
    info = head_once(store, new)
    needed(fetch_once(store, info, (0, info.size)) == part + b"last", f"{new}: its parts are not in order")
    copy = store.upload(f"{new}-copy")
    copy.complete({1: copy.copy(1, info, (0, len(part))), 2: copy.copy(2, info, (0, 3))})
    copied = head_once(store, f"{new}-copy")
    found = fetch_once(store, copied, (0, copied.size))
    needed(found == part + (part + b"last")[:3], f"{new}: copied parts have other bytes")
    dropped = store.upload(f"{new}-dropped")
    dropped.write(1, [memoryview(b"x")])
    dropped.abort()
    check_absence(store, f"{new}-dropped")


def check_composing(store: ComposingStore, uri: str) -> None:
    store.put(f"{uri}-tail", [memoryview(b"tail")])
    sources = [head_once(store, each) for each in (f"{uri}-tail", uri)]
    store.compose(f"{uri}-composed", sources)
    needed(store.get(f"{uri}-composed", 1 << 20) == b"tail" + CONTENT, f"{uri}: composed of other bytes")


def check_listing(store: ListableStore, uri: str) -> None:
    bucket, key = store.split(uri)
    request = ListRequest(bucket, key, "/", key[:-1])
    found, token = asyncio.run_coroutine_threadsafe(store.list_page(request), io_loop()).result()
    needed(token == "" or len(found) > 1, f"{uri}: an empty page that is not the last one")
    needed(key in found and found[key].size == len(CONTENT), f"{uri}: not in the list")
    needed(same_identity(found[key].identity, head_once(store, uri).identity), f"{uri}: listed with another identity")


STORE_CHECKS: dict[Any, Callable[[Any, str], None]] = {
    WritableStore: check_writing,
    MultipartStore: check_multipart,
    ComposingStore: check_composing,
    ListableStore: check_listing,
}


CHECKS: tuple[Callable[[RangeReader], None], ...] = (
    check_size_and_uri,
    check_views_are_read_only_bytes,
    check_answers_come_in_the_order_asked,
    check_ranges_may_be_empty_or_everything,
    check_random_ranges_are_slices,
    check_what_lies_outside_is_refused,
    check_views_outlive_later_reads,
    check_threads_may_share_it,
    check_it_pickles,
    check_a_fork_may_go_on_reading,
)
