"""Lines of JSON against Python's own json, line by line."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from helpers.text_oracle import by_json, documents_of, random_lines, read_all, read_file
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import ConfigError
from binidx.prepare.text.batch import PROBLEMS_BY_KIND
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.jsonl import Lines, parse_json_lines, parse_lines
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.rows import RowReader
from binidx.prepare.text.slices import Extent, ReadRequest, Slice, plan_slices
from binidx.storage.location import Location

GOOD = b'{"text": "good"}'

ODD = {
    b'{"text": "a"': "malformed",
    b'{"text": "a"} x': "malformed",
    b'{"text": "a",}': "malformed",
    b"{'text': 'a'}": "malformed",
    b'{"text": "a\x00b"}': "malformed",
    b'{"text": "a\tb"}': "malformed",
    b'{"text": "a", "n": 01}': "malformed",
    b'\xef\xbb\xbf{"text": "a"}': "malformed",
    b"\x0b": "malformed",
    "{\u00a0}".encode(): "malformed",
    b'{"text": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "malformed",
    b'{"text": "a", "b": ' + b"1" * 5000 + b"}": "malformed",
    b'{"text": "\xff"}': "not utf-8",
    b'{"text": "\xed\xa0\x80"}': "not utf-8",
    b'{"text": "\xc0\x80"}': "not utf-8",
    b'{"text": "a", "other": "\xe2\x82"}': "not utf-8",
    b"[1]": "not an object",
    b'"text"': "not an object",
    b"null": "not an object",
    b"{}": "missing key",
    b'{"Text": "a"}': "missing key",
    b'{"other": {"text": "a"}}': "missing key",
    b'{"text": null}': "null",
    b'{"text": "a", "text": null}': "null",
    b'{"text": 7}': "not text",
    b'{"text": true}': "not text",
    b'{"text": {"a": "b"}}': "not text",
    b'{"text": ["a", null]}': "not text",
    b'{"text": [["a"]]}': "not text",
    b'{"text": "\\ud800"}': "lone surrogate",
    b'{"text": "\\udc00\\ud800"}': "lone surrogate",
    b'{"text": ["a", "\\ud83dx"]}': "lone surrogate",
}

FINE: dict[bytes, list[str]] = {
    b'{"text": ""}': [""],
    b'{"text": []}': [],
    b'{"text": ["a", "", "b"]}': ["a", "", "b"],
    b'{"text": "a", "text": "b"}': ["b"],
    b'{"text": null, "text": "b"}': ["b"],
    b'{"te\\u0078t": "a"}': ["a"],
    b'{"text": "a", "te\\u0078t": ["b", "c"]}': ["b", "c"],
    b'\t {"text"\r: "a" } \r': ["a"],
    b'{"text": "\\u0000\\u001f\x7f"}': ["\x00\x1f\x7f"],
    b'{"text": "\\ud83d\\ude00 \\u00e9 \\"\\\\\\/\\b\\f\\n\\r\\t"}': ['😀 é "\\/\b\f\n\r\t'],
    '{"text": "\u2028\u2029\u0085 é 語 😀"}'.encode(): ["\u2028\u2029\u0085 é 語 😀"],
    b'{"text": "a", "x": NaN, "y": [Infinity, -Infinity], "z": 1e999}': ["a"],
    b'{"text": "a", "x": "\\ud800"}': ["a"],
    b'{"text": "a", "x": ' + b"[" * 50 + b"]" * 50 + b"}": ["a"],
}


@pytest.mark.parametrize(("line", "kind"), ODD.items(), ids=range(len(ODD)))
def test_a_line_that_is_no_document_is_a_problem_at_its_place(tmp_path: Path, line: bytes, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD, line, GOOD]))
    found = read_file(path)
    assert found.texts == [["good"], ["good"]]
    (problem,) = found.problems
    assert (problem.kind, problem.row, problem.byte, problem.line) == (kind, 1, len(GOOD) + 1, line)
    assert str(problem).startswith(f"{path}: line 2, byte {len(GOOD) + 1}: {kind}: ")


def test_every_kind_of_problem_is_known_and_meets_a_test() -> None:
    others = {"too long", "damaged", "not extracted"}  # the last two: test_parquet.py, test_other_formats.py
    assert others.union(ODD.values()) == set(PROBLEMS_BY_KIND)


@pytest.mark.parametrize(("line", "texts"), FINE.items(), ids=range(len(FINE)))
def test_what_json_reads_is_a_document(tmp_path: Path, line: bytes, texts: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD, line, GOOD]))
    found = read_file(path)
    assert found.texts == [["good"], texts, ["good"]]
    assert not found.problems
    assert by_json(path.read_bytes())[0] == [[["good"]], [texts], [["good"]]]


@pytest.mark.parametrize("at", range(12))
def test_a_bad_line_at_any_position_costs_that_line_alone(tmp_path: Path, at: int) -> None:
    lines = [json.dumps({"text": f"document {number}"}).encode() for number in range(12)]
    bad = [*lines[:at], b'{"text": ', *lines[at:]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(bad) + b"\n")
    found = read_file(path, batch_bytes=64)
    assert found.texts == [[f"document {number}"] for number in range(12)]
    assert [(each.row, each.byte) for each in found.problems] == [(at, sum(len(each) + 1 for each in lines[:at]))]
    assert found.num_rows == 13


def test_blank_lines_are_counted_and_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n \t\n" + GOOD + b"\r\n\r\n" + GOOD + b"\n\n")
    found = read_file(path)
    assert found.texts == [["good"], ["good"]]
    assert found.rows == [2, 4]
    assert found.dropped == {"blank line": 4}
    assert found.num_rows == 6


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_documents_has_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    found = read_file(path)
    assert found.texts == []
    assert not found.problems


def test_a_byte_order_mark_is_left_out_where_the_file_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\xef\xbb\xbf" + GOOD)
    found = read_file(path)
    assert (found.texts, found.positions) == ([["good"]], [3])
    assert [each.kind for each in found.problems] == ["malformed"]


@pytest.mark.parametrize("batch_bytes", [16, 50, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_beyond_the_limit_is_one_problem(tmp_path: Path, batch_bytes: int, end: bytes) -> None:
    fits, beyond = (b'{"text": "%s"}' % (b"x" * count) for count in (87, 88))
    assert len(fits) + 1 == 100
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD, beyond, fits, beyond * 7, GOOD, beyond]) + end)
    found = read_file(path, max_line_bytes=100, batch_bytes=batch_bytes)
    assert [len(each[0]) for each in found.texts] == [4, 87, 4]
    assert [(each.kind, each.row, each.line) for each in found.problems] == [
        ("too long", row, b"") for row in (1, 3, 5)
    ]
    assert found.problems[0].byte == len(GOOD) + 1
    assert found.positions[-1] == path.read_bytes().rindex(GOOD)
    assert found.num_rows == 6


def test_keys_have_the_same_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"title": "t", "text": ["a", "b"]}\n{"text": "c"}\n{"title": [], "text": "d"}\n')
    found = read_file(path, ["text", "title"])
    assert found.documents == [[["a", "b"], ["t"]], [["d"], []]]
    assert [each.kind for each in found.problems] == ["missing key"]


def test_a_dotted_key_is_a_nested_one_unless_there_is_a_key_of_this_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": {"b": "nested", "id": 7}}\n{"a": {"b": "nested"}, "a.b": "literal"}\n')
    found = read_file(path, ["a.b"], id_key="a.id")
    assert found.documents == [[["nested"]], [["literal"]]]
    path.write_bytes(path.read_bytes() + b'{"a": "b"}\n{"a": {"c": "d"}}\n')
    found = read_file(path, ["a.b"])
    assert found.documents == [[["nested"]], [["literal"]]]
    missing = "'a.b' is not among 'a'"
    assert [each.detail for each in found.problems] == [missing, f"{missing}; --json-keys a.c reads the nested one"]
    hints = [each.detail.partition("; ")[2] for key in ("b", "a") for each in read_file(path, [key]).problems[:1]]
    assert hints == ["--json-keys a.b reads the nested one", "--json-keys a.b reads one in it"]


def test_ids_are_strings_as_they_are_and_other_values_as_json(tmp_path: Path) -> None:
    values: list[Any] = ["a\n", "", 7, -7, 10**30, 0.5, True, False, None, {"a": [1]}, [], "\ud800"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": value, "text": "a"}) + "\n" for value in values) + '{"text": "a"}\n')
    found = read_file(path, id_key="id")
    needed = ["a\n", "", "7", "-7", str(10**30), "0.5", "true", "false", None, '{"a": [1]}', "[]", "?", None]
    assert found.ids == needed


def test_a_field_may_be_longer_as_json_writes_it_than_the_file_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text":["a"],"id":[{",".join("1" * 1000)}]}}')
    found = read_file(path, id_key="id")
    assert found.ids == [json.dumps([1] * 1000)]
    assert len(found.ids[0] or "") > path.stat().st_size
    assert found.texts == [["a"]]


def test_fields_that_grow_cost_the_time_of_their_bytes(tmp_path: Path) -> None:
    """Each é becomes six characters: from the first sixth of a batch on there is no room for the rest."""
    row = '{"text": "", "id": ["' + "é" * 20 + '"]}\n'
    path = tmp_path / "a.jsonl"
    path.write_text(row * ((1 << 20) // len(row.encode())))
    began = time.process_time()
    found = read_file(path, id_key="id")
    assert set(found.ids) == {json.dumps(["é" * 20])}
    assert time.process_time() - began < 2


def test_many_random_lines_are_what_json_says() -> None:
    piece = Slice("a.jsonl", "jsonl", {"size": 0}, 0, None, 0, 0, 0)
    for seed in range(8):
        data = b"\n".join(random_lines(seed, 2500))
        request = ReadRequest(piece, ["text"], ["id"], 1 << 20, 1 << 30, Location(piece.uri), Extent())
        rows = parse_lines(Lines(memoryview(data), 1), request, parse_json_lines)
        batches, _ = RowReader(request, ("line", 1)).make_batches(rows, 0)
        documents, kinds, blank = by_json(data)
        assert [[each] for each in documents_of(batches[0])] == documents
        assert [each.kind for each in batches[0].problems] == kinds
        assert batches[0].dropped["blank line"] == blank


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
LINES = st.dictionaries(
    st.sampled_from(["text", "title", "id", "x"]), VALUES | st.lists(st.text(max_size=9), max_size=3)
)


@given(st.lists(LINES, max_size=8), st.booleans(), st.sampled_from(["\n", "\r\n"]), st.integers(16, 200))
def test_what_json_writes_is_read_as_json_reads_it(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], ascii_only: bool, end: str, batch: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    path.write_bytes(
        "".join(json.dumps(each, ensure_ascii=ascii_only) + end for each in lines).encode(errors="surrogatepass")
    )
    found = read_file(path, ["text", "title"], id_key="id", batch_bytes=batch)
    documents, kinds, _ = by_json(path.read_bytes(), ["text", "title"])
    assert found.documents == documents
    assert [each.kind for each in found.problems] == kinds


def test_memory_is_the_batch_whatever_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "%s"}\n' % (b"x" * 1000) * 32_000)

    (piece,) = plan_slices(find_inputs(str(path)), 1 << 40)
    tracemalloc.start()
    assert sum(batches[0].num_documents for batches in read_slice(piece, batch_bytes=1 << 20)) == 32_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A batch has its lines, its texts, and room for far more bounds, which is hardly ever touched.
    assert peak < 12 << 20


@pytest.mark.parametrize("keys", [[], ["text", "text"], ["id"]])
def test_keys_that_make_no_sense_are_refused(keys: list[str]) -> None:
    piece = Slice("a.jsonl", "jsonl", {"size": 0}, 0, 0, 0, 0, 0)
    with pytest.raises(ConfigError):
        read_all([piece], keys, id_key="id")
