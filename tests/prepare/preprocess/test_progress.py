"""preprocess on more than one machine: what each did, and how far all of it is, from records alone."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.preprocess_jobs import EOD, corpus, files_of, job_of, run, theirs, tokenizer_path

from binidx.errors import ObjectExistsError
from binidx.format.sidecars.dataset_manifest import RowCounts
from binidx.jobs.parts import Shard
from binidx.jobs.progress import SilentWatcher, Unit
from binidx.prepare.preprocess.job import plan_parts
from binidx.prepare.preprocess.job_files import (
    RECENT_PARTS,
    RECORD_FILE,
    JobFiles,
    Record,
    TokenCounts,
    busy_seconds,
    count_machines,
    recent_speed,
)
from binidx.prepare.preprocess.preprocess import build_status, job_status
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import Extent
from binidx.storage.writing.publish import create_object
from binidx.tools import main

HERE = socket.gethostname()


class Counted(SilentWatcher):
    """Bytes of the text that were done at the start, of how many; then those of each finished part."""

    def __init__(self) -> None:
        self.begun = (0, 0)
        self.advanced: list[int] = []

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        if what == "tokenize":
            self.begun = (done, total)

    def advance(self, count: int) -> None:
        self.advanced.append(count)


def parts_of(job: Any) -> Any:
    return plan_parts(job, find_inputs(job.inputs))


def moved_to(host: str, job: Any) -> dict[str, Record]:
    """All records that are there, as if another machine had written them."""
    parts, places = parts_of(job), JobFiles(job)
    moved = {name: replace(record, host=host) for name, record in places.read_all(parts).items()}
    for part in parts:
        if part.name in moved:
            with create_object(places.file(part)) as out:
                out.write(RECORD_FILE.encode(moved[part.name]))
    return moved


def record(name: str, ended: float, seconds: float, host: str = "a") -> Record:
    counts = [RowCounts(num_rows=3, num_documents=3)]
    return Record(
        name, "hf", 0, counts, [Extent()], {"text": TokenCounts(3, 7, "")}, 0, seconds, seconds, "raise", host, ended
    )


def test_each_machine_is_told_with_its_own_parts_documents_and_tokens(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")
    first = run(job, shard=Shard(0, 3))
    assert [(name, each.parts) for name, each in first.machines.items()] == [(HERE, first.parts_made)]
    records = moved_to("far", job)
    run(job, shard=Shard(1, 3))
    last = run(job, shard=Shard(2, 3))
    assert last.finished
    assert set(last.machines) == {"far", HERE}
    far, here = last.machines["far"], last.machines[HERE]
    assert (far.parts, here.parts) == (first.parts_made, last.parts - first.parts_made)
    assert far.documents == sum(each.counts.num_documents for each in records.values())
    assert far.tokens == sum(each.num_tokens for each in records.values())
    assert far.documents + here.documents == 400
    assert far.tokens + here.tokens == last.manifests["text"]["dataset"]["tokens"]
    assert far.stored_bytes + here.stored_bytes == sum(Path(each).stat().st_size for each in inputs)
    assert far.bytes_per_second
    assert here.bytes_per_second
    assert run(job).machines == last.machines  # by the manifest: the records are gone
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_progress_counts_the_bytes_of_this_shards_parts_and_those_that_were_done_before(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in"), tmp_path / "en")
    parts = parts_of(job)
    sizes = [part.size for part in parts[::2]]
    first, again = Counted(), Counted()
    run(job, shard=Shard(0, 2), watch=first)
    assert first.begun == (0, sum(sizes))
    assert sorted(first.advanced) == sorted(sizes)
    Path(JobFiles(job).file(parts[0]).uri).unlink()
    run(job, shard=Shard(0, 2), watch=again)
    assert again.begun == (sum(sizes[1:]), sum(sizes))
    assert again.advanced == sizes[:1]


def test_records_and_manifests_without_a_host_are_read(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")
    made = run(job, shard=Shard(0, 2)).parts_made
    for part in parts_of(job)[::2]:
        path = Path(JobFiles(job).file(part).uri)
        values = json.loads(path.read_bytes())
        path.write_text(json.dumps({name: each for name, each in values.items() if name not in ("host", "ended")}))
    status = job_status(job)
    assert (status.parts_done, status.bytes_per_second, status.seconds_left) == (made, None, None)
    assert status.machines[""].parts == made
    done = run(job)
    assert {name: each.parts for name, each in done.machines.items()} == {"": made, HERE: done.parts - made}
    manifest = tmp_path / "en_text_document.manifest.json"
    manifest.write_text(
        json.dumps({name: each for name, each in json.loads(manifest.read_bytes()).items() if name != "machines"})
    )
    assert (run(job).finished, run(job).machines, job_status(job).machines) == (True, {}, {})


def test_who_made_a_part_and_when_decides_nothing(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    one, two = job_of(inputs, tmp_path / "one"), job_of(inputs, tmp_path / "two")
    run(one, shard=Shard(0, 2))
    moved_to("far", one)
    told = [run(job).manifests["text"] for job in (one, two)]
    assert told[0]["plan"] == told[1]["plan"]
    assert files_of(tmp_path / "one_text_document") == files_of(tmp_path / "two_text_document")


def test_the_pace_is_that_of_the_last_parts_and_a_night_between_two_runs_does_not_count() -> None:
    assert busy_seconds([(0, 2), (1, 3), (1, 2), (100, 101)]) == 4
    assert busy_seconds([]) == 0
    slow = [record(f"s{number}", 10.0 * number + 10, 10) for number in range(50)]
    fast = [record(f"f{number}", 1e6 + number + 1, 1) for number in range(RECENT_PARTS)]
    sizes = {each.name: 1000 for each in [*slow, *fast]}
    assert recent_speed(sizes, slow) == 100
    assert recent_speed(sizes, [*fast, *slow]) == 1000
    assert recent_speed(sizes, [fast[0], slow[0]]) == pytest.approx(2000 / 11)
    assert recent_speed(sizes, []) is None


def test_time_left_is_by_that_pace_and_the_last_part_says_whether_it_still_runs(tmp_path: Path) -> None:
    job = job_of(corpus(tmp_path / "in"), tmp_path / "en")
    parts = parts_of(job)
    records = {parts[0].name: record(parts[0].name, 1000, 2, "a"), parts[1].name: record(parts[1].name, 1002, 2, "b")}
    status = build_status(job, parts, records, {}, now=1010)
    done = parts[0].size + parts[1].size
    assert status.bytes_per_second == done / 4
    assert status.seconds_left == (sum(part.size for part in parts) - done) / (done / 4)
    assert status.last_part_seconds == 8
    assert [(name, each.parts, each.tokens) for name, each in status.machines.items()] == [("a", 1, 7), ("b", 1, 7)]
    assert status.machines == count_machines(parts, records)


def test_status_looks_at_a_job_from_elsewhere_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    inputs = corpus(tmp_path / "in")
    call = ["preprocess", *inputs, "--to", f"{tmp_path}/en", "--tokenizer", tokenizer_path(), "--eod", EOD]
    call += ["--append-eod", "--part-bytes", "5000"]
    job = job_of(inputs, tmp_path / "en")
    assert main([*call, "--status"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{tmp_path}/en: 0 of {len(parts_of(job))} parts, 0% of the text\n", "")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    made = run(job, shard=Shard(0, 3)).parts_made
    moved_to("far", job)
    run(job, shard=Shard(1, 3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([*call, "--status"]) == 0
    lines, err = capsys.readouterr()
    first, head, *rows = lines.splitlines()
    assert err == ""
    assert f" of {len(parts_of(job))} parts, " in first
    assert " left at that pace; the last part " in first
    assert head.split() == ["machine", "parts", "documents", "tokens", "MB/s"]
    assert {row.split()[0]: int(row.split()[1]) for row in rows}["far"] == made
    assert main([*call, "--status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finished"], set(told["machines"])) == (False, {"far", HERE})
    assert told["machines"]["far"] == asdict(job_status(job).machines["far"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    done = run(job)
    assert main([*call, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/en: finished, {done.parts} parts"
    assert len(lines) == 4
    assert main([*call, "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == lines[1:]


def test_status_of_another_job_is_an_error_that_says_the_difference(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    run(job_of(inputs, tmp_path / "en"), shard=Shard(0, 2))
    with pytest.raises(ObjectExistsError, match="which differs in append_eod; give the options of that job"):
        job_status(job_of(inputs, tmp_path / "en", append_eod=False))


def test_a_record_tells_its_machine_and_when_it_ended(tmp_path: Path) -> None:
    job, began = job_of(corpus(tmp_path / "in"), tmp_path / "en"), time.time()
    run(job, shard=Shard(0, 2))
    for each in JobFiles(job).read_all(parts_of(job)).values():
        assert each.host == HERE
        assert began <= each.ended <= time.time()
