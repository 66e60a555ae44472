"""Rows of big files by number: found once, cached, read in ranges, and noticed when the file changes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.chats import write_rows
from hypothesis import given
from hypothesis import strategies as st

from binidx.dataset.tokens.json_lines import UNCACHED_LINES_BYTES, JsonLines, find_lines
from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.storage.codecs.segments import SegmentWriter
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object


@given(
    st.lists(st.sampled_from([b"{}", b'{"a": 1}', b"", b" ", b"\r", b'{"b": "\xc3\xa4"}\r'])),
    st.integers(1, 9),
    st.booleans(),
)
def test_lines_are_those_that_splitting_gives_wherever_blocks_end(lines: list[bytes], size: int, ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    blocks = [memoryview(data[at : at + size]) for at in range(0, len(data), size)]
    starts, lengths = find_lines(blocks, "a.jsonl")
    found = [data[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    assert found == [line for line in data.split(b"\n") if len(line) >= 2]
    assert (starts.dtype, lengths.dtype) == (np.int64, np.int32)


def test_rows_are_parsed_one_by_one_and_pickle(tmp_path: Path) -> None:
    rows = [{"number": number, "text": "ä" * number} for number in range(50)]
    lines = JsonLines(write_rows(f"{tmp_path}/a.jsonl", rows))
    assert len(lines) == 50
    assert [lines[row] for row in (0, 17, 49, -1)] == [rows[row] for row in (0, 17, 49, 49)]
    assert [lines[some] for some in (slice(3), slice(-2, None), slice(None, None, -7), slice(9, 4))] == [
        rows[:3], rows[-2:], rows[::-7], []
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(lines))[3] == rows[3]
    with pytest.raises(IndexError):
        lines[50]


@pytest.mark.parametrize("beside", [True, False])
def test_lines_are_found_once_and_anew_when_the_file_changes(beside: bool, s3: Bucket) -> None:
    rows: list[Any] = [{"number": number, "text": "a" * UNCACHED_LINES_BYTES} for number in range(2)]
    rows += [{"number": number} for number in range(2, 500)]
    uri, cache = write_rows(f"{s3.fresh()}/a.jsonl", rows), None if beside else f"{s3.fresh()}/cache"
    for _ in range(2):
        assert JsonLines(uri, path_to_cache=cache)[499] == rows[499]
    write_rows(uri, rows[:0:-1])
    assert JsonLines(uri, path_to_cache=cache)[0] == rows[499]
    assert len(JsonLines(uri, path_to_cache=cache)) == 499


def test_lines_that_are_known_are_not_looked_for(tmp_path: Path) -> None:
    path, lines = tmp_path / "a.jsonl", b'{"a": 1}\n{"b": "%s"}\n' % (b"b" * UNCACHED_LINES_BYTES)
    path.write_bytes(lines)
    assert len(JsonLines(str(path))) == 2
    then = path.stat()
    path.write_bytes(lines.replace(b"}\n{", b",  ", 1))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_size == then.st_size
    assert len(JsonLines(str(path))) == 2


@pytest.mark.parametrize("rows", [[{"a": 1}, {"a": 2}], [{"a": 3}]], ids=["longer", "under its old times"])
def test_a_file_that_changes_is_noticed_by_workers(rows: list[Any], tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", [{"a": 1}])
    was = os.stat(uri)
    pickled = pickle.dumps(JsonLines(uri))
    write_rows(uri, rows)
    os.utime(uri, ns=(was.st_atime_ns, was.st_mtime_ns))
    again = pickle.loads(pickled)
    for _ in range(2):
        with pytest.raises(
            ObjectChangedError, match=r"a.jsonl: .* (in the process that pickled it|since it was pickled)"
        ):
            again[0]


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with create_object(Location.of(f"{tmp_path}/a.jsonl")) as out:
        out.write(b'{"a": 1}\n\n[\n{"b"}\n')
    lines = JsonLines(f"{tmp_path}/a.jsonl")
    assert len(lines) == 2
    with pytest.raises(FormatError, match=r"a.jsonl, row 1 at byte 12: no JSON object: Expecting"):
        lines[1]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    with create_object(Location.of(f"{tmp_path}/a.jsonl")) as out:
        out.write(b"")
    assert len(JsonLines(f"{tmp_path}/a.jsonl")) == 0


def test_rows_of_a_file_in_zstd_frames_are_read_as_those_of_a_plain_one(tmp_path: Path) -> None:
    rows = [{"number": number, "text": "x" * number} for number in range(300)]
    plain = Path(write_rows(f"{tmp_path}/a.jsonl", rows))
    with open(tmp_path / "a.jsonl.zst", "wb") as out, SegmentWriter(out, None, segment_bytes=1000) as writer:
        writer.write(plain.read_bytes())
    lines = JsonLines(f"{tmp_path}/a.jsonl.zst")
    assert [lines[row] for row in (0, 150, 299)] == [rows[row] for row in (0, 150, 299)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(FormatError, match=r"a.jsonl.gz: gzip has no random access; unpack it"):
        JsonLines(f"{tmp_path}/a.jsonl.gz")


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("s3://corpus/a.parquet", "Parquet"),
        ("chats.parquet", "Parquet"),
        ("Yukang/LongAlpaca-12k", "a name of the Hugging Face Hub"),
    ],
)
def test_parquet_and_names_of_the_hub_are_refused_with_the_way_out(uri: str, kind: str) -> None:
    with pytest.raises(FormatError, match=rf"^{uri}: {kind}, needs JSON Lines; datasets.load_dataset.* writes them$"):
        JsonLines(uri)


def test_a_relative_file_without_a_suffix_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/chats").write_text('{"text": "a"}\n')
    assert len(JsonLines("data/chats")) == 1
    with pytest.raises(ObjectNotFoundError):
        JsonLines("data/chats.jsonl")
