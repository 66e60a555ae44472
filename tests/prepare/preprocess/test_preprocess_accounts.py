"""preprocess: rows in = documents out + rows dropped for a reason, whatever the rows are."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from helpers.preprocess_jobs import (
    EOD,
    corpus,
    files_of,
    job_of,
    make_recorded,
    run,
    texts,
    theirs,
    tokenizer_path,
    write_lines,
)

from binidx import describe_tokenizer
from binidx.errors import FormatError, StorageError
from binidx.format.sidecars.dataset_manifest import RowCounts
from binidx.prepare.preprocess.job import plan_parts
from binidx.prepare.preprocess.job_files import RECORD_FILE, JobFiles
from binidx.prepare.preprocess.part_writer import format_problem, merge_quarantine
from binidx.prepare.preprocess.preprocess import preprocess
from binidx.prepare.preprocess.tokenize_part import make_part
from binidx.prepare.text.batch import Filters, Problem
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.tokenizers.checked_engine import FIRST_OF_WORKER
from binidx.storage.location import Location

GOOD = [{"text": text} for text in texts(12, seed=5)]
BAD: dict[str, Any] = {
    "malformed": '{"text": "x"',
    "not an object": '["text"]',
    "missing key": {"txet": "x"},
    "null": {"text": None},
    "not text": {"text": 3},
    "lone surrogate": '{"text": "\\ud800"}',
    "not utf-8": b'{"text": "\xff"}',
}


def totals(report: Any) -> dict[str, Any]:
    found: dict[str, Any] = report.manifests["text"]["counts"]
    return found


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_at_every_position_is_left_out_and_written_down(kind: str, tmp_path: Path) -> None:
    few = GOOD[:5]
    needed = theirs([write_lines(tmp_path / "good.jsonl", few)], tmp_path / "theirs")
    for position in range(len(few) + 1):
        folder = tmp_path / str(position)
        folder.mkdir()
        rows = [*few[:position], BAD[kind], *few[position:]]
        inputs = [write_lines(folder / "in.jsonl", rows)]
        report = run(job_of(inputs, folder / "en", part_bytes=300, on_error="quarantine"))
        assert files_of(folder / "en_text_document") == needed
        assert totals(report)["dropped"] == {kind: 1}
        assert totals(report)["num_rows"] == len(rows)
        (told,) = map(json.loads, (folder / "en.quarantine.jsonl").read_text().splitlines())
        lines = Path(inputs[0]).read_bytes().split(b"\n")
        assert told["raw"].encode("utf-8", "surrogateescape") == lines[position]
        assert (told["file"], told["line"], told["reason"]) == (inputs[0], position + 1, kind)
        assert told["byte"] == sum(len(line) + 1 for line in lines[:position])


def test_a_workers_memory_does_not_grow_with_the_rows_that_are_written_down(tmp_path: Path) -> None:
    """Fails where the writer does not flush, or keeps the problems: by 13 MB. hf has small batches."""

    def peak(count: int) -> int:
        row = json.dumps({"txet": "x" * 5000})
        inputs = [write_lines(tmp_path / f"{count}.jsonl", [row] * count)]
        job = job_of(inputs, tmp_path / str(count), on_error="quarantine", part_bytes=1 << 30, engine="hf")
        tracemalloc.start()
        report = run(job)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert totals(report)["dropped"] == {"missing key": count}
        assert len((tmp_path / f"{count}.quarantine.jsonl").read_bytes().splitlines()) == count
        return found

    peak(1)
    assert peak(4000) < peak(1000) + (2 << 20)


def test_twenty_megabytes_of_quarantine_are_put_together_in_six(tmp_path: Path) -> None:
    """Alone, as a worker's batches need more than all of it: they would hide whoever reads it whole."""
    problem = Problem("malformed", "in.jsonl", 0, 0, "byte 0", "no JSON", b"x" * 5000)
    uris = [f"{tmp_path}/{number}.jsonl" for number in range(2)]
    for uri in uris:
        Path(uri).write_bytes(format_problem(problem, 0) * 2000)
    tracemalloc.start()
    merge_quarantine([(Location.of(uri), [7]) for uri in uris], Location.of(f"{tmp_path}/all.jsonl"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines()
    assert (len(lines), json.loads(lines[-1])["line"]) == (4000, 8)
    assert peak < 6_000_000 < sum(map(len, lines)) / 3


def test_a_bad_line_stops_the_job_by_default_and_names_its_place(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "in.jsonl", [*GOOD, BAD["null"], *GOOD])]
    byte = len(b"".join(json.dumps(row).encode() + b"\n" for row in GOOD))
    with pytest.raises(FormatError, match=rf"in.jsonl: .*byte {byte}: null: .*--on-error skip or quarantine"):
        run(job_of(inputs, tmp_path / "en"))
    assert not list(tmp_path.glob("en_text*"))


def test_many_bad_lines_of_all_kinds_add_up(tmp_path: Path) -> None:
    rows = [row for pair in zip(GOOD, [*BAD.values(), "", "", "", "", ""], strict=True) for row in pair]
    inputs = [write_lines(tmp_path / f"{number}.jsonl", rows) for number in range(3)]
    good = write_lines(tmp_path / "good.jsonl", GOOD * 3)
    report = run(job_of(inputs, tmp_path / "en", part_bytes=400, on_error="skip"))
    assert files_of(tmp_path / "en_text_document") == theirs([good], tmp_path / "theirs")
    assert totals(report)["dropped"] == {**dict.fromkeys(BAD, 3), "blank line": 15}
    for source, name in zip(report.manifests["text"]["sources"], inputs, strict=True):
        assert source["uri"] == name
        assert source["counts"]["num_rows"] == len(rows)
        assert source["counts"]["dropped"] == {**dict.fromkeys(BAD, 1), "blank line": 5}
    assert not (tmp_path / "en.quarantine.jsonl").exists()


def test_filters_count_what_they_drop_once_each(tmp_path: Path) -> None:
    rows = [{"text": " sea" * count, "lang": "en" if count % 5 else "fr", "title": "the"} for count in range(40)]
    inputs = [write_lines(tmp_path / "in.jsonl", rows)]
    options: dict[str, Any] = {"filters": Filters(8, 140, {"lang": ["en"]}), "min_tokens": 5, "max_tokens": 31}
    report = run(job_of(inputs, tmp_path / "en", keys=("text", "title"), part_bytes=500, id_key="lang", **options))
    length = {row["text"]: len(rows_ids(row["text"])) + len(rows_ids("the")) for row in rows}
    kept = [
        row for row in rows if row["lang"] == "en" and 8 <= len(row["text"]) <= 140 and 5 <= length[row["text"]] <= 31
    ]
    good = write_lines(tmp_path / "good.jsonl", kept)
    for key in ("text", "title"):
        assert files_of(tmp_path / f"en_{key}_document") == theirs([good], tmp_path / f"theirs_{key}", key)
    counts = totals(report)
    assert counts["num_documents"] == len(kept) > 10
    assert counts["num_rows"] == 40 == len(kept) + sum(counts["dropped"].values())
    assert set(counts["dropped"]) == {"keep lang", "min characters", "max characters", "min tokens", "max tokens"}


def rows_ids(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(tokenizer_path()).encode(text).ids
    return ids


def test_special_tokens_inside_text_are_ids_or_characters_or_problems(tmp_path: Path) -> None:
    rows = [{"text": "the sea"}, {"text": f"the {EOD} sea"}, {"text": [EOD, "the"]}, {"text": "tokens"}]
    inputs = [write_lines(tmp_path / "in.jsonl", rows)]
    spec = describe_tokenizer(tokenizer_path(), eod=EOD)
    run(job_of(inputs, tmp_path / "parse", tokenizer=spec))
    assert files_of(tmp_path / "parse_text_document") == theirs(inputs, tmp_path / "theirs")
    run(job_of(inputs, tmp_path / "text", tokenizer=replace(spec, specials="text")))
    assert len(files_of(tmp_path / "text_text_document")[0]) > len(files_of(tmp_path / "parse_text_document")[0])
    job = job_of(inputs, tmp_path / "error", tokenizer=replace(spec, specials="error"), on_error="quarantine")
    report = run(job)
    assert totals(report)["dropped"] == {"special token": 2}
    good = write_lines(tmp_path / "good.jsonl", [rows[0], rows[3]])
    assert files_of(tmp_path / "error_text_document") == theirs([good], tmp_path / "good")
    told = [json.loads(line) for line in (tmp_path / "error.quarantine.jsonl").read_text().splitlines()]
    assert [each["line"] for each in told] == [2, 3]
    with pytest.raises(FormatError, match="byte 20: special token: 1 of them in its text"):
        run(job_of(inputs, tmp_path / "raise", tokenizer=replace(spec, specials="error")))


def test_counts_that_do_not_add_up_are_an_error_and_no_dataset(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", files=1)
    job = job_of(inputs, tmp_path / "en", part_bytes=3000)
    parts = plan_parts(job, find_inputs(job.inputs))
    record = make_recorded(job, parts[0])
    lost = replace(record, slices=[replace(record.slices[0], num_rows=record.slices[0].num_rows + 1)])
    (tmp_path / "en-parts" / f"{parts[0].name}.json").write_bytes(RECORD_FILE.encode(lost))
    with pytest.raises(FormatError, match=r"part 0 .*: \d+ rows read, needed \d+: \d+ documents; dropped: none"):
        run(job)
    fewer = replace(record, slices=[replace(record.slices[0], num_rows=1, num_documents=1)])
    (tmp_path / "en-parts" / f"{parts[0].name}.json").write_bytes(RECORD_FILE.encode(fewer))
    with pytest.raises(FormatError, match=r"contradicts its record .found .* documents, sequences and tokens, need"):
        run(job)
    (tmp_path / "en-parts" / f"{parts[0].name}.json").write_text("{}")
    with pytest.raises(
        FormatError,
        match=r"json: \$.binidx_part: expected 2 \(found None\); finish with .*delete it and give the same",
    ):
        run(job)
    assert not list(tmp_path.glob("en_text*"))
    (tmp_path / "en-parts" / f"{parts[0].name}.json").unlink()
    run(job)
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in"), tmp_path / "en", part_bytes=1 << 20)
    (part,) = plan_parts(job, find_inputs(job.inputs))
    record = make_recorded(job, part)
    assert RECORD_FILE.decode(RECORD_FILE.encode(record), "x") == record == JobFiles(job).read(part)
    assert make_recorded(job, part) == record  # what is there is not made again
    assert record.counts == sum(record.slices, RowCounts())
    assert [each.num_rows for each in record.slices] == [200, 200]


def test_a_record_of_other_slices_is_an_error(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in"), tmp_path / "en", part_bytes=1 << 20)
    (part,) = plan_parts(job, find_inputs(job.inputs))
    record, places = make_recorded(job, part), JobFiles(job)
    for changes in ({"slices": record.slices[:1]}, {"extents": []}, {"datasets": {}}):
        Path(places.file(part).uri).write_bytes(RECORD_FILE.encode(replace(record, **changes)))
        with pytest.raises(FormatError, match=r"json: not the record of .*; delete it and give the same command again"):
            places.read(part)


def test_a_wrong_engine_stops_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from binidx.errors import MismatchError
    from binidx.prepare.tokenizers.gigatoken_engine import Gigatoken

    honest = Gigatoken.encode

    def wrong(self: Any, texts: Any, offsets: Any) -> Any:
        ids, bounds = honest(self, texts, offsets)
        return ids ^ 1, bounds

    monkeypatch.setattr(Gigatoken, "encode", wrong)
    with pytest.raises(MismatchError, match="--tokenizer-engine hf is exact"):
        preprocess(job_of(corpus(tmp_path / "in"), tmp_path / "en", engine="gigatoken"), executor=Here())
    assert not list(tmp_path.glob("en_text*"))


class Here:
    """An executor that does it now."""

    def submit(self, work: Any, *arguments: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


def test_the_quarantine_of_an_older_job_does_not_stay(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "in.jsonl", [*GOOD, BAD["null"]])]
    run(job_of(inputs, tmp_path / "en", on_error="quarantine"))
    for each in tmp_path.glob("en_text*"):
        each.unlink()
    run(job_of([write_lines(tmp_path / "good.jsonl", GOOD)], tmp_path / "en", on_error="quarantine"))
    assert not (tmp_path / "en.quarantine.jsonl").exists()


def test_a_part_whose_second_dataset_cannot_be_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from binidx.prepare.preprocess import part_writer

    class Failing(part_writer.DatasetWriter):
        def __init__(self, places: JobFiles, part: Any, key: str) -> None:
            if key == "id":
                raise OSError("no room")
            super().__init__(places, part, key)

    monkeypatch.setattr(part_writer, "DatasetWriter", Failing)
    job = job_of(corpus(tmp_path / "in"), tmp_path / "en", keys=("text", "id"))
    with pytest.raises(OSError, match="no room") as raised:
        make_part(job, plan_parts(job, find_inputs(job.inputs))[0])
    assert raised.traceback  # it holds the frames, and so what was open
    assert not list((tmp_path / "en-parts").glob("*"))


def test_a_job_that_a_bad_row_stopped_keeps_its_parts_under_another_policy(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "in.jsonl", [*GOOD * 20, BAD["null"]])]
    with pytest.raises(FormatError, match="null"):
        run(job_of(inputs, tmp_path / "en", part_bytes=3000))
    made = len(list((tmp_path / "en-parts").glob("?" * 32 + ".json")))
    skipped = job_of(inputs, tmp_path / "en", part_bytes=3000, on_error="skip")
    parts = plan_parts(skipped, find_inputs(inputs))
    make_recorded(skipped, parts[-1])
    report = run(replace(skipped, on_error="quarantine"))
    assert report.parts_made == report.parts - made > 0 < made
    assert len((tmp_path / "en.quarantine.jsonl").read_text().splitlines()) == 1
    with pytest.raises(StorageError, match="--overwrite"):
        run(skipped)


def test_a_dataset_of_nothing_is_of_its_tokenizer_and_options(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    job = job_of([f"{tmp_path}/in.jsonl"], tmp_path / "en")
    assert run(job).finished
    assert run(job).parts_made == 0
    with pytest.raises(StorageError, match="--overwrite"):
        run(replace(job, append_eod=False))


def test_each_worker_has_its_first_texts_compared(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in", count=2000, files=1), tmp_path / "en", engine="gigatoken", compared_share=0.0)
    parts = plan_parts(job, find_inputs(job.inputs))[1:]
    with ThreadPoolExecutor(1) as fresh:
        compared = [record.compared for record in fresh.map(lambda part: make_part(job, part), parts)]
    assert sum(compared) == FIRST_OF_WORKER
    assert compared[-1] == 0


def test_texts_on_which_the_tokenizers_library_fails_obey_on_error(tmp_path: Path) -> None:
    words = {"ab": 0, "b": 1}  # without the unknown token: the library fails at any other word
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}))
    tokenizer = describe_tokenizer(str(file), eod=1)
    inputs = [write_lines(tmp_path / "in.jsonl", [{"text": text} for text in ("ab", "abc", "b", "x")])]
    with pytest.raises(FormatError, match=r"in.jsonl: byte 15: not tokenized: hf: .*--on-error"):
        run(job_of(inputs, tmp_path / "raised", tokenizer=tokenizer))
    report = run(job_of(inputs, tmp_path / "en", tokenizer=tokenizer, on_error="quarantine"))
    assert totals(report)["dropped"] == {"not tokenized": 2}
    assert totals(report)["num_documents"] == 2
    rows = map(json.loads, (tmp_path / "en.quarantine.jsonl").read_text().splitlines())
    assert [(row["line"], row["raw"]) for row in rows] == [(2, "abc"), (4, "x")]


def test_a_damaged_parquet_file_obeys_on_error(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        parquet.write_table(pa.table({"text": ["the sea"] * 5}), tmp_path / f"{name}.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-20] + b"PAR1")
    inputs = [f"{tmp_path}/{name}.parquet" for name in ("a", "b", "c")]
    with pytest.raises(FormatError, match=r"b.parquet: not a Parquet file, or damaged"):
        run(job_of(inputs, tmp_path / "en"))
    report = run(job_of(inputs, tmp_path / "en", on_error="quarantine"))
    assert totals(report)["dropped"] == {"damaged": 1}
    assert totals(report)["num_documents"] == 10
    [row] = map(json.loads, (tmp_path / "en.quarantine.jsonl").read_text().splitlines())
    assert (row["file"], row["reason"]) == (inputs[1], "damaged")
