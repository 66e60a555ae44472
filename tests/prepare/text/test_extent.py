"""Extents prove that the slices of an input have read all of it once, wherever it is cut; and fail if they have not."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from helpers.text_oracle import cut_at, random_lines

from binidx.errors import FormatError
from binidx.prepare.text import read as reading
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.jsonl import select_lines
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import (
    Extent,
    Input,
    InputBlock,
    Slice,
    SliceExtent,
    check_extents,
    plan_slices,
)


def read(slices: Iterable[Slice], **options: int) -> list[SliceExtent]:
    """Each slice with its extent, its rows thrown away."""
    found = [(piece, Extent()) for piece in slices]
    for piece, extent in found:
        for _ in read_slice(piece, extent=extent, **options):
            pass
    return found


def counted(found: Iterable[SliceExtent]) -> int:
    return sum(extent.count for _, extent in found)


def random_data(seed: int, rows: int) -> bytes:
    """Short lines of every kind, blank ones and some over a limit among them, with a last newline or without."""
    rng = random.Random(seed)
    lines = [rng.choice([b"", b'{"text": "a"}', b"bad", b"\xff", b'{"text": "%s"}' % (b"b" * 30)]) for _ in range(rows)]
    return rng.choice([b"", b"\xef\xbb\xbf"]) + b"\n".join(lines) + rng.choice([b"", b"\n"])


@pytest.mark.parametrize("seed", range(3))
def test_bytes_of_a_plain_file_are_read_once_whatever_the_two_cuts(tmp_path: Path, seed: int) -> None:
    data, path = random_data(seed, 4), tmp_path / "a.jsonl"
    path.write_bytes(data)
    for first, last in combinations(range(1, len(data)), 2):
        found = read(cut_at(path, [0, first, last, len(data)]), batch_bytes=16, max_line_bytes=32)
        check_extents(found)
        assert counted(found) == len(data)


def test_bytes_of_larger_files_are_read_once_whatever_the_size_of_a_slice(tmp_path: Path) -> None:
    data = b"\n".join(random_lines(0, 200))
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    for part_bytes in (37, 500, 4096, len(data) - 1, len(data), len(data) + 1):
        found = read(plan_slices(find_inputs(str(path)), part_bytes), batch_bytes=1000)
        check_extents(found)
        assert counted(found) == len(data)


def in_frames(path: Path, data: bytes, bounds: Sequence[int]) -> Input:
    """A .zst of a frame between each two bounds; a frame may be empty."""
    frames = [zstandard.compress(data[first:last]) for first, last in pairwise(bounds)]
    path.write_bytes(b"".join(frames))
    blocks, stored = [], 0
    for frame, (first, last) in zip(frames, pairwise(bounds), strict=True):
        blocks.append(InputBlock(stored, len(frame), first, last - first))
        stored += len(frame)
    (found,) = find_inputs(str(path))
    return Input(found.uri, "jsonl.zst", found.identity, tuple(blocks))


@pytest.mark.parametrize("seed", range(2))
def test_plain_bytes_of_a_zst_are_read_once_wherever_its_frames_end(tmp_path: Path, seed: int) -> None:
    data = random_data(seed, 5)
    for first, last in combinations([0, *range(1, len(data), 5), len(data)], 2):
        each = in_frames(tmp_path / "a.jsonl.zst", data, [0, first, last, len(data)])
        found = read(plan_slices([each], 1), batch_bytes=16)
        assert len(found) == 3
        check_extents(found)
        assert counted(found) == len(data)


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress])
def test_what_is_compressed_in_one_piece_is_read_to_its_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.jsonl.{'zst' if pack is zstandard.compress else 'gz'}"
    for data in (b"", random_data(0, 5), random_data(1, 500)):
        path.write_bytes(pack(data))
        found = read(plan_slices(find_inputs(str(path)), 10))
        check_extents(found)
        assert [(extent.count, extent.end) for _, extent in found] == [(len(data), len(data))]


@pytest.mark.parametrize("rows", [0, 1, 10])
@pytest.mark.parametrize("group", [1, 3, 100])
def test_rows_of_a_parquet_file_are_read_once_whatever_its_row_groups(tmp_path: Path, rows: int, group: int) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array([None if row % 3 == 1 else f"{row}" for row in range(rows)], pa.string())})
    parquet.write_table(table, path, row_group_size=group)
    for part_bytes in (1, 150, 1 << 30):
        found = read(plan_slices(find_inputs(str(path)), part_bytes))
        check_extents(found)
        assert counted(found) == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_of_no_bytes_is_read_to_its_end_too(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    found = read(plan_slices(find_inputs(str(tmp_path / name)), 10))
    assert len(found) == 1
    assert counted(found) == 0
    check_extents(found)


def test_an_input_that_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(random_data(0, 9))
    (tmp_path / "b.jsonl").write_bytes(random_data(1, 9))
    found = read(plan_slices(find_inputs([f"{tmp_path}/{name}.jsonl" for name in "aabaa"]), 30))
    check_extents(found)
    with pytest.raises(FormatError, match=r"a.jsonl: plain bytes 0 to \d+ were read, but the input ends at"):
        check_extents(found[:-1])


Rule = Callable[[Iterable[bytes | memoryview], int, int | None], Iterator[tuple[int, bytes | memoryview]]]


def one_more(
    pieces: Iterable[bytes | memoryview], first: int, last: int | None
) -> Iterator[tuple[int, bytes | memoryview]]:
    """As if a line that ends right before the bound went on after it."""
    return select_lines(pieces, first, None if last is None else last + 1)


def one_less(
    pieces: Iterable[bytes | memoryview], first: int, last: int | None
) -> Iterator[tuple[int, bytes | memoryview]]:
    """As if a line that begins right after the bound's newline belonged to the slice behind it."""
    return select_lines(pieces, first + 1 if first else 0, last)


