"""Slices give every document once, wherever an input is cut."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path

import pytest
import zstandard
from helpers.text_oracle import cut_at, read_all, read_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from binidx.errors import FormatError, ObjectChangedError
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import Input, InputBlock, plan_slices
from binidx.storage.location import Location

LINES = [b'{"text": "a"}', b"", b'{"text": ["b", ""]}\r', b"bad", b'{"text": ""}', b" ", '{"text": "\\né"}'.encode()]
DATA = b"\n".join(LINES)


@pytest.mark.parametrize("data", [DATA, DATA + b"\n", b"\n\n" + DATA, b"\xef\xbb\xbf" + DATA])
def test_a_cut_at_any_byte_gives_the_same_documents(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    whole = read_file(path)
    for cut in range(1, len(data)):
        found = read_all(cut_at(path, [0, cut, len(data)]), batch_bytes=16)
        assert (found.texts, found.positions) == (whole.texts, whole.positions)
        assert [(each.kind, each.byte, each.line) for each in found.problems] == [
            (each.kind, each.byte, each.line) for each in whole.problems
        ]
        assert (found.dropped, found.num_rows) == (whole.dropped, whole.num_rows)
        assert found.num_bytes <= len(data)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(LINES), max_size=12), part_bytes=st.integers(1, 40), batch=st.integers(16, 50))
def test_slices_of_any_size_give_what_the_file_gives(
    tmp_path: Path, lines: list[bytes], part_bytes: int, batch: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    whole, found = read_file(path), read_file(path, part_bytes=part_bytes, batch_bytes=batch)
    assert (found.texts, found.positions, found.num_rows) == (whole.texts, whole.positions, whole.num_rows)
    assert [each.byte for each in found.problems] == [each.byte for each in whole.problems]


def test_problems_of_a_later_slice_name_the_byte_and_no_line_that_nobody_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\nbad\n')
    first, second = cut_at(path, [0, 5, 18])
    assert read_slice(first).__next__()[0].num_rows == 1
    ((batch,),) = read_slice(second)
    assert [each.where for each in batch.problems] == ["byte 14"]
    assert [each.row for each in batch.problems] == [0]


def test_slices_pickle_and_go_through_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    for each in plan_slices(find_inputs(str(path)), 7):
        assert each == pickle.loads(pickle.dumps(each))


def test_a_plan_is_the_inputs_in_their_order_cut_by_size() -> None:
    plain = Input("b.jsonl", "jsonl", {"size": 25})
    zipped = Input("a.jsonl.gz", "jsonl.gz", {"size": 1000})
    framed = Input(
        "c.jsonl.zst", "jsonl.zst", {"size": 90}, tuple(InputBlock(30 * n, 30, 100 * n, 100) for n in range(3))
    )
    empty = Input("d.jsonl", "jsonl", {"size": 0})
    plan = plan_slices([plain, zipped, framed, empty], 60)
    bounds = [(each.uri, each.first, each.last, each.stored, each.num_bytes, each.first_row) for each in plan]
    assert bounds == [
        ("b.jsonl", 0, 25, 0, 25, 0),
        ("a.jsonl.gz", 0, None, 0, 1000, 0),
        ("c.jsonl.zst", 0, 200, 0, 60, 0),
        ("c.jsonl.zst", 200, None, 60, 30, None),
        ("d.jsonl", 0, 0, 0, 0, 0),
    ]
    assert [each.num_bytes for each in plan_slices([plain], 10)] == [10, 10, 5]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_changed_since_the_plan_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(DATA)
    plan = plan_slices(find_inputs(str(path)), 1 << 20)
    path.write_bytes(DATA + b"\n")
    with pytest.raises(ObjectChangedError, match=f"{name}: changed since it was planned"):
        read_all(plan)


def test_a_file_that_is_written_to_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 10)
    (piece,) = plan_slices(find_inputs(str(path)), 1 << 20)
    batches = read_slice(piece, batch_bytes=32)
    next(batches)
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ObjectChangedError, match="changed since it was planned"):
        list(batches)


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"text": f"{number} " * (number % 50)}).encode() + b"\n" for number in range(count))


def test_frames_of_zstd_are_slices_whose_lines_go_over_their_bounds(tmp_path: Path) -> None:
    data = lines(400)
    size = len(data) // 7
    path = tmp_path / "a.jsonl.zst"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    path.write_bytes(b"".join(zstandard.compress(each) + skippable for each in pieces))
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(data)
    whole = read_file(plain)
    (found,) = find_inputs(str(path))
    assert found.blocks == ()  # it has no seek table
    blocks, stored = list[InputBlock](), 0
    for number, piece in enumerate(pieces):
        stored_bytes = len(zstandard.compress(piece) + skippable)
        blocks.append(InputBlock(stored, stored_bytes, number * size, len(piece)))
        stored += stored_bytes
    plan = plan_slices([Input(found.uri, found.format, found.identity, tuple(blocks))], 1)
    assert len(plan) == len(pieces)
    read = read_all(plan)
    assert (read.texts, read.positions) == (whole.texts, whole.positions)


def test_a_seek_table_cuts_a_zst_that_our_own_writer_made(tmp_path: Path) -> None:
    """Random text, so that its frames come to more than LEAST_BYTES."""
    rng = random.Random(0)
    data = b"".join(json.dumps({"text": rng.randbytes(500).hex()}).encode() + b"\n" for _ in range(6000))
    from binidx.storage.open import codec_named
    from binidx.storage.writing.publish import create_object

    path = tmp_path / "a.jsonl.zst"
    with create_object(Location.of(str(path))) as out, codec_named("zstd").create(out, None) as writer:
        writer.write(data)
    plan = plan_slices(find_inputs(str(path)), 1 << 20)
    assert len(plan) > 2
    assert sum(each.num_bytes for each in plan) <= path.stat().st_size
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(data)
    found, whole = read_all(plan), read_file(plain)
    assert (found.texts, found.positions) == (whole.texts, whole.positions)


@pytest.mark.parametrize("lie", [-5000, 5000])
def test_a_seek_table_that_lies_of_plain_bytes_is_an_error_and_loses_no_line(tmp_path: Path, lie: int) -> None:
    """Of frames that do not say their size themselves; the table takes from one what it gives to the next."""
    rng = random.Random(0)
    rows = [json.dumps({"text": rng.randbytes(500).hex()}).encode() + b"\n" for _ in range(9200)]
    plain = [b"".join(rows[first : first + 2300]) for first in range(0, 9200, 2300)]
    frames = [zstandard.ZstdCompressor(write_content_size=False).compress(each) for each in plain]
    told = [len(each) for each in plain]
    told[1], told[2] = told[1] + lie, told[2] - lie
    entries = b"".join(struct.pack("<II", len(frame), size) for frame, size in zip(frames, told, strict=True))
    table = entries + struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table)
    plan = plan_slices(find_inputs(str(path)), 1 << 20)
    assert len(plan) == 4
    with pytest.raises(FormatError, match="its seek table says"):
        read_all(plan)
