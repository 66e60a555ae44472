"""One rule of restart for all jobs: whose job.json it is, which parts are made, who finishes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from binidx.errors import BinidxError, FormatError, ObjectChangedError, ObjectExistsError
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Shard, Workers, make_parts
from binidx.jobs.progress import SilentWatcher, Unit
from binidx.jobs.stages import JobStage, finish_once, run_stages
from binidx.jobs.task_queue import ATTEMPTS
from binidx.run.run_parts import RangePart
from binidx.storage.effects import AtOnce, Steps, run
from binidx.storage.location import Location

PARTS = [RangePart(name, range(size)) for name, size in (("a", 3), ("b", 4), ("c", 5))]


def folder_of(path: Path, seed: int = 1, *, replaceable: bool = False) -> JobFolder:
    return JobFolder(Location.of(path / "job"), {"job": "x", "seed": seed}, replaceable=replaceable)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "job").iterdir())


def taken() -> None:
    raise ObjectExistsError("taken")


def test_a_job_begins_once_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ObjectExistsError, match=r"^taken$"):
        folder_of(tmp_path).claim(check_free=taken)
    assert not (tmp_path / "job").exists()
    for _ in range(2):  # the second call finds its own job, whose target may exist in part
        folder_of(tmp_path).claim(check_free=taken if (tmp_path / "job").exists() else lambda: None)
    assert names(tmp_path) == ["job.json"]
    assert folder_of(tmp_path).is_claimed()


def test_another_job_without_parts_is_an_error_or_replaced(tmp_path: Path) -> None:
    folder_of(tmp_path, 1).claim()
    for overwrite in (None, False):
        with pytest.raises(ObjectExistsError, match=r"job.json: parts of another job, which differs in seed; finish"):
            folder_of(tmp_path, 2).claim(overwrite=overwrite)
    with pytest.raises(ObjectExistsError, match=r"job.json: parts of another job, of another command; finish"):
        JobFolder(folder_of(tmp_path).location, {"binidx_other": 1}).claim()
    folder_of(tmp_path, 2, replaceable=True).claim()
    assert folder_of(tmp_path, 2).is_claimed()


def test_parts_of_another_job_are_an_error_and_removed_by_overwriting_but_for_those_of_this_job(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path, 1), folder_of(tmp_path, 2)
    first.claim()
    for part in PARTS[:2]:
        first.write(part, {"n": 1})
    with pytest.raises(ObjectExistsError, match=r"which differs in seed; finish that job, or remove the folder$"):
        second.claim()
    with pytest.raises(ObjectExistsError, match="which differs in seed; finish that job, or give --overwrite, which"):
        second.claim(overwrite=False)
    assert first.is_claimed()
    assert names(tmp_path) == ["a.json", "b.json", "job.json"]
    second.claim(overwrite=True, parts=PARTS[1:])
    assert second.is_claimed()
    assert names(tmp_path) == ["b.json", "job.json"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "of an unknown form .no JSON"),
        (b"[]", "of an unknown form ."),
        (b"[" * 9999, "nested too deep"),
        (b'{"job": "x", "seed": 1, "new": 2}', "which differs in new;"),
    ],
)
def test_a_damaged_or_newer_job_file_is_that_of_another_job(data: bytes, problem: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.claim()
    folder.write(PARTS[0], {})
    Path(folder.job_file.uri).write_bytes(data)
    with pytest.raises(ObjectExistsError, match=problem):
        folder.claim()


def killed(steps: Steps[Any], number: int) -> Steps[Any]:
    """Carry out the first effects of a shell, each of several at once as one of its own, and then interrupt it."""
    value: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            effect = steps.send(value)
            value = []
            for single in effect.effects if isinstance(effect, AtOnce) else [effect]:
                if not number:
                    raise KeyboardInterrupt
                number -= 1
                value.append((yield single))
            value = value if isinstance(effect, AtOnce) else value[0]


def test_an_overwriting_claim_that_is_killed_anywhere_leaves_no_record_without_its_object(tmp_path: Path) -> None:
    class Folder(JobFolder):
        def files(self, part: RangePart) -> list[Location]:
            return [self.file(part), self.location / f"{part.name}.bin"]

    first, second = (Folder(Location.of(tmp_path / "job"), {"seed": seed}) for seed in (1, 2))
    for num_effects in range(10):  # read, list, six deletes, write
        assert not second.is_claimed()
        first.claim(overwrite=True)
        for part in PARTS:
            (tmp_path / "job" / f"{part.name}.bin").write_bytes(b"tokens")
            first.write(part, {})
        with contextlib.suppress(KeyboardInterrupt):
            run(killed(second.claim_steps(overwrite=True), num_effects))
        for part in PARTS:
            record, tokens = (Path(file.uri) for file in first.files(part))
            assert tokens.exists() or not record.exists()
    assert second.is_claimed()


def test_parts_that_came_after_their_removal_are_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert not folder.holds_parts()
    folder.claim()
    assert folder.holds_parts()
    assert not folder_of(tmp_path, 2).holds_parts()
    folder.remove(PARTS)
    assert not folder.holds_parts()
    folder.write(PARTS[0], {"n": 1})  # by a worker of another call, which was late
    assert folder.holds_parts()
    assert not folder.is_claimed()
    folder.remove(PARTS)
    assert not (tmp_path / "job").exists()


class Phases(SilentWatcher):
    """Keeps the begun phases, and all units."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.advanced = 0

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        self.begun.append((what, total, done, unit))

    def advance(self, count: int) -> None:
        self.advanced += count


