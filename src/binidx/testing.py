"""Contracts of stores, readers and orders as functions, and a small reader that meets them.

    check_range_reader(lambda data: MyReader(store(data)))
    check_object_store(lambda name, data: (MyStore(), put(name, data)))
    check_order(MyOrder(...))

A contract takes a factory, so a test can apply it to every implementation and to every stack of two. The traceback of a
failed test names the function that checks the promise. Capabilities of a reader, protocols of a store: all are checked.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from binidx.errors import BinidxError, ObjectNotFoundError, ShortReadError
from binidx.order.order_contract import check_order as check_order
from binidx.order.order_contract import require
from binidx.storage.adapters import InMemory
from binidx.storage.cache.disk_cache import check_content
from binidx.storage.interfaces import ConcurrentReader, MappedReader, Range, RangeReader
from binidx.storage.ranges import as_block_reader, as_capability, as_composite
from binidx.storage.store_protocols import (
    BlockingStore,
    ComposingStore,
    ListableStore,
    ListRequest,
    MultipartStore,
    ObjectInfo,
    Prices,
    ReadableStore,
    SearchableStore,
    Store,
    StreamingStore,
    WritableStore,
)
from binidx.storage.stores.driver_errors import translated
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import READS, io_loop

MakeReader = Callable[[bytes], RangeReader]  # stores bytes as an object, and returns a reader of it

CONTENT = random.Random(0).randbytes(200_003)
"""Three chunks of 64 KiB and a shorter last one; no two places look alike."""

OUTSIDE = [(0, 200_004), (200_003, 200_004), (200_008, 200_008), (-1, 1), (-5, -1), (3, 2)]

CHILD_TIMEOUT_SECONDS = 30.0


class MemoryObject(InMemory):
    """Reader of bytes in memory that records its reads.

    Attributes:
        asked: the ranges of each read.
        data: the content; a test may replace it.
    """

    def __init__(self, data: bytes, uri: str = "memory-object") -> None:
        super().__init__(uri, data)
        self.asked: list[list[Range]] = []

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        self.asked.append(list(ranges))
        return super().read(ranges)

    def __reduce__(self) -> tuple[type[MemoryObject], tuple[bytes, str]]:
        return MemoryObject, (bytes(self.data), self.uri)


def check_range_reader(make: MakeReader) -> None:
    """Check that a reader meets the contract of `RangeReader`, and of each capability that it has.

    It makes some dozens of reads, and uses eight threads and, on systems that have `os.fork`, two forks.

    Args:
        make: returns a reader over an object with the given content.

    Raises:
        AssertionError: a promise is broken; the message says which.

    Example:
        check_range_reader(lambda data: MyReader(store(data)))
    """
    reader = make(CONTENT)
    check_attributes(reader)
    check_reads_are_slices(reader)
    check_ranges_outside_are_refused(reader)
    check_views_outlive_later_reads(reader)
    check_threads_may_share_it(reader)
    check_it_pickles(reader)
    check_a_fork_may_go_on_reading(reader)
    check_empty_object(make(b""))
    check_mapped_reader(reader)
    check_composite_reader(reader)
    check_concurrent_reader(reader)
    check_content(reader)  # accepts an unchanged object
    check_block_reader(reader)


def check_attributes(reader: RangeReader) -> None:
    require(isinstance(reader, RangeReader), f"{type(reader).__name__}: needs uri, size, identity and read")
    require(reader.size == len(CONTENT), f"size {reader.size} of an object of {len(CONTENT)} bytes")
    require(bool(reader.uri), "an empty uri, which names nothing in an error")
    require(isinstance(reader.identity, Mapping), f"identity is a {type(reader.identity).__name__}, needs a mapping")


def check_reads_are_slices(reader: RangeReader) -> None:
    """Check that results are read-only bytes, in the order of the ranges, also if these overlap or are empty."""
    require(reader.read([]) == [], "results for no ranges")
    for view in reader.read([(3, 10), (65_530, 65_546), (0, 0)]):
        require(isinstance(view, memoryview), f"a {type(view).__name__} for a range, needs a memoryview")
        require(view.readonly, "a writable view")
        require(view.itemsize == view.ndim == 1 and view.contiguous, f"a view of {view.format}, needs plain bytes")
    assert_reads(reader, [(0, 1)])
    assert_reads(reader, [(199_000, 200_003), (5, 5_000), (0, 1), (150_000, 150_001)])
    assert_reads(reader, [(10, 20), (10, 20), (5, 25), (15, 30), (12, 13)])
    size = reader.size
    assert_reads(reader, [(0, 0), (size, size), (7, 7), (0, size), (size - 1, size), (70_000, 70_000)])
    assert_random_reads(reader, seed=1)


def check_ranges_outside_are_refused(reader: RangeReader) -> None:
    """Check that a range outside the object raises ShortReadError, and that the reader works afterwards."""
    for outside in OUTSIDE:
        require_short_read(reader, outside, lambda outside=outside: reader.read([(0, 1), outside]))  # type: ignore[misc]
        assert_reads(reader, [(0, 1)])


def check_views_outlive_later_reads(reader: RangeReader) -> None:
    reads = list(random_reads(seed=2, count=20))
    views = [reader.read(ranges) for ranges in reads]
    gc.collect()
    for ranges, kept in zip(reads, views, strict=True):
        assert_equal(kept, ranges)


def check_threads_may_share_it(reader: RangeReader) -> None:
    with READS.executor(8) as threads:
        list(threads.map(lambda seed: assert_random_reads(reader, seed), range(8)))


def check_it_pickles(reader: RangeReader) -> None:
    twin = pickle.loads(pickle.dumps(reader))
    require((twin.uri, twin.size) == (reader.uri, reader.size), f"{reader.uri}: a pickle became {twin.uri}")
    assert_random_reads(twin, seed=3)
    assert_reads(reader, [(0, 10)])


def check_a_fork_may_go_on_reading(reader: RangeReader) -> None:
    """Check that forked children and their parent, which has read before, can read at the same time."""
    if not hasattr(os, "fork"):
        return
    assert_random_reads(reader, seed=4)
    children = [forked(partial(assert_random_reads, reader, seed)) for seed in (5, 6)]
    assert_random_reads(reader, seed=7)
    for child in children:
        require(ended_well(child), "a forked child read other bytes, or none")


def check_empty_object(reader: RangeReader) -> None:
    require(reader.size == 0, f"size {reader.size} of an empty object")
    require([bytes(view) for view in reader.read([(0, 0), (0, 0)])] == [b"", b""], "bytes of an empty object")
    require_short_read(reader, (0, 1), lambda: reader.read([(0, 1)]))


def check_mapped_reader(reader: RangeReader) -> None:
    """Check the contract of `MappedReader`, if the reader is one, over an object with the content CONTENT."""
    mapped = as_capability(reader, MappedReader)
    if mapped is None:
        return
    assert_reads(reader, [(0, reader.size)])
    require(mapped.read_into(lambda mapping: 0), "read_into read nothing, gather refused nothing")
    if not mapped.is_complete():
        require(not mapped.read_into(lambda mapping: -1), "read_into read ranges that gather refused")


def check_composite_reader(reader: RangeReader) -> None:
    """Check the contract of `CompositeReader`, if the reader is one, over an object with the content CONTENT."""
    composite = as_composite(reader)
    if composite is None:
        return
    for ranges in random_reads(seed=9, count=5):
        pieces, reads = composite.split(ranges)
        results = [part.read(part_ranges) for part, part_ranges in reads]
        joined = [b"".join(results[read][place] for read, place in range_pieces) for range_pieces in pieces]
        assert_equal([memoryview(data) for data in joined], ranges)
    for outside in OUTSIDE:
        require_short_read(reader, outside, lambda outside=outside: composite.split([outside]))  # type: ignore[misc]
    for part in composite.component_readers():
        require(isinstance(part, RangeReader), f"{type(part).__name__} among component_readers is no RangeReader")


def check_concurrent_reader(reader: RangeReader) -> None:
    """Check the contract of `ConcurrentReader`, if the reader is one, over an object with the content CONTENT."""
    concurrent = as_capability(reader, ConcurrentReader)
    if concurrent is None:
        return
    one, two = random_reads(seed=10, count=2)
    first, second = concurrent.begin(one), concurrent.begin(two)
    if first is None or second is None:
        return
    with first as pending, second as later:
        assert_equal(later.result(), two)
        assert_equal(pending.result(), one)
        require(pending.outcome.done() and later.outcome.done(), "outcome is pending after result has returned")
    for outside in OUTSIDE:
        begun = concurrent.begin([(0, 1), outside])
        if begun is not None:
            require_short_read(reader, outside, begun.__enter__)


def check_block_reader(reader: RangeReader) -> None:
    """Check the contract of `BlockReader`, if the reader is one, over an object that is not empty."""
    blocks = as_block_reader(reader)
    if blocks is not None:
        require(blocks.block_bytes >= 1, f"block_bytes {blocks.block_bytes}, needs 1 or more")
        require(blocks.stored_bytes >= 1, f"stored_bytes {blocks.stored_bytes}, needs 1 or more")
        require(bool(blocks.codec), 'an empty codec, needs "raw" or the name of a codec')
        require(blocks.digest() == blocks.digest() != "", "two digests of one object, needs one")


def require_short_read(reader: RangeReader, outside: Range, read: Callable[[], Any]) -> None:
    try:
        result = read()
    except ShortReadError as error:
        require(reader.uri in str(error), f"the error does not name {reader.uri}: {error}")
    else:
        raise AssertionError(f"{outside} of {reader.size} bytes gave {result!r}, needs ShortReadError")


def assert_reads(reader: RangeReader, ranges: Sequence[Range]) -> None:
    assert_equal(reader.read(ranges), ranges)


def assert_random_reads(reader: RangeReader, seed: int) -> None:
    for ranges in random_reads(seed, count=10):
        assert_reads(reader, ranges)


def assert_equal(views: Sequence[memoryview], ranges: Sequence[Range]) -> None:
    require(len(views) == len(ranges), f"{len(views)} results for {len(ranges)} ranges")
    for view, (start, stop) in zip(views, ranges, strict=True):
        found = f"{len(view)} bytes" if isinstance(view, memoryview) else f"a {type(view).__name__}"
        require(view == CONTENT[start:stop], f"range {start}-{stop}: {found} that are not those of the object")


def random_reads(seed: int, count: int) -> Iterator[list[Range]]:
    """Yield lists of ranges, most of them short, some long, in random order."""
    choose = random.Random(seed)
    for _ in range(count):
        starts = [choose.randrange(len(CONTENT)) for _ in range(choose.randrange(1, 12))]
        yield [(start, min(start + int(choose.paretovariate(0.3)), len(CONTENT))) for start in starts]


def forked(work: Callable[[], None]) -> int:
    """Return the pid of a forked child that runs `work`; its exit status is 0, or 1 if `work` raised."""
    with warnings.catch_warnings():
        # Python 3.12 warns whenever a process with threads forks; these tests check that readers survive it.
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
    """Wait for a child; return whether its exit status was 0. Kill it after CHILD_TIMEOUT_SECONDS."""
    deadline = time.monotonic() + CHILD_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


MakeObject = Callable[[str, bytes], tuple[Store, str]]
"""Function that puts an object of this name and content into a store; returns the store and the URI of the object.
An existing object is replaced."""


def check_object_store(make: MakeObject) -> None:
    """Check that a store keeps the promises of each protocol of `storage.store_protocols` that it implements.

    Args:
        make: see `MakeObject`; it puts all objects into one folder, which must be empty at first.

    Raises:
        AssertionError: a promise is broken.

    Example:
        >>> check_object_store(lambda name, data: (MyStore(), put(name, data)))  # doctest: +SKIP
    """
    store, uri = make("data", CONTENT)
    require(isinstance(store, ReadableStore | BlockingStore), f"{type(store).__name__} is no store that can be read")
    require(store.max_in_flight > 0 and store.max_gap >= 0, "no requests in flight, or a gap below 0")
    require(isinstance(store.prices(), Prices), "no prices")
    info = head_once(store, uri)
    require((info.uri, info.size, info.identity["size"]) == (uri, len(CONTENT), len(CONTENT)), f"{uri}: is {info}")
    require(head_once(store, uri) == info, f"{uri}: another identity at the second look")
    for one in (store, pickle.loads(pickle.dumps(store))):
        for where in [(0, 1), (3, 65_546), (0, len(CONTENT)), (len(CONTENT) - 5, len(CONTENT))]:
            require(fetch_once(one, info, where) == CONTENT[slice(*where)], f"{uri}: wrong bytes for {where}")
    require(store.get(uri, len(CONTENT)) == CONTENT, f"{uri}: `get` returns other bytes")
    require(store.get(uri, 10)[:11] == CONTENT[:11], f"{uri}: `get` does not return the first bytes")
    check_absence(store, f"{uri}-none")
    _, empty = make("empty", b"")
    require(head_once(store, empty).size == 0 and store.get(empty, 10) == b"", f"{empty}: is not empty")
    check_replacement(make)
    for protocol, check in STORE_CHECKS.items():
        if isinstance(store, protocol):
            check(store, uri)


def head_once(store: Any, uri: str) -> ObjectInfo:
    """Return the store's report of an object; check the object's last bytes, too, if the store sends them along."""
    if isinstance(store, BlockingStore):
        return store.head_now(uri)
    info, none = wait_for(store.head(uri))
    again, tail = wait_for(store.head(uri, tail_bytes=7))
    right = tail == CONTENT[-7:] or info.size != len(CONTENT)
    require(none == b"" and (tail == b"" or right), f"{uri}: wrong last bytes")
    require(again == info, f"{uri}: another identity with the last bytes")
    return cast(ObjectInfo, info)


def fetch_once(store: Any, info: ObjectInfo, where: Range) -> bytes:
    blocks = isinstance(store, BlockingStore)
    return bytes(store.fetch_now(info, [where])[0] if blocks else wait_for(store.fetch(info, where)))


def wait_for(coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, io_loop()).result()


def check_absence(store: Any, uri: str) -> None:
    for request in (lambda: head_once(store, uri), lambda: store.get(uri, 10)):
        require(reports_absence(uri, request), f"{uri}: there is none, but the store reports one")


def reports_absence(uri: str, request: Callable[[], object]) -> bool:
    """Return whether a request for an absent object raises; its error must mean that there is none."""
    try:
        request()
    except Exception as error:
        ours = error if isinstance(error, BinidxError) else translated(uri, error)
        require(isinstance(ours, ObjectNotFoundError), f"{uri}: there is none, but the error is {error!r}")
        return True
    return False


def check_replacement(make: MakeObject) -> None:
    """Check that a store that pins reads to a version never returns bytes of the object that replaced it."""
    store, uri = make("replaced", b"old" * 100)
    info = head_once(store, uri)
    time.sleep(0.02)  # the time of a file's last change is as fine as the kernel's tick
    make("replaced", b"new" * 100)
    require(head_once(store, uri).identity != info.identity or not store.pins(info), f"{uri}: replaced, same identity")
    try:
        data = fetch_once(store, info, (0, 3))
    except Exception:
        return
    require(data == b"old" or not store.pins(info), f"{uri}: pinned, but bytes of another version")


def check_writing(store: WritableStore, uri: str) -> None:
    new, pieces = f"{uri}-put", [memoryview(CONTENT[:100_000]), memoryview(CONTENT[100_000:])]
    store.put(new, pieces)
    require(store.get(new, len(CONTENT)) == CONTENT, f"{new}: `put` wrote other bytes")
    store.put(new, [memoryview(b"replaced")])
    try:
        store.put(new, [memoryview(b"again")], if_absent=True)
    except FileExistsError:
        pass
    else:
        raise AssertionError(f"{new}: replaced although `if_absent`")
    require(store.get(new, 100) == b"replaced", f"{new}: replaced although `if_absent`")
    store.delete(new)
    check_absence(store, new)
    reports_absence(new, lambda: store.delete(new))  # or returns
    store.put(new, [memoryview(b"first")], if_absent=True)
    require(store.get(new, 100) == b"first", f"{new}: `put` with `if_absent` wrote other bytes")
    store.delete(new)


def check_multipart(store: MultipartStore, uri: str) -> None:
    new, part = f"{uri}-parts", random.Random(3).randbytes(store.min_part)
    upload = store.upload(new)
    last = bytearray(b"last")
    tags = {2: upload.write(2, [memoryview(last)])}
    last[:] = b"else"  # the caller uses its buffer again
    check_absence(store, new)
    upload = store.upload(new, upload.token)
    require(dict(upload.arrived()) == {2: (4, tags[2])}, f"{new}: {dict(upload.arrived())} arrived, needed part 2")
    tags[1] = upload.write(1, [memoryview(part)])
    upload.complete(tags)
    info = head_once(store, new)
    require(fetch_once(store, info, (0, info.size)) == part + b"last", f"{new}: its parts are not in order")
    copy = store.upload(f"{new}-copy")
    copy.complete({1: copy.copy(1, info, (0, len(part))), 2: copy.copy(2, info, (0, 3))})
    copied = store.get(f"{new}-copy", len(part) + 9)
    require(copied == part + (part + b"last")[:3], f"{new}: copied parts have other bytes")
    dropped = store.upload(f"{new}-dropped")
    dropped.write(1, [memoryview(b"x")])
    dropped.abort()
    check_absence(store, f"{new}-dropped")


def check_streaming(store: StreamingStore, uri: str) -> None:
    """Check that streams arrive whole and appear at their end, and that `move` replaces its target."""
    new, unfinished, target = f"{uri}-stream", f"{uri}-discarded", f"{uri}-moved"
    write_stream(store, new, CONTENT)
    require(store.get(new, len(CONTENT)) == CONTENT, f"{new}: a stream with other bytes")
    if store.hides_uploads:
        stream = store.open_stream(unfinished)
        stream.write(CONTENT)
        stream.close()
        check_absence(store, unfinished)
        stream.discard()
        check_absence(store, unfinished)
    store.put(target, [memoryview(b"replaced")])
    store.move(new, target)
    require(store.get(target, len(CONTENT)) == CONTENT, f"{target}: `move` made other bytes of it")
    check_absence(store, new)
    store.delete(target)


def write_stream(store: StreamingStore, uri: str, data: bytes) -> None:
    """Write an object as a stream, whose buffer is used again after each `write`."""
    stream, buffer = store.open_stream(uri), bytearray()
    for start in range(0, len(data), 50_000):
        buffer[:] = data[start : start + 50_000]
        stream.write(memoryview(buffer).toreadonly())
    stream.close()
    if store.hides_uploads:
        stream.commit()


def check_search(store: SearchableStore, uri: str) -> None:
    """Check that a folder and a pattern find an object, and that a pattern without a match finds none."""
    folder = uri.rpartition("/")[0]
    for name, pattern in [(folder, False), (f"{uri[:-1]}*", True)]:
        uris = store.find(name, pattern=pattern)
        require(uris.count(uri) == 1, f"{name}: `find` returns {uris!r:.200}, needs {uri} once")
    require(uri not in store.find(f"{folder}/none*", pattern=True), f"{folder}/none*: `find` returns {uri}")


def check_composing(store: ComposingStore, uri: str) -> None:
    store.put(f"{uri}-tail", [memoryview(b"tail")])
    sources = [head_once(store, name) for name in (f"{uri}-tail", uri)]
    store.compose(f"{uri}-composed", sources)
    require(store.get(f"{uri}-composed", 1 << 20) == b"tail" + CONTENT, f"{uri}: composed of other bytes")


def check_listing(store: ListableStore, uri: str) -> None:
    bucket, key = store.split(uri)
    request = ListRequest(bucket, key, "/", key[:-1])
    objects, token = wait_for(store.list_page(request))
    require(token == "" or len(objects) > 1, f"{uri}: an empty page that is not the last one")
    require(key in objects and objects[key].size == len(CONTENT), f"{uri}: not in the list")
    is_same = same_identity(objects[key].identity, head_once(store, uri).identity)
    require(is_same, f"{uri}: listed with another identity")
    absent = wait_for(store.list_page(ListRequest(bucket, f"{key}-none", "", "")))
    require(absent == ({}, ""), f"{uri}-none: there is none, but the list is {absent!r:.200}")


STORE_CHECKS: dict[Any, Callable[[Any, str], None]] = {
    WritableStore: check_writing,
    MultipartStore: check_multipart,
    StreamingStore: check_streaming,
    SearchableStore: check_search,
    ComposingStore: check_composing,
    ListableStore: check_listing,
}
