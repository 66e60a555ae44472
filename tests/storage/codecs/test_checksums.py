"""Checksums beside a plain object: what is read is what was summed, or an error says which side is another."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.zstd_segments import compressed
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import FormatError
from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.codecs.checksums import SUMS_HEADER, BlockSums, CheckedObject, format_sums_header, parse_sums_header
from binidx.storage.codecs.segments import SegmentedObject
from binidx.storage.interfaces import Range
from binidx.storage.location import Location
from binidx.storage.ranges import read_many
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.threads import WAITING_THREADS
from binidx.testing import CONTENT, MemoryObject, check_range_reader

BLOCK = 512


def summed(data: bytes, block_bytes: int = BLOCK) -> bytes:
    """The checksum file of some bytes."""
    found: list[int] = []
    sums = BlockSums(lambda each: found.extend(each.tolist()), block_bytes)
    sums.feed(data)
    sums.finish()
    return format_sums_header(sums.size, block_bytes) + np.array(found, "<u8").tobytes()


def checked(data: bytes, sums: bytes | None = None) -> tuple[CheckedObject, MemoryObject, MemoryObject]:
    below = MemoryObject(data, "en.bin")
    beside = MemoryObject(summed(data) if sums is None else sums, "en.bin.xxh3")
    return CheckedObject(below, beside), below, beside


def test_it_keeps_the_contract_alone_and_in_stacks() -> None:
    def make(data: bytes, block_bytes: int = BLOCK) -> CheckedObject:
        return CheckedObject(MemoryObject(data), MemoryObject(summed(data, block_bytes)))

    check_range_reader(make)
    check_range_reader(lambda data: make(data, 16 << 10))
    check_range_reader(lambda data: ChunkCache(make(data), chunk_bytes=700, store=ChunkStore(50_000)))
    check_range_reader(lambda data: SegmentedObject(make(compressed(data))))
    check_range_reader(lambda data: CheckedObject(make(data), make(summed(data))))


@given(st.binary(max_size=4000), st.lists(st.integers(0, 4000), max_size=6), st.integers(1, 900))
def test_sums_do_not_depend_on_the_pieces(data: bytes, cuts: list[int], block_bytes: int) -> None:
    found: list[int] = []
    sums = BlockSums(lambda each: found.extend(each.tolist()), block_bytes)
    for start, stop in pairwise(sorted(min(each, len(data)) for each in [0, *cuts, len(data)])):
        sums.feed(data[start:stop])
    sums.finish()
    blocks = (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    assert found == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert sums.size == len(data)


def test_a_read_is_widened_to_blocks_and_sums_come_in_chunks() -> None:
    reader, below, beside = checked(CONTENT)
    assert beside.asked == [[(0, beside.size)]]
    reader.read([(1000, 1030), (2047, 2049), (700, 710)])
    assert below.asked == [[(512, 2560)]]
    assert beside.asked == [[(0, beside.size)]]
    assert (reader.stats.requests, reader.stats.bytes_asked, reader.stats.bytes_moved) == (1, 42, 2048)


def test_every_flipped_bit_of_the_data_is_found() -> None:
    data = CONTENT[:1300]
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        reader, _, _ = checked(bytes(broken), summed(data))
        with pytest.raises(FormatError, match=rf"en.bin: block {bit // 8 // 512}, bytes {bit // 8 // 512 * 512}-"):
            reader.read([(bit // 8, bit // 8 + 1)])


def test_one_block_that_differs_is_damage_and_others_are_read() -> None:
    broken = bytearray(CONTENT)
    broken[5000] ^= 1
    reader, _, _ = checked(bytes(broken), summed(CONTENT))
    with pytest.raises(
        FormatError,
        match=r"en.bin: block 9, bytes 4608-5120, is not what en.bin.xxh3 says, read twice; 16 of 16 other blocks "
        r"agree: these bytes, or their sum in it, are damaged; restore the object from its source",
    ):
        reader.read([(4700, 4701)])
    assert bytes(reader.read([(5120, 9000)])[0]) == CONTENT[5120:9000]


def test_sums_of_other_data_of_the_same_size_are_called_that() -> None:
    reader, _, _ = checked(CONTENT[::-1], summed(CONTENT))
    with pytest.raises(
        FormatError, match=r"16 of 16 other blocks differ, too: en.bin.xxh3 is of other data; .*--overwrite; BINIDX_VER"
    ):
        reader.read([(4700, 4701)])


def test_sums_of_another_size_are_refused_at_once() -> None:
    with pytest.raises(FormatError, match=r"en.bin: 200003 bytes, en.bin.xxh3 is for 100; .*write the sums again"):
        checked(CONTENT, summed(CONTENT[:100]))


class OnceWrong(MemoryObject):
    """Its n-th read is wrong in its first byte."""

    def __init__(self, data: bytes, uri: str, wrong: int) -> None:
        super().__init__(data, uri)
        self.wrong = wrong

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        first, *views = super().read(ranges)
        if len(self.asked) == self.wrong:
            first = memoryview(bytes([first[0] ^ 1]) + bytes(first[1:]))
        return [first, *views]


def test_data_damaged_on_its_way_is_read_again() -> None:
    below = OnceWrong(CONTENT, "en.bin", 1)
    reader = CheckedObject(below, MemoryObject(summed(CONTENT)))
    assert bytes(reader.read([(600, 3000), (9000, 9001)])[0]) == CONTENT[600:3000]
    assert below.asked == [[(512, 3072), (8704, 9216)], [(512, 1024)]]


def test_sums_damaged_on_their_way_do_not_stay() -> None:
    sums = OnceWrong(summed(CONTENT, 512), "en.bin.xxh3", 2)
    # A chunk of sums is 64 KiB: two chunks of them take 8192 blocks and more.
    data = CONTENT * 25
    sums.data = summed(data, 512)
    sums.size = len(sums.data)
    reader = CheckedObject(MemoryObject(data), sums)
    for _ in range(2):
        assert bytes(reader.read([(8188 * 512, 8200 * 512)])[0]) == data[8188 * 512 : 8200 * 512]
    assert len(sums.asked) == 4  # the header, the damaged chunk, the sum again, the chunk again


def test_many_read_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each waits for its sums, in a thread of `vectored`; if they came in the same threads nobody would go on."""
    (tmp_path / "en.bin").write_bytes(CONTENT)
    (tmp_path / "en.bin.xxh3").write_bytes(summed(CONTENT))
    stored = [Location.of(f"file://{tmp_path}/{name}") for name in ("en.bin", "en.bin.xxh3")]
    readers = [CheckedObject(*map(RemoteObject, stored)) for _ in range(3 * WAITING_THREADS)]
    found = read_many([(reader, [(place, place + 1000)]) for place, reader in enumerate(readers)])
    assert [bytes(view) for (view,) in found] == [CONTENT[place : place + 1000] for place in range(len(readers))]


