"""zstd segments: the plain bytes by ranges, each segment once, checked; whole files for zstd itself."""

from __future__ import annotations

import io
import random
import shutil
import struct
import subprocess
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from helpers.faulty_object import FaultyObject
from helpers.zstd_segments import compressed, foreign
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import ConfigError, FormatError
from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.codecs.segments import BATCH_BYTES, SegmentedObject, SegmentWriter, joined_table, stored_pieces
from binidx.storage.interfaces import Range
from binidx.storage.open import codec_named, codec_of, suffix_of
from binidx.storage.threads import thread_count
from binidx.testing import CONTENT, MemoryObject, check_range_reader

TEXT = np.random.default_rng(0).zipf(1.3, 50_000).astype("<u2").tobytes()
ZSTD = shutil.which("zstd")

ranges = st.tuples(st.integers(0, 2000), st.integers(0, 700)).map(lambda each: (each[0], min(sum(each), 2000)))


def opened(stored: bytes) -> tuple[SegmentedObject, MemoryObject]:
    below = MemoryObject(stored, "en.bin.zst")
    return SegmentedObject(below), below


@pytest.mark.parametrize("segment_bytes", [1000, 64 << 10, 1 << 20])
def test_it_keeps_the_contract(segment_bytes: int) -> None:
    check_range_reader(lambda data: SegmentedObject(MemoryObject(compressed(data, segment_bytes))))


def test_a_foreign_file_and_stacks_keep_the_contract() -> None:
    def pieces(data: bytes) -> list[bytes]:
        bounds = [0, 1, 1, 40_000, 40_001, 40_001, 199_999, len(data)]
        return [data[start:stop] for start, stop in pairwise(bounds)]

    check_range_reader(lambda data: SegmentedObject(MemoryObject(foreign(pieces(data), sums=True))))
    check_range_reader(lambda data: SegmentedObject(FaultyObject(MemoryObject(compressed(data)), [])))
    check_range_reader(
        lambda data: ChunkCache(SegmentedObject(MemoryObject(compressed(data))), store=ChunkStore(50_000))
    )
    check_range_reader(lambda data: SegmentedObject(ChunkCache(MemoryObject(compressed(data)), chunk_bytes=1000)))
    check_range_reader(lambda data: SegmentedObject(SegmentedObject(MemoryObject(compressed(compressed(data))))))