def without_the_last(
    pieces: Iterable[bytes | memoryview], first: int, last: int | None
) -> Iterator[tuple[int, bytes | memoryview]]:
    """As if what has no newline at the end were no line."""
    data = b"".join(bytes(piece) for _, piece in select_lines(pieces, first, last))
    yield first, data[: data.rfind(b"\n") + 1]


@pytest.mark.parametrize("rule", [one_more, one_less, without_the_last])
def test_a_wrong_rule_for_the_lines_of_a_slice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    data = b'{"text": "a"}\n{"text": "bb"}\n{"text": "ccc"}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    cuts = [cut_at(path, [0, cut, len(data)]) for cut in range(1, len(data))]
    for cut in cuts:
        check_extents(read(cut))
    monkeypatch.setattr(reading, "select_lines", rule)
    wrong = 0
    for cut in cuts:
        found = read(cut)
        try:
            check_extents(found)
        except FormatError:
            wrong += 1
        else:
            assert counted(found) == len(data)
    assert wrong


def test_bytes_that_stay_behind_in_a_compressed_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a decompressor stopped after its first member and said nothing."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n" * 1_000_000, 0))

    def first_member(pieces: Iterable[bytes | memoryview], piece: Slice) -> Iterator[bytes]:
        yield gzip.GzipFile(fileobj=io.BytesIO(bytes(next(iter(pieces)))[:60])).read(2)

    row = replace(reading.FORMATS["jsonl.gz"], decompress=first_member)
    monkeypatch.setitem(reading.FORMATS, "jsonl.gz", row)
    with pytest.raises(
        FormatError, match=r"a.jsonl.gz: plain bytes 0 to 2 were read, but the input ends at an unknown position"
    ):
        check_extents(read(plan_slices(find_inputs(str(path)), 10)))


def test_what_no_part_or_two_have_is_named_by_its_bytes() -> None:
    def slices(
        *extents: Extent, uri: str = "s3://t/en.jsonl", size: int = 30, kind: str = "jsonl"
    ) -> list[SliceExtent]:
        return [
            (Slice(uri, kind, {"size": size}, 10 * n, 10 * n + 10, 10 * n, 10, None), extent)
            for n, extent in enumerate(extents)
        ]

    good = slices(Extent(0, 12), Extent(0, 0), Extent(12, 18, 30))
    check_extents([*good, *good])
    check_extents([])
    packed = {"kind": "jsonl.zst", "uri": "en.jsonl.zst"}
    cases: list[tuple[str, list[SliceExtent]]] = [
        ("en.jsonl: plain bytes 12 to 15 were read by no part", slices(Extent(0, 12), Extent(15, 15, 30))),
        ("plain bytes 10 to 12 were read twice", slices(Extent(0, 12), Extent(10, 20, 30))),
        ("plain bytes 0 to 3 were read by no part", slices(Extent(3, 9), Extent(12, 18, 30))),
        ("plain bytes 0 to 12 were read, but the input ends at 30", slices(Extent(0, 12), Extent())),
        ("plain bytes 0 to 30 were read, but the input ends at 30 and 31", slices(Extent(0, 30, 31))),
        ("plain bytes 0 to 12 were read, but the input ends at an unknown position", slices(Extent(0, 12), **packed)),
        ("plain bytes 0 to 12 were read, but the input ends at 13", slices(Extent(0, 12), Extent(0, 0, 13), **packed)),
        ("were read, but the input ends at 12 and 13", slices(Extent(0, 12, 12), Extent(0, 0, 13), **packed)),
        ("rows 5 to 6 were read by no part", slices(Extent(0, 5, 9), Extent(6, 3, 9), uri="a", kind="parquet")),
    ]  # fmt: skip
    for message, found in cases:
        with pytest.raises(FormatError) as raised:
            check_extents([*good, *found])
        assert message in str(raised.value)
        assert str(raised.value).endswith("(need each once); remove the parts and run again")