def header(**changes: int) -> bytes:
    values = {"version": 1, "block": 512, "size": 1000, **changes}
    head = struct.pack("<8sIIQ", b"BINXXH3\x00", values["version"], values["block"], values["size"])
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "0 bytes, a checksum file needs 32"),
        (header()[:31], "31 bytes, a checksum file needs 32"),
        (b"x" * 32, "starts with b'xxxxxxxx', a checksum file needs b'BINXXH3"),
        (header(version=2), "version 2, needed 1"),
        (header(block=511), "blocks of 511 bytes, needed 512 to 1073741824"),
        (header(block=2**31), "blocks of 2147483648 bytes"),
        (header(size=2**63), "48 bytes, the sums of 9223372036854775808 bytes need"),
        (header()[:20] + b"\x01" + header()[21:], "its header is damaged"),
        (header(size=1025), "48 bytes, the sums of 1025 bytes need 56"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(head: bytes, message: str) -> None:
    size = len(head) + 16 if len(head) == SUMS_HEADER.size else len(head)
    with pytest.raises(FormatError, match=f"en.bin.xxh3: {message}"):
        parse_sums_header(memoryview(head), size, "en.bin.xxh3")
    assert parse_sums_header(memoryview(header()), 48, "en.bin.xxh3").num_blocks == 2


def test_nothing_has_no_sums() -> None:
    reader, below, _ = checked(b"")
    assert summed(b"") == format_sums_header(0, BLOCK)
    assert reader.read([(0, 0)]) == [b""]
    assert below.asked == []