def test_a_stage_goes_on_with_its_records_and_counts_them_as_done(tmp_path: Path) -> None:
    made: list[str] = []

    def make(part: RangePart) -> dict[str, Any]:
        made.append(part.name)
        return {"size": part.size}

    stages = [JobStage("count", make, lambda _: [*PARTS, PARTS[0]], "rows")]  # one part is named twice
    first, again, empty = Phases(), Phases(), Phases()
    (results,), missing = run_stages(stages, folder_of(tmp_path), Workers(count=1, shard=Shard(0, 2)), first)
    assert (made, missing, results.num_made) == (["a", "c"], 1, 2)
    assert (first.begun, first.advanced) == ([("count", 8, 0, "rows")], 8)
    (results,), missing = run_stages(stages, folder_of(tmp_path), Workers(count=1), again)
    assert (made[2:], missing, results.num_made) == (["b"], 0, 1)
    assert results == {part.name: {"size": part.size} for part in PARTS}
    assert (again.begun, again.advanced) == ([("count", 12, 8, "rows")], 4)
    run_stages(stages, folder_of(tmp_path), Workers(count=1), empty)
    assert (made[3:], empty.begun, empty.advanced) == ([], [], 0)
    folder_of(tmp_path).remove(PARTS)
    assert not (tmp_path / "job").exists()


def test_a_record_of_another_version_names_the_remedy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.claim()
    Path(folder.file(PARTS[0]).uri).write_text(json.dumps({"binidx_record": 2, "result": {}}))
    with pytest.raises(FormatError, match=r"a.json: .*expected 1 .found 2.; delete it and give the same command again"):
        make_parts(lambda part: {}, PARTS, Workers(count=1), folder)


@pytest.mark.parametrize("error", [ObjectChangedError("changed"), FormatError("bad")])
def test_a_job_is_finished_by_one_call_and_again_only_if_a_part_changed(error: BinidxError) -> None:
    calls: list[int] = []

    def finish(failures: int) -> None:
        calls.append(failures)
        if len(calls) <= failures:
            raise error

    assert finish_once(lambda: finish(0), lambda: False)
    calls.clear()
    assert not finish_once(lambda: finish(1), lambda: True)
    calls.clear()
    with pytest.raises(type(error)):
        finish_once(lambda: finish(99), lambda: False)
    assert len(calls) == (ATTEMPTS if isinstance(error, ObjectChangedError) else 1)
    calls.clear()
    if isinstance(error, ObjectChangedError):
        assert finish_once(lambda: finish(2), lambda: False)
