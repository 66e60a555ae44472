"""Parquet: the columns that are wanted, of every type that holds text, and nulls."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from helpers.text_oracle import read_all, read_file

from binidx.errors import FormatError, ObjectChangedError, UnreachableError
from binidx.prepare.text.batch import Filters
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.parquet_reader import _tables
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import plan_slices
from binidx.storage.adapters import ReadableFile
from binidx.storage.open import open_object

TEXTS = ["a", None, "", "é語😀\x00", "b" * 100, None, "c"]


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    try:
        parquet.write_table(pa.table(columns), path, **options)
    except pa.ArrowNotImplementedError as error:  # older releases read what they cannot write
        pytest.skip(f"pyarrow {pa.__version__}: {error}")
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.string_view(),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_texts_of_every_type_come_in_order_and_nulls_are_problems(tmp_path: Path, kind: Any, batch_bytes: int) -> None:
    values = [each.encode() if each is not None and "binary" in str(kind) else each for each in TEXTS]
    array = pa.array(TEXTS).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    path = write(tmp_path / "a.parquet", {"other": range(7), "text": array}, row_group_size=3)
    found = read_file(path, batch_bytes=batch_bytes)
    assert found.texts == [[each] for each in TEXTS if each is not None]
    assert found.rows == [0, 2, 3, 4, 6]
    assert found.positions == [0, 2, 0, 1, 0]
    assert found.num_bytes == sum(each.num_bytes for each in plan_slices(find_inputs(str(path)), 1 << 40))
    assert [(each.kind, each.row, each.byte) for each in found.problems] == [("null", 1, 1), ("null", 5, 2)]
    assert str(found.problems[0]) == f"{path}: row 1: null: 'text' is null"


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.string(), 2)], ids=str
)
def test_a_list_is_a_document_of_many_texts(tmp_path: Path, kind: Any) -> None:
    fixed = pa.types.is_fixed_size_list(kind)
    values = [["a", "b"], None, ["c", None], ["", "d"], *([] if fixed else [[], ["e"]])]
    path = write(tmp_path / "a.parquet", {"text": pa.array(values, kind)})
    found = read_file(path)
    assert found.texts == [["a", "b"], ["", "d"], *([] if fixed else [[], ["e"]])]
    assert [(each.kind, each.row) for each in found.problems] == [("null", 1), ("not text", 2)]


@pytest.mark.parametrize("kind", [pa.binary(), pa.list_(pa.binary())], ids=str)
def test_bytes_that_are_not_utf8_are_problems(tmp_path: Path, kind: Any) -> None:
    values: list[Any] = [b"a", b"\xff", b"\xed\xa0\x80", "é".encode()]
    values = [[b"x", each] for each in values] if kind != pa.binary() else values
    found = read_file(write(tmp_path / "a.parquet", {"text": pa.array(values, kind)}))
    assert [each[-1] for each in found.texts] == ["a", "é"]
    assert [(each.kind, each.row) for each in found.problems] == [("not utf-8", 1), ("not utf-8", 2)]


def test_row_groups_are_slices_in_their_order(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(100)]
    path = write(tmp_path / "a.parquet", {"text": texts, "title": texts[::-1]}, row_group_size=7)
    plan = plan_slices(find_inputs(str(path)), 1)
    assert len(plan) == 15
    assert [each.first_row for each in plan] == list(range(0, 100, 7))
    found = read_all(plan, ["text", "title"])
    assert found.documents == [[[a], [b]] for a, b in zip(texts, texts[::-1], strict=True)]
    assert len(plan_slices(find_inputs(str(path)), 1 << 20)) == 1


def test_fields_are_strings_or_json_and_filters_drop_rows(tmp_path: Path) -> None:
    columns = {
        "text": ["aaa", "b", "cc", None],
        "id": pa.array([1, None, -3, 4], pa.int16()),
        "ok": [True, True, False, True],
        "score": [0.5, 1.0, None, 2.0],
    }
    path = write(tmp_path / "a.parquet", columns)
    assert read_file(path, id_key="id").ids == ["1", None, "-3"]
    assert read_file(path, id_key="ok").ids == ["true", "true", "false"]
    assert read_file(path, id_key="score").ids == ["0.5", "1.0", None]
    found = read_file(path, id_key="id", filters=Filters(min_characters=2, keep={"ok": ["true"]}))
    assert (found.texts, found.ids) == ([["aaa"]], ["1"])
    assert found.dropped == {"keep ok": 1, "min characters": 1}
    assert found.num_rows == 4


def test_a_name_with_dots_is_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"a.b": ["x", "y"], "a": ["z", "z"], "a.c": [["u"], ["v"]]})
    assert read_file(path, ["a.b", "a.c"], batch_bytes=1).documents == [[["x"], ["u"]], [["y"], ["v"]]]
    assert [read_file(path, [name]).texts for name in ("a", "a.b")] == [[["z"], ["z"]], [["x"], ["y"]]]


def test_columns_that_are_not_there_or_hold_no_text_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"body": ["a"], "n": [1]})
    with pytest.raises(FormatError, match=r"no column 'text' .found 'body', 'n'"):
        read_file(path)
    with pytest.raises(FormatError, match=r"column 'n' is int64 .need string"):
        read_file(path, ["n"])
    long = write(
        tmp_path / "long.parquet", {"x" * 100_000: ["a"], **{f"{number}{'y' * 300}": ["a"] for number in range(50)}}
    )
    with pytest.raises(FormatError, match=r"no column 'text' .found 'xxx.* more characters\]xxx") as raised:
        read_file(long)
    assert len(str(raised.value)) < 3_000
    with pytest.raises(FormatError, match=r"no column 'id'"):
        read_file(path, ["body"], id_key="id")
    deep = write(tmp_path / "deep.parquet", {"text": [[["a"]]]})
    with pytest.raises(FormatError, match=r"column 'text' is list<.*list<.*need string"):
        read_file(deep)
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(FormatError, match=r"2 columns 'text' .need one"):
        read_file(tmp_path / "twice.parquet")


def test_what_is_no_parquet_file_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for data in (b"", b"PAR1", b"x" * 1000):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"a.parquet: "):
            find_inputs(str(path))


def damaged(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def test_rows_behind_a_damaged_page_are_problems_and_those_of_other_groups_are_read(tmp_path: Path) -> None:
    texts = [f"{number} " + "abcdef" * 100 for number in range(30)]
    options: dict[str, Any] = {"use_dictionary": False, "compression": "zstd", "row_group_size": 10}
    path = write(tmp_path / "a.parquet", {"text": texts}, **options)
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    damaged(path, lambda data: data.__setitem__(slice(start, start + 36), b"\xff" * 36))
    found = read_file(path)
    assert found.texts == [[each] for each in texts[:10] + texts[20:]]
    [problem] = found.problems
    assert (problem.kind, problem.row) == ("damaged", 10)
    assert str(problem).startswith(f"{path}: row 10: damaged: row group 1 is damaged (")
    assert str(problem).endswith("; 10 rows are lost")
    assert found.dropped == {"damaged": 9}
    assert found.num_rows == 30


def test_a_bit_that_flipped_is_a_problem_where_pages_have_checksums(tmp_path: Path) -> None:
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True, "write_statistics": False}
    path = write(tmp_path / "a.parquet", {"text": ["abcdef" * 100] * 10}, **options)
    damaged(path, lambda data: data.__setitem__(data.index(b"abcdef") + 2, ord("b")))
    assert [each.kind for each in read_file(path).problems] == ["damaged"]


@pytest.mark.parametrize("error", [UnreachableError("down"), OSError(errno.EIO, "I/O error")], ids=repr)
def test_a_store_or_a_disk_that_fails_is_no_damage(tmp_path: Path, error: OSError) -> None:
    """A job that leaves out damaged rows must not leave out those of a store that fails for a while."""

    class Failing(ReadableFile):
        down = False

        def read(self, count: int = -1) -> bytes:
            if self.down:
                raise error
            return super().read(count)

    source = Failing(open_object(str(write(tmp_path / "a.parquet", {"text": ["a"]}))))
    file = parquet.ParquetFile(source)
    source.down = True
    with pytest.raises(type(error)):
        list(_tables("a.parquet", file, 0, ["text"], 1 << 20))


def deadly(path: Path) -> Path:
    """A file with one bit flipped: its column has another type than its pages, and pyarrow aborts."""
    return damaged(write(path, {"text": ["a"]}), lambda data: data.__setitem__(data.rindex(b"schema\x15") + 10, 8))


def test_a_footer_that_kills_pyarrow_is_an_error_or_a_problem_of_its_file(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a.parquet", {"text": ["a"]}), deadly(tmp_path / "b.parquet")
    how = r"pyarrow died of it, Aborted" if int(pa.__version__.split(".")[0]) >= 20 else ".*"  # older ones raise
    with pytest.raises(FormatError, match=rf"{bad}: not a Parquet file, or damaged .{how}.; "):
        find_inputs(str(bad))
    found = find_inputs([str(bad), str(good)], damaged_too=True)
    assert [len(each.blocks) for each in found] == [0, 1]
    read = read_all(plan_slices(found, 1 << 20))
    assert read.texts == [["a"]]
    assert [(each.kind, each.uri) for each in read.problems] == [("damaged", str(bad))]
    assert read.num_rows == 2


def test_a_footer_that_contradicts_itself_is_a_format_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"] * 5})
    data = path.read_bytes()
    # Of the bytes of the footer, one after the other: an error, or a plan within the file.
    for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with contextlib.suppress(FormatError):
            [found] = find_inputs(str(path))
            assert all(0 <= block.stored <= block.stored + block.stored_bytes <= len(data) for block in found.blocks)
            assert all(block.count >= 0 for block in found.blocks)


def test_a_file_that_changed_since_the_plan_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    plan = plan_slices(find_inputs(str(path)), 1 << 20)
    write(path, {"text": ["a", "b"]})
    with pytest.raises(ObjectChangedError, match="changed since it was planned"):
        read_all(plan)


def test_memory_is_the_batch_and_not_the_row_group(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(500).hex() for _ in range(32_000)]
    path = write(tmp_path / "a.parquet", {"text": texts}, row_group_size=32_000, use_dictionary=False)
    del texts
    (piece,) = plan_slices(find_inputs(str(path)), 1 << 40)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most, count = 0, 0
    for (batch,) in read_slice(piece, batch_bytes=1 << 20):
        most, count = max(most, pa.total_allocated_bytes() - before), count + batch.num_documents
    assert count == 32_000
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert most < 12 << 20


def test_footers_are_read_although_something_prints_in_the_process_that_parses_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a", "b"]})
    (tmp_path / "sitecustomize.py").write_text("print('a hook of the site', flush=True)")
    code = "import sys; from binidx.format.parquet_footer import read_metadata\n"
    code += "from binidx.storage.open import open_object; print(read_metadata(open_object(sys.argv[1])).num_rows)"
    places = os.pathsep.join([str(tmp_path), *sys.path])
    run = [sys.executable, "-c", code, str(path)]
    printed = subprocess.run(run, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines()[-1] == "2"
