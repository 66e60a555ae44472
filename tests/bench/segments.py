"""`.bin.zst` and checksums: size, and time of reading and writing.

    size              of the tokens of real text (`tests/bench/text.py`), level 3, as a part of the plain `.bin`
    speed             of writing, reading and checking against the bare library over the same 64 KiB, one core
    a sample, near    4,096 tokens in one piece from local files in the page cache: 1 to 2 segments are decoded for it
    a sample, far     30 ms to the first byte, documents shuffled, nothing kept: 5 ranges at once. Plain it is one round
                      trip; so it is compressed, and 40 KiB more a range are 0.4 ms at 100 MB/s, decoding 0.3 ms
    warming           a disk cache over a link of 200 Mbit/s: the limit is the link, so the ratio of the sizes

The goals: sizes 1 / 1.4 (uint16) and 1 / 2.5 (int32), a far sample at most 1.1 times as long, warming 1.35 and 2.4
times as fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from servers.far_object import far_object
from servers.latency_proxy import latency_proxy

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.maintenance import Warming
from binidx.storage.codecs.checksums import SUMMED_BYTES, CheckedObject
from binidx.storage.codecs.segments import SEGMENT_BYTES, SegmentedObject, SegmentWriter
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import open_object
from binidx.storage.ranges import cut
from binidx.storage.stores.local import LocalFile
from binidx.testing import MemoryObject
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours
from tests.bench.remote import remote_seconds
from tests.bench.table import Conditions, Row, interleaved_medians
from tests.bench.text import tokenize, write_text

CONDITIONS = Conditions(cores=1, size="128 MiB of tokens of real text", cached="the files in the page cache")
PLAIN_BYTES = 128 << 20
NUM_SAMPLES = 1000
FAR_SAMPLES = 60
DELAY_MS = 30
LINK_MEGABYTES = 25.0
ROUNDS = 5
PLAIN = "the plain .bin"


@dataclass(frozen=True)
class Data:
    """The same tokens stored both ways; prefixes of datasets on a disk."""

    name: str
    plain: str
    packed: str

    @property
    def files(self) -> tuple[Path, Path]:
        return Path(f"{self.packed}.bin.zst"), Path(f"{self.plain}.bin")


def rows(directory: Path) -> list[Row]:
    """Both dtypes."""
    text, encoded = tokenize(directory)
    return [row for dtype in (np.uint16, np.int32) for row in rows_of(directory, dtype, text, encoded)]


def rows_of(directory: Path, dtype: type, text: str, encoded: list[NDArray[Any]]) -> list[Row]:
    name, item_bytes = np.dtype(dtype).name, np.dtype(dtype).itemsize
    plain = write_text(directory / f"{name}.bin", encoded, PLAIN_BYTES // item_bytes, dtype)
    packed = f"{directory}/{name}-packed"
    convert_dataset(plain, packed, way=StorageFormat("zstd"), verify="size")
    data = Data(name, plain, packed)
    return [*sizes(data, text, directory), *speeds(data), near(data, item_bytes), far(data), warming(data, directory)]


def sizes(data: Data, text: str, directory: Path) -> list[Row]:
    """At level 3; what level 9 gains stands in the note."""
    convert_dataset(data.plain, directory / "archive", way=StorageFormat("zstd", 9), verify="size", overwrite=True)
    packed, plain = (path.stat().st_size for path in data.files)
    archive = (directory / "archive.bin.zst").stat().st_size
    note = f"{text}; level 9: {archive / plain:.3f}"
    return [Row(f"size of tokens of text, {data.name}, level 3", packed / plain, 1.0, "of it", False, note, PLAIN)]


# Speeds


class Nowhere:
    """A Writer that forgets."""

    def write(self, data: Any, /) -> int:
        return len(data)


def speeds(data: Data) -> list[Row]:
    """MB/s of plain bytes; ours over the cores there are, the library's on one."""
    packed, plain = (LocalFile(path) for path in data.files)
    view = plain.read([(0, plain.size)])[0]
    segments = [view[start:stop] for start, stop in cut((0, plain.size), SEGMENT_BYTES)]
    reader = SegmentedObject(packed)
    frames = packed.read([reader.table.stored(each) for each in range(len(reader.table))])
    checked = CheckedObject(MemoryObject(bytes(view)), LocalFile(sums_of(data)))
    blocks = [view[start:stop] for start, stop in cut((0, plain.size), SUMMED_BYTES)]
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    decompressor = zstandard.ZstdDecompressor()
    write, bare_write, read, bare_read, check, bare_check = interleaved_medians(
        lambda: compress(view),
        lambda: [compressor.compress(each) for each in segments],
        lambda: reader.read([(0, reader.size)]),
        lambda: [decompressor.decompress(each) for each in frames],
        lambda: checked.read([(0, checked.size)]),
        lambda: [xxhash.xxh3_64_intdigest(each) for each in blocks],
        rounds=ROUNDS,
    )
    speed = plain.size / 1e6
    return [
        Row(f"compressing {data.name}, level 3", speed / write, speed / bare_write, "MB/s", True, "", "zstd, one core"),
        Row(f"decompressing {data.name}", speed / read, speed / bare_read, "MB/s", True,
            "in one buffer at the end, its frames are not", "zstd, one core"),
        Row(f"reading {data.name} checked", speed / check, speed / bare_check, "MB/s", True, "", "XXH3 alone"),
    ]  # fmt: skip