@given(
    st.lists(st.binary(max_size=300), max_size=12), st.lists(ranges, max_size=6), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_any_ranges_of_any_frames_are_slices(pieces, asked, sizes, frame_sums, sums) -> None:
    data = b"".join(pieces)
    reader = SegmentedObject(MemoryObject(foreign(pieces, sizes=sizes, frame_sums=frame_sums, sums=sums)))
    asked = [(min(start, len(data)), min(stop, len(data))) for start, stop in asked]
    assert (reader.size, reader.table.marked) == (len(data), False)
    assert [bytes(view) for view in reader.read(asked)] == [data[start:stop] for start, stop in asked]


@given(st.binary(max_size=3000), st.integers(1, 700), st.lists(st.integers(0, 3000), max_size=5), st.integers(1, 9))
def test_bytes_depend_on_no_thread_and_no_write(data: bytes, segment_bytes: int, cuts: list[int], level: int) -> None:
    out = io.BytesIO()
    with SegmentWriter(out, level, segment_bytes=segment_bytes, threads=3) as writer:
        writer._batch_bytes = segment_bytes  # so that the threads have something to do
        bounds = sorted(min(each, len(data)) for each in [0, *cuts, len(data)])
        for start, stop in pairwise(bounds):
            assert writer.write(data[start:stop]) == stop - start
    assert out.getvalue() == compressed(data, segment_bytes, level)
    reader = SegmentedObject(MemoryObject(out.getvalue()))
    assert bytes(reader.read([(0, len(data))])[0]) == data
    assert reader.table.marked


@pytest.mark.skipif(ZSTD is None, reason="needs the zstd command")
@pytest.mark.parametrize("num_bytes", [0, 1, 64 << 10, (64 << 10) + 1, len(TEXT)])
def test_zstd_itself_restores_and_tests_the_file(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "en.bin.zst"
    path.write_bytes(compressed(TEXT[:num_bytes], 64 << 10))
    subprocess.run([str(ZSTD), "-q", "--test", path], check=True)
    subprocess.run([str(ZSTD), "-q", "-d", path], check=True)
    assert (tmp_path / "en.bin").read_bytes() == TEXT[:num_bytes]


def test_a_file_of_zstd_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(
        FormatError, match=r"en.bin.zst: ends with 0x\w+, a zstd seek table ends with 0x8f92eab1; .*--co"
    ):
        opened(zstandard.compress(TEXT))


def test_opening_is_one_read_of_the_tail_and_one_more_for_a_large_table() -> None:
    small = compressed(TEXT, 1000)
    _, below = opened(small)
    assert below.asked == [[(max(len(small) - 65536, 0), len(small))]]
    many = compressed(bytes(9000), 1)
    reader, below = opened(many)
    table = 9001 * 8 + 17 + 32
    assert below.asked == [[(len(many) - 65536, len(many))], [(len(many) - table, len(many) - 65536)]]
    assert bytes(reader.read([(0, 9000)])[0]) == bytes(9000)


def test_an_end_that_came_along_is_not_read_again() -> None:
    for data, segment_bytes, reads in ((TEXT, 1000, 0), (TEXT[:9], 1000, 0), (bytes(9000), 1, 1)):
        stored = compressed(data, segment_bytes)
        below = MemoryObject(stored)
        reader = SegmentedObject(below, stored[-65536:])
        assert len(below.asked) == reads
        assert bytes(reader.read([(0, len(data))])[0]) == data
    below = MemoryObject(stored)
    SegmentedObject(below, stored[-100:])  # too short to be trusted: as if there were none
    assert len(below.asked) == 2


def test_a_read_fetches_each_segment_once_and_all_at_once() -> None:
    reader, below = opened(compressed(CONTENT, 1000))
    below.asked.clear()
    reader.read([(5500, 7100), (6900, 6950), (100, 200), (100_000, 100_001)])
    table = reader.table
    assert below.asked == [[table.stored(each) for each in (0, 5, 6, 7, 100)]]
    moved = sum(stop - start for start, stop in below.asked[0])
    assert (reader.stats.requests, reader.stats.bytes_asked, reader.stats.bytes_moved) == (5, 1751, moved)


def test_many_segments_are_decoded_by_several_threads() -> None:
    reader, _ = opened(compressed(CONTENT, 1000))
    seen, decoded = set(), reader._decoded
    reader._decoded = lambda each: seen.add(threading.get_ident()) or decoded(each)  # type: ignore[method-assign]
    reader.read([(0, 1)])
    assert seen == {threading.get_ident()}
    assert bytes(reader.read([(0, reader.size)])[0]) == CONTENT
    assert min(2, thread_count()) <= len(seen) <= thread_count()


def test_every_flipped_bit_is_an_error_or_harmless() -> None:
    """In frames, table and mark alike: what is read is what was written, or nothing is."""
    data, caught = TEXT[:700], 0
    stored = compressed(data, 150)
    for bit in range(8 * len(stored)):
        broken = bytearray(stored)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            reader, _ = opened(bytes(broken))
            found = bytes(reader.read([(0, reader.size)])[0])
        except FormatError:
            caught += 1
        else:
            assert found == data
    assert caught > 0.9 * 8 * len(stored)


def test_a_damaged_segment_is_named_and_its_neighbours_are_read() -> None:
    stored = bytearray(compressed(CONTENT, 1000))
    reader, below = opened(bytes(stored))
    first, last = reader.table.stored(7)
    stored[last - 20] ^= 1
    below.data = bytes(stored)
    with pytest.raises(
        FormatError, match=rf"en.bin.zst: segment 7 is damaged \(.*\), read twice: bytes {first}-{last} .* 7000-8000"
    ):
        reader.read([(6000, 9000)])
    assert bytes(reader.read([(6000, 7000)])[0]) == CONTENT[6000:7000]


def test_what_was_damaged_on_its_way_is_read_again() -> None:
    reader, below = opened(compressed(CONTENT, 1000))
    whole, below.data = below.data, bytes(len(below.data))
    real, below.asked = below.read, []

    def read(asked: list[Range]) -> list[memoryview]:
        found = real(asked)
        below.data = whole
        return found

    below.read = read  # type: ignore[method-assign]
    assert bytes(reader.read([(1500, 3500)])[0]) == CONTENT[1500:3500]
    assert len(below.asked) == 2


@pytest.mark.parametrize("sums", [False, True])
def test_checksums_of_the_table_are_verified(sums: bool) -> None:
    stored = bytearray(foreign([b"a" * 10, b"bcd" * 7], sums=sums))
    place = stored.index(b"bcd")
    stored[place] ^= 1
    reader, _ = opened(bytes(stored))
    if sums:
        with pytest.raises(FormatError, match=r"segment 1 is damaged .its checksum in the seek table is another"):
            reader.read([(12, 20)])
    assert bytes(reader.read([(0, 10)])[0]) == b"a" * 10


GOOD = foreign([b"a" * 100, b"b" * 100])
FRAME = len(zstandard.compress(b"a" * 100)) - 1


def table(entries: list[tuple[int, ...]], *, count: int | None = None, kind: int = 0) -> bytes:
    body = b"".join(struct.pack("<" + "I" * len(each), *each) for each in entries)
    count = len(entries) if count is None else count
    return struct.pack("<II", 0x184D2A5E, len(body) + 9) + body + struct.pack("<IBI", count, kind, 0x8F92EAB1)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"", "0 bytes, a zstd seek table needs 17"),
        (b"x" * 16, "16 bytes, a zstd seek table needs 17"),
        (GOOD[:-1], "ends with 0x92eab100, a zstd seek table ends with 0x8f92eab1"),
        (table([], count=2**32 - 1), "17 bytes, its seek table of 4294967295 frames needs 34359738377"),
        (table([], kind=4), "seek table of kind 0x4, needed 0 or 0x80"),
        (table([(0, 0)], count=0), "its seek table starts with 0x0 and 0, needed 0x184d2a5e and 9"),
        (table([(0, 0)])[1:], "24 bytes, its seek table of 1 frames needs 25"),
        (b"1234" + table([(4, 7), (2, 7)]), "its seek table is for 6 bytes before it, there are 4"),
        (table([(2**32 - 1, 1)] * 3), "its seek table is for 12884901885 bytes before it, there are 0"),
        (b"1234" + table([(4, 2**17 + 1)]), "frame 0 of 4 bytes is to hold 131073, needed at most 131072"),
        (
            bytes(40_000) + table([(40_000, 2**30 + 1)]),
            "frame 0 of 40000 bytes is to hold 1073741825, needed at most 10",
        ),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused(stored: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"en.bin.zst: {message}"):
        opened(stored)


WHOLE = compressed(TEXT[:900], 150)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 40), st.binary(max_size=12)), max_size=4))
def test_whatever_a_file_holds_it_is_read_or_refused(splices: list[tuple[int, int, bytes]]) -> None:
    """Pieces cut out, put in or overwritten anywhere; mostly near the end, where the counts stand."""
    broken = WHOLE
    for place, count, piece in splices:
        at = max(len(broken) - place, 0) if place % 2 else place
        broken = broken[:at] + piece + broken[at + count :]
    try:
        reader, _ = opened(broken)
        found = bytes(reader.read([(0, reader.size)])[0])
    except FormatError:
        return
    assert found == TEXT[:900]


