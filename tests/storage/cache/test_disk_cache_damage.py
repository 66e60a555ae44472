"""A damaged cache: whatever happened to its files, no wrong byte is given, and what was damaged is fetched again."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.versioned_objects import MarkedObject

from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.maintenance import cached_contents

DATA = random.Random(3).randbytes(50_500)
small = partial(DiskCache, chunk_bytes=1000, block_bytes=20_000)
TABLE = 4096


def warm(directory: Path) -> list[Path]:
    """Keep all of DATA there, and let go of it; the three blocks."""
    small(MarkedObject(DATA), directory).read([(0, len(DATA))])
    gc.collect()
    return sorted(directory.glob("objects/*/*.block"))


def read_all(directory: Path) -> list[int]:
    """Check every byte, by short and long reads; the chunks that were fetched for it."""
    below = MarkedObject(DATA)
    reader = small(below, directory)
    for start in range(0, len(DATA), 700):
        assert bytes(reader.read([(start, min(start + 650, len(DATA)))])[0]) == DATA[start : start + 650]
    assert bytes(reader.read([(0, len(DATA))])[0]) == DATA
    return sorted(start // 1000 for asked in below.asked for start, _ in asked)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(offset)
        file.write(bytes([byte]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def swap_chunks(path: Path) -> None:
    """Both whole and true, but each in the other's place, with its entry."""
    content = bytearray(path.read_bytes())
    for first, second, size in ((TABLE, TABLE + 1000, 1000), (0, 16, 16)):
        one, two = content[first : first + size], content[second : second + size]
        content[first : first + size], content[second : second + size] = two, one
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], int]] = {
    "a bit of the data": (lambda path: flip(path, TABLE + 7_777, 3), 1),
    "the last bit of a chunk": (lambda path: flip(path, TABLE + 999, 7), 1),
    "a bit of an entry": (lambda path: flip(path, 16 * 5 + 9), 1),
    "an entry lost": (lambda path: overwrite(path, 16 * 5, bytes(16)), 1),
    "all entries lost": (lambda path: overwrite(path, 0, bytes(TABLE)), 20),
    "a page of data lost, its entries not": (lambda path: overwrite(path, TABLE * 2, bytes(4096)), 5),
    "all data lost, its entries not": (lambda path: overwrite(path, TABLE, bytes(20_000)), 20),
    "chunks in each other's place": (swap_chunks, 2),
    "cut in the data": (lambda path: os.truncate(path, TABLE + 5_500), 16),
    "cut in the table": (lambda path: os.truncate(path, 100), 20),
    "cut to nothing": (lambda path: os.truncate(path, 0), 20),
    "longer than it was": (lambda path: os.truncate(path, 100_000), 0),
    "another block in its place": (lambda path: shutil.copy(path.parent / "00000001.block", path), 20),
    "garbage": (lambda path: path.write_bytes(random.Random(0).randbytes(TABLE + 20_000)), 20),
    "gone": (lambda path: path.unlink(), 20),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_damaged_is_fetched_again_and_nothing_else(tmp_path: Path, damage: str) -> None:
    happen, count = DAMAGE[damage]
    happen(warm(tmp_path)[0])
    chunks = read_all(tmp_path)
    # Asked in runs: each begins with a damaged chunk of the first block.
    assert len(chunks) <= count
    assert bool(chunks) == bool(count)
    assert all(chunk < 20 for chunk in chunks)
    gc.collect()
    assert read_all(tmp_path) == []


def test_random_flips_never_give_a_wrong_byte(tmp_path: Path) -> None:
    choose = random.Random(4)
    for _ in range(6):
        for block in warm(tmp_path):
            for _ in range(choose.randrange(4)):
                flip(block, choose.randrange(block.stat().st_size), choose.randrange(8))
        read_all(tmp_path)
        gc.collect()


def test_damage_is_said_once_with_object_and_place_and_then_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = warm(tmp_path)
    for at in (7, 12):
        flip(blocks[0], TABLE + 1000 * at)
    overwrite(blocks[1], TABLE, bytes(20_000))
    reader = small(MarkedObject(DATA), tmp_path)
    for start in range(0, len(DATA), 500):
        assert bytes(reader.read([(start, start + 500)])[0]) == DATA[start : start + 500]
    assert [record.message for record in caplog.records] == [
        f"memory-object: its copy in {blocks[0].parent}: chunk 7 was damaged; fetched again, as will be others that are"
    ]
    assert reader.stats.damaged == reader.stats.misses == 2 + 20


def test_a_chunk_of_another_object_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """As after a file system check that connected files crosswise: true chunks, true sums, another object."""
    other = MarkedObject(DATA[::-1], "other")
    ours = warm(tmp_path)
    small(other, tmp_path).read([(0, len(DATA))])
    gc.collect()
    theirs = sorted(set(tmp_path.glob("objects/*/*.block")) - set(ours))
    for mine, their in zip(ours, theirs, strict=True):
        shutil.copy(their, mine)
    assert len(read_all(tmp_path)) > 0


def test_a_bit_that_flips_after_it_was_compared_is_found_by_the_next_process(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    reader.read([(0, len(DATA))])
    flip(sorted(tmp_path.glob("objects/*/*.block"))[0], TABLE + 10)
    del reader
    gc.collect()
    assert read_all(tmp_path) == [0]


@pytest.mark.parametrize("what", ["blocks", "object", "all"])
def test_files_removed_under_a_reader_are_made_anew(tmp_path: Path, what: str) -> None:
    reader = small(MarkedObject(DATA), tmp_path / "cache")
    held = reader.read([(0, 3000)])[0]
    if what == "blocks":
        for block in tmp_path.glob("cache/objects/*/*.block"):
            block.unlink()
    else:
        shutil.rmtree(tmp_path / "cache" / ("objects" if what == "object" else ""))
    for start in range(0, 50_000, 500):
        assert bytes(reader.read([(start, start + 500)])[0]) == DATA[start : start + 500]
    assert held == DATA[:3000]
    del reader, held
    gc.collect()
    assert len(list((tmp_path / "cache").glob("objects/*/*.block"))) == 3


def test_a_meta_file_that_is_garbage_is_written_again(tmp_path: Path) -> None:
    warm(tmp_path)
    (meta,) = tmp_path.glob("objects/*/meta.json")
    for garbage in (b"", b"{}", b"[1, 2]", b'{"format": 1', b'{"format": 99}'):
        meta.write_bytes(garbage)
        assert cached_contents(str(tmp_path))[0].content is None
        assert read_all(tmp_path) == []
        gc.collect()
        found = cached_contents(str(tmp_path))[0].content
        assert found is not None
        assert found.uri == "memory-object"


def test_a_usage_file_that_is_garbage_does_not_break_the_bound(tmp_path: Path) -> None:
    for garbage in (b"", b"x", b"\xff" * 24, bytes(24), b"\x7f" * 24):
        (tmp_path / "usage").write_bytes(garbage)
        reader = small(MarkedObject(DATA), tmp_path, 45_000)
        for start in range(0, 50_000, 500):
            assert bytes(reader.read([(start, start + 500)])[0]) == DATA[start : start + 500]
        del reader
        gc.collect()
        assert (
            sum(block.stat().st_blocks * 512 for block in tmp_path.glob("objects/*/*.block")) <= 45_000 + 3 * 2 * TABLE
        )