def compress(view: memoryview) -> None:
    with SegmentWriter(Nowhere()) as writer:
        writer.write(view)


def sums_of(data: Data) -> str:
    convert_dataset(data.plain, data.plain, way=StorageFormat(checksums=True), verify="size")
    return f"{data.plain}.bin.xxh3"


# One sample


def near(data: Data, item_bytes: int) -> Row:
    """Random places, all of them in the page cache."""
    packed, plain = (open_object(path, cache=False) for path in data.files)
    size = (SEQUENCE_LENGTH + 1) * item_bytes
    starts = np.random.default_rng(0).integers(0, plain.size - size, NUM_SAMPLES).tolist()
    ranges = [(start, start + size) for start in starts]
    times = interleaved_medians(lambda: one_by_one(packed, ranges), lambda: one_by_one(plain, ranges), rounds=ROUNDS)
    ours, theirs = (1e6 * each / NUM_SAMPLES for each in times)
    work = f"a random sample of {data.name} in one piece, local, warm, nothing kept"
    return Row(work, ours, theirs, "µs", False, "the price: a segment is decoded for it, or two", PLAIN)


def one_by_one(reader: RangeReader, ranges: Sequence[Range]) -> None:
    for each in ranges:
        reader.read([each])


def far(data: Data) -> Row:
    """One sample after the other; medians of the samples, both ways in turns."""
    local = open_ours(data.plain, f"{data.plain}-indices")
    idxs = np.random.default_rng(0).integers(0, len(local), FAR_SAMPLES).tolist()
    samples = [local.dataset.locate(local.spans(idx)) for idx in idxs]
    with open_far(data.files, lambda path: far_object(path, delay_ms=DELAY_MS)) as (packed, plain):
        times = [[far_seconds(reader, ranges) for reader in (packed, plain)] for ranges in samples]
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*times[1:], strict=True))
    work = f"a random cold sample of {data.name}, documents shuffled, {DELAY_MS} ms away"
    note = f"{statistics.mean(map(len, samples)):.1f} ranges; the goal is 0.91"
    return Row(work, ours, theirs, "ms", False, note, PLAIN)


def far_seconds(reader: RangeReader, ranges: Sequence[Range]) -> float:
    return remote_seconds("a cold sample", DELAY_MS, lambda: reader.read(ranges))


@contextmanager
def open_far(paths: Sequence[Path], serve: Callable[[Path], Any], **settings: Any) -> Iterator[tuple[RangeReader, ...]]:
    """Each file as an object of S3, read with these settings of ours."""
    if not paths:
        yield ()
        return
    with serve(paths[0]) as endpoint, open_far(paths[1:], serve, **settings) as others:
        options = {"endpoint_url": endpoint, "key": "any", "secret": "any", "binidx": settings}
        keep = "disk" if "cache_dir" in settings else False
        yield open_object(f"s3://far/{paths[0].name}", storage_options=options, cache=keep), *others


def warming(data: Data, directory: Path) -> Row:
    """All of it, into an empty cache."""
    number = count()

    @contextmanager
    def thin(path: Path) -> Iterator[str]:
        with (
            far_object(path, delay_ms=0) as near,
            latency_proxy(near, delay_ms=DELAY_MS, total_megabytes_per_second=LINK_MEGABYTES) as proxy,
        ):
            yield proxy.endpoint

    def fill(path: Path) -> None:
        with open_far([path], thin, cache_dir=f"{directory}/{data.name}-cache{next(number)}") as (reader,):
            assert isinstance(reader, DiskCache)
            times.append(remote_seconds("warming", DELAY_MS, lambda: Warming([(reader, [(0, reader.size)])]).run()))

    times: list[float] = []
    for path in data.files * 3:
        fill(path)
    ours, theirs = (PLAIN_BYTES / 1e6 / statistics.median(times[place::2]) for place in (0, 1))
    work = f"warming a disk cache with {data.name} over 200 Mbit/s, plain bytes"
    goal = {"uint16": 1.35, "int32": 2.4}[data.name]
    return Row(work, ours, theirs, "MB/s", True, f"the link carries {LINK_MEGABYTES:.0f}; the goal is {goal}", PLAIN)
