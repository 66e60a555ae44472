"""csv, txt, WARC and Arrow: which rows are documents, which are problems, and that every byte is accounted for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.text_oracle import Read, read_all
from helpers.zstd_segments import compressed

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.prepare.text.batch import Filters
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import Extent, check_extents, plan_slices

CSV = b"\r\n".join(
    [
        b"\xef\xbb\xbftext,lang",
        b"one,en",
        b'"two, ""quoted""!",de',
        b'"three\nlines\nhere",en',
        b"",
        b"four",
        b'"never \xff",en',
        b'"bad "quote",en',
        b"last,en",
    ]
)


def read_whole(path: Path, keys: tuple[str, ...] = ("text",), format: str | None = None, **options: Any) -> Read:
    """Read a file, in the parts that `part_bytes` makes, and check that they cover it."""
    slices = plan_slices(find_inputs(str(path), format=format), options.pop("part_bytes", 1 << 40))
    found, extents = Read(), [(piece, Extent()) for piece in slices]
    for piece, extent in extents:
        for batches in read_slice(piece, list(keys), extent=extent, **options):
            found.add(batches)
    check_extents(extents)
    return found


@pytest.mark.parametrize("batch_bytes", [1, 20, 1 << 20])
@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_rows_of_csv_are_documents_or_problems(tmp_path: Path, end: str, batch_bytes: int) -> None:
    path = tmp_path / f"a.csv{end}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": compressed}[end](CSV))
    found = read_whole(path, batch_bytes=batch_bytes, id_key="lang")
    assert found.texts == [["one"], ['two, "quoted"!'], ["three\nlines\nhere"], ["last"]]
    assert (found.ids, found.rows) == (["en", "de", "en", "en"], [0, 1, 2, 7])
    assert found.dropped == {"blank line": 1}
    assert [(problem.kind, problem.row, problem.line) for problem in found.problems] == [
        ("malformed", 4, b"four\r\n"),
        ("not utf-8", 5, b'"never \xff",en\r\n'),
        ("malformed", 6, b'"bad "quote",en\r\n'),
    ]
    for problem in found.problems:
        assert CSV[problem.byte :].startswith(problem.line)
    assert str(found.problems[0]).endswith(
        f"a.csv{end}: row 4, byte {CSV.index(b'four')}: malformed: 1 fields, the first row has 2"
    )


def test_a_csv_without_the_column_or_with_it_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("body,n,n\nx,1,2\n")
    with pytest.raises(FormatError, match=r"a.csv: no column 'text' .found 'body', 'n', 'n'.; --json-keys names"):
        read_whole(path)
    (tmp_path / "b.csv").write_text("id;text\n1;x\n")
    with pytest.raises(FormatError, match=r"no column 'text' .found 'id;text'.; a .csv has commas between"):
        read_whole(tmp_path / "b.csv")
    with pytest.raises(FormatError, match=r"2 columns 'n'"):
        read_whole(path, ("n",))


def test_a_row_beyond_the_limit_and_a_quote_that_is_never_closed_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text\nfirst\n{"x" * 300}\n"{"y" * 90}\n{"y" * 90}"\nsecond\n"never closed\nthird\n')
    found = read_whole(path, max_line_bytes=100)
    assert found.texts == [["first"], ["second"]]
    kinds = [problem.kind for problem in found.problems]
    # The end of the field that is too long begins a row of its own.
    assert kinds[:2] == ["too long", "too long"]
    assert kinds[-1] == "malformed"
    path.write_text("text\n" + "z" * 200_000 + "\n")  # beyond the limit of Python's csv
    assert read_whole(path).texts == [["z" * 200_000]]


@pytest.mark.parametrize("part_bytes", [1, 7, 1 << 40])
def test_a_txt_has_a_document_a_line(tmp_path: Path, part_bytes: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n two \n\n\xff\nlast {")
    found = read_whole(path, format="txt", part_bytes=part_bytes)
    assert found.texts == [["one"], [" two "], ["last {"]]
    assert found.dropped == {"blank line": 1}
    assert [(problem.kind, problem.line) for problem in found.problems] == [("not utf-8", b"\xff")]


def test_a_txt_can_be_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"not \xff")
    (tmp_path / "d.txt").write_bytes(b"d" * 101)
    found = read_whole(tmp_path, format="txt-file", max_line_bytes=100)
    assert found.texts == [["one\r\n\ntwo\n"]]
    assert [(Path(problem.uri).name, problem.kind) for problem in found.problems] == [
        ("c.txt", "not utf-8"),
        ("d.txt", "too long"),
    ]


def test_a_txt_is_not_read_without_a_word_on_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"a\.txt: .*--format txt for a document a line, --format txt-file"):
        find_inputs(str(path))
    (tmp_path / "about.csv").write_text("a,b\n")
    with pytest.raises(ObjectNotFoundError, match=r"has no input .objects found: 2.*--format"):
        find_inputs(str(tmp_path))
    (tmp_path / "en.jsonl").write_text('{"text": "a"}\n')
    assert [Path(file.uri).name for file in find_inputs(str(tmp_path))] == ["en.jsonl"]
    with pytest.raises(FormatError, match=r"no column 'body' .found 'text'"):
        read_whole(path, ("body",), format="txt")


def record(kind: str, body: bytes, *more: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in ["WARC/1.0", f"WARC-Type: {kind}", *more, f"Content-Length: {len(body)}"])
    return head.encode() + b"\r\n" + body + b"\r\n\r\n"


WET = [
    record("warcinfo", b"Software-Info: x\r\n"),
    record("conversion", "Grüße\n\n".encode(), "WARC-Record-ID: <urn:1>", "WARC-Identified-Content-Language: deu"),
    record("conversion", b"", "WARC-Record-ID: <urn:2>", "WARC-Identified-Content-Language: eng"),
    record("conversion", b"bad \xff", "WARC-Record-ID: <urn:3>"),
    record("response", b"HTTP/1.1 200 OK\r\n\r\n<html>"),
    record("conversion", b"WARC/1.0\r\nlast", "WARC-Target-URI: http://a/", "WARC-Record-ID: <urn:4>"),
]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_conversion_records_of_warc_are_documents(tmp_path: Path, end: str, batch_bytes: int) -> None:
    path = tmp_path / f"CC-MAIN.warc.wet{end}"
    path.write_bytes(b"".join(map(gzip.compress if end else bytes, WET)))
    found = read_whole(path, id_key="WARC-Record-ID", batch_bytes=batch_bytes)
    assert found.texts == [["Grüße\n\n"], [""], ["WARC/1.0\r\nlast"]]
    assert (found.ids, found.rows) == (["<urn:1>", "<urn:2>", "<urn:4>"], [1, 2, 5])
    assert found.dropped == {"warc warcinfo": 1}
    assert [(problem.kind, problem.row) for problem in found.problems] == [("not utf-8", 3), ("not extracted", 4)]
    assert "extract its text first" in str(found.problems[1])
    german = Filters(keep={"WARC-Identified-Content-Language": ["deu"]})
    assert read_whole(path, filters=german).texts == [["Grüße\n\n"]]


def test_a_damaged_warc_is_an_error_that_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a.wet"
    for data, problem in (
        (WET[0] + WET[1][:-20], "row 1, byte .*: ends in the middle of a record"),
        (WET[0] + WET[1][:30], "row 1, byte .*: ends in the middle of a record"),
        (WET[1].replace(b"Length: ", b"Length: 1"), "row 0, byte 0: "),
        (WET[1].replace(b"Length: 9", b"Length: 8"), "no blank lines after its 8 bytes"),
        (WET[1].replace(b"Content-Length", b"Size"), "no Content-Length"),
        (WET[0] + b"\r\n" + WET[1], "not a record of WARC"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=problem):
            read_whole(path)
    path.write_bytes(WET[1] + record("conversion", b"x" * 200) + WET[5])
    found = read_whole(path, max_line_bytes=100)
    assert found.texts == [["Grüße\n\n"], ["WARC/1.0\r\nlast"]]
    assert [problem.kind for problem in found.problems] == ["too long"]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_folders_of_save_to_disk_are_read(tmp_path: Path, batch_bytes: int) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": number, "text": f"document {number}", "meta": {"lang": "en"}} for number in range(25)]
    made = datasets.DatasetDict({"train": datasets.Dataset.from_list([*rows, {**rows[0], "text": None}])})
    made.save_to_disk(tmp_path / "hub", num_shards={"train": 2})
    assert (tmp_path / "hub/train/state.json").exists()
    files = find_inputs(str(tmp_path / "hub"))
    assert {Path(file.uri).suffix for file in files} == {".arrow"}
    found = read_whole(tmp_path / "hub", id_key="id", batch_bytes=batch_bytes)
    assert found.texts == [[row["text"]] for row in rows]
    assert found.ids == [str(row["id"]) for row in rows]
    assert [(problem.kind, problem.row) for problem in found.problems] == [("null", 12)]
    assert read_whole(tmp_path / "hub", ("meta.lang",)).texts == [["en"]] * 26


def test_a_stream_of_arrow_without_its_end_and_damage_are_errors(tmp_path: Path) -> None:
    path, table = tmp_path / "a.arrow", pa.table({"text": ["a" * 50] * 9, "n": [1] * 9})
    for kind in (pa.ipc.new_stream, pa.ipc.new_file):
        with kind(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        assert len(read_whole(path).texts) == 9
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        with pytest.raises(FormatError, match=r"a.arrow: not an Arrow file, or truncated"):
            read_whole(path)
        path.write_bytes(whole[:300] + b"\xee" * 200 + whole[500:])
        with pytest.raises(FormatError, match=r"a.arrow: .*damaged"):
            read_whole(path)
        path.write_bytes(whole)
        with pytest.raises(FormatError, match=r"a.arrow: column 'n' is int64"):
            read_whole(path, ("n",))


def test_a_dotted_key_is_a_field_of_structs_unless_a_column_has_the_name(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    content = [{"text": "a", "deep": {"id": 7}}, None, {"text": None, "deep": None}, {"text": "d", "deep": {"id": 8}}]
    parquet.write_table(pa.table({"content": content, "n": range(4)}), path)
    found = read_whole(path, ("content.text",), id_key="content.deep.id")
    assert (found.texts, found.ids) == ([["a"], ["d"]], ["7", "8"])
    assert [(problem.kind, problem.row) for problem in found.problems] == [("null", 1), ("null", 2)]
    parquet.write_table(pa.table({"content": content, "content.text": ["w", "x", "y", "z"]}), path)
    assert read_whole(path, ("content.text",)).texts == [["w"], ["x"], ["y"], ["z"]]
    for key in ("content.body", "content.text.more", "body.text"):
        with pytest.raises(FormatError, match=rf"no column '{key}' .found 'content'"):
            read_whole(path, (key,))
    with pytest.raises(FormatError, match=r"column 'content' is struct.*; --json-keys content\.\w+ reads"):
        read_whole(path, ("content",))


def test_the_same_documents_are_the_same_in_every_format(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "a.csv").write_text("\n".join(["text", *texts]))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "a.wet").write_bytes(b"".join(record("conversion", text.encode()) for text in texts))
    for name, format in (("a.jsonl", None), ("a.csv", None), ("a.txt", "txt"), ("a.wet", None)):
        slices = plan_slices(find_inputs(str(tmp_path / name), format=format), 100)
        assert read_all(slices).texts == [[text] for text in texts]