def claiming(num_bytes: int) -> bytes:
    """A frame that says it holds so much: single segment, 8 bytes of content size."""
    return bytes.fromhex("28b52ffd e0") + struct.pack("<Q", num_bytes) + bytes.fromhex("010000")


@pytest.mark.parametrize(
    ("frame", "plain", "message"),
    [
        (b"not a frame", 5, "segment 0 is damaged"),
        (claiming(2**60), 5, "its header says 1152921504606846976 plain bytes"),
        (zstandard.compress(b"abcde")[:-1], 5, "segment 0 is damaged"),
        (zstandard.compress(b"abcde") + b"x", 5, "segment 0 is damaged"),
        (zstandard.compress(b"abcde") * 2, 10, "its header says 5 plain bytes"),
        (foreign([b"abcde"])[: -(8 + 8 + 9)], 6, "5 plain bytes came out"),
        (foreign([b"abcde"])[: -(8 + 8 + 9)], 4, "segment 0 is damaged"),
    ],
)
def test_a_frame_that_breaks_a_rule_is_refused_and_allocates_nothing(frame: bytes, plain: int, message: str) -> None:
    reader, _ = opened(frame + table([(len(frame), plain)]))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message):
            reader.read([(0, plain)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_compressing_takes_a_bounded_memory() -> None:
    class Nowhere:
        def write(self, data: bytes, /) -> int:
            return len(data)

    data = random.Random(0).randbytes(4 * BATCH_BYTES)
    tracemalloc.start()
    try:
        with SegmentWriter(Nowhere(), 1, threads=2) as writer:
            for _ in range(12):
                writer.write(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * BATCH_BYTES


def test_levels_that_make_no_sense_are_refused() -> None:
    for level in (0, 23, -1):
        with pytest.raises(ConfigError, match=rf"compression_level \(--compress\): found {level}, needs 1 to 22"):
            codec_named("zstd").check_level(level)


def test_a_failed_block_writes_no_table() -> None:
    out = io.BytesIO()
    writer = SegmentWriter(out)
    writer.write(b"abc")
    with pytest.raises(ZeroDivisionError), writer:
        1 / 0  # noqa: B018
    assert out.getvalue() == b""


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_every_codec_gives_back_what_it_was_given(name: str) -> None:
    codec, out = codec_named(name), io.BytesIO()
    with codec.create(out, None) as writer:
        writer.write(TEXT)
    reader = codec.open(MemoryObject(out.getvalue()), b"")
    assert bytes(reader.read([(0, reader.size)])[0]) == TEXT
    assert codec_of(f"s3://bucket/en.bin{suffix_of(name)}") == name


def test_a_name_tells_the_codec() -> None:
    assert list(map(codec_of, ["en.bin.zst", "en.bin", "en.zst", "en.bin.zst.tmp"])) == ["zstd", "raw", "raw", "raw"]


@pytest.mark.parametrize("sums", [(True, True), (True, False)])
def test_a_join_keeps_the_checksums_of_tables_that_all_have_them(sums: tuple[bool, bool]) -> None:
    plain = [b"a" * 10, b"bcd" * 7]
    readers = [opened(foreign(plain, sums=kept))[0] for kept in sums]
    frames = [reader.reader.read(stored_pieces(reader)) for reader in readers]
    stored = bytearray(b"".join(bytes(view) for views in frames for view in views) + joined_table(readers))
    joined, _ = opened(bytes(stored))
    assert bytes(joined.read([(0, joined.size)])[0]) == 2 * b"".join(plain)
    assert joined.table.marked
    if not all(sums):
        assert joined.table.checksums is None
        return
    stored[stored.rindex(b"bcd")] ^= 1
    with pytest.raises(FormatError, match=r"segment 3 is damaged .its checksum in the seek table is another"):
        opened(bytes(stored))[0].read([(0, joined.size)])
