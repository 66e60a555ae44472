"""preprocess: records prove that each input was read once, to its end; and an empty input is accounted for."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from conftest import Bucket
from helpers.preprocess_jobs import corpus, files_of, job_of, make_recorded, run, texts, theirs, write_lines

from binidx.errors import FormatError
from binidx.jobs.parts import Shard
from binidx.prepare.preprocess.job import plan_parts
from binidx.prepare.preprocess.job_files import RECORD_FILE, VERSION, JobFiles, Record
from binidx.prepare.preprocess.preprocess import preprocess
from binidx.prepare.text import read as reading
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.jsonl import select_lines
from binidx.prepare.text.slices import Extent


def all_formats(folder: Path) -> list[str]:
    """The same 60 rows in each format, the last one in row groups of 7."""
    rows = [{"text": text} for text in texts(60)]
    plain = write_lines(folder / "a.jsonl", rows)
    data = Path(plain).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(data))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "d.parquet", row_group_size=7)
    return [plain, *(f"{folder}/{name}" for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"))]


def test_a_manifest_says_how_much_of_each_input_was_read(tmp_path: Path) -> None:
    inputs = all_formats(tmp_path)
    size = Path(inputs[0]).stat().st_size
    report = run(job_of(inputs, tmp_path / "en", part_bytes=1000))
    assert [each["covered"] for each in report.manifests["text"]["sources"]] == [size, size, size, 60]


def test_a_record_that_tells_of_too_little_or_too_much_is_caught_and_named(tmp_path: Path) -> None:
    inputs = all_formats(tmp_path)
    job = job_of(inputs, tmp_path / "en", part_bytes=1000)
    parts = plan_parts(job, find_inputs(inputs))
    make_all_but_the_end(job)
    places, records = JobFiles(job), JobFiles(job).read_all(parts)
    pieces = [(part, number) for part in parts for number in range(len(part.slices))]
    caught = 0
    for part, number in pieces:
        record = records[part.name]
        for wrong in wrongly(record.extents[number]):
            extents = [*record.extents[:number], wrong, *record.extents[number + 1 :]]
            write(places.file(part).uri, replace(record, extents=extents))
            with pytest.raises(FormatError, match=r"need each once.; remove the parts and run again") as raised:
                run(job)
            assert part.slices[number].uri in str(raised.value)
            caught += 1
        write(places.file(part).uri, record)
    assert caught > 4 * len(parts) > 16
    assert not list(tmp_path.glob("en_text*"))
    run(job)
    assert (tmp_path / "en_text_document.idx").exists()


def make_all_but_the_end(job: Any) -> None:
    run(job, shard=Shard(0, 1_000_000))  # says whose parts these are
    for part in plan_parts(job, find_inputs(job.inputs)):
        make_recorded(job, part)


def wrongly(extent: Extent) -> list[Extent]:
    """A byte or row less or more, at either end."""
    found = [replace(extent, count=extent.count + 1), replace(extent, count=extent.count - 1)]
    found += [replace(extent, first=extent.first + 1)] if extent.count else []
    return found + ([] if extent.end is None else [replace(extent, end=extent.end + 1)])


def write(uri: str, record: Record) -> None:
    Path(uri).write_bytes(RECORD_FILE.encode(record))


def test_a_reader_that_loses_a_line_of_each_later_slice_makes_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(pieces: Any, first: int, last: int | None) -> Any:
        own = list(select_lines(pieces, first, last))
        held = b"".join(bytes(piece) for _, piece in own)
        lost = held.find(b"\n") + 1 if first else 0
        return iter([(own[0][0] + lost, held[lost:])] if own else [])

    job = job_of(corpus(tmp_path / "in"), tmp_path / "en")
    monkeypatch.setattr(reading, "select_lines", lossy)
    with pytest.raises(FormatError, match=r"0.jsonl: plain bytes \d+ to \d+ were read by no part"):
        run(job)
    assert not list(tmp_path.glob("en_text*"))


def test_a_record_of_another_version_is_named(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in", files=1), tmp_path / "en")
    (part, *_) = plan_parts(job, find_inputs(job.inputs))
    run(job, shard=Shard(0, 1_000_000))
    Path(JobFiles(job).file(part).uri).write_text('{"binidx_part": 1, "slices": []}')
    with pytest.raises(
        FormatError, match=rf"\$.binidx_part: expected {VERSION} \(found 1\); finish with the binidx that began"
    ):
        run(job)


EMPTY: dict[str, bytes] = {"jsonl": b"", "jsonl.gz": gzip.compress(b""), "jsonl.zst": zstandard.compress(b"")}


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_empty_inputs_are_sources_with_zero_counts(where: str, tmp_path: Path, s3: Bucket) -> None:
    base = s3.fresh() if where == "s3" else str(tmp_path / "in")
    fs, path = fsspec.url_to_fs(base)
    fs.makedirs(path, exist_ok=True)
    full = write_lines(tmp_path / "full.jsonl", [{"text": text} for text in texts(20)])
    contents = {f"a.{name}": data for name, data in EMPTY.items()} | {f"z.{name}": b"" for name in EMPTY}
    for name, data in contents.items():
        fs.pipe_file(f"{path}/{name}", data)
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    fs.put(str(tmp_path / "empty.parquet"), f"{path}/b.parquet")
    fs.put(full, f"{path}/m.jsonl")
    report = run(job_of([base], f"{base}-out/en"))
    assert files_of(f"{base}-out/en_text_document") == theirs([full], tmp_path / "theirs")
    sources = {each["uri"].rpartition("/")[2]: each for each in report.manifests["text"]["sources"]}
    assert sorted(sources) == sorted([*contents, "b.parquet", "m.jsonl"])
    for name, source in sources.items():
        assert source["counts"]["num_rows"] == (20 if name == "m.jsonl" else 0)
        assert (source["covered"] > 0) == (name == "m.jsonl")


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_nothing_but_empty_inputs_is_an_empty_dataset_in_a_store_too(s3: Bucket, tmp_path: Path, codec: str) -> None:
    base = s3.fresh()
    fs, path = fsspec.url_to_fs(base)
    for name in ("a", "b"):
        fs.pipe_file(f"{path}/in/{name}.jsonl", b"")
    report = run(job_of([f"{base}/in"], f"{base}/en", codec=codec))
    assert [each["counts"]["num_rows"] for each in report.manifests["text"]["sources"]] == [0, 0]
    empty = write_lines(tmp_path / "in.jsonl", [])
    suffix = {"raw": ".bin", "zstd": ".bin.zst"}[codec]
    assert files_of(f"{base}/en_text_document", suffix)[1] == theirs([empty], tmp_path / "theirs")[1]
    assert preprocess(job_of([f"{base}/in"], f"{base}/en", codec=codec)).parts_made == 0
