"""Weights that change and sets that end, against a model that follows the UMD fork draw by draw."""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packed.test_packed_order import model_worker

from binidx.errors import ConfigError
from binidx.packed import packed_order
from binidx.packed.packed_files import PackedDatasetBuilder
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet, WeightSchedule
from binidx.packed.packed_run import load_packed_run


def model_weight(schedule: WeightSchedule) -> Callable[[int], float]:
    kind, numbers = schedule.kind, schedule.numbers
    if kind == "step":
        return lambda step: numbers[0] * (numbers[2] ** (step // numbers[1]))
    if kind == "linear":
        return lambda step: numbers[0] + (numbers[1] - numbers[0]) * (min(step, numbers[2]) / numbers[2])
    if kind == "cosine":
        low, high, period = numbers[1], numbers[0], numbers[2]
        return lambda step: low + (high - low) * (1 + math.cos(math.pi * (step % period) / period)) / 2
    return lambda step: numbers[0]


def model_worker_mix(run: PackedRun, worker: int) -> Iterator[tuple[int, int, int]]:
    """(set, file, block): a tracker with weights, which the main process steps; a worker has a copy."""
    assert run.schedules is not None
    count = max(1, run.num_workers)
    one_pass = [PackedSet(s.num_files, s.num_blocks, s.n_chunks, s.seed, s.shuffle, AtEnd.stop) for s in run.sets]
    place = run.rank * count + worker, run.num_ranks * count
    streams = [model_worker(each, *place) for each in one_pass]
    rules = [model_weight(schedule) for schedule in run.schedules]
    most = [math.inf if each is None else each for each in run.max_epochs or [None] * len(streams)]
    epochs, draws, served = [0] * len(streams), random.Random(run.seed), 0
    weights = [rule(0) for rule in rules]
    while sum(weights) > 0:
        (number,) = draws.choices(range(len(streams)), weights=weights, k=1)
        if (block := next(streams[number], None)) is None:
            epochs[number] += 1
            streams[number] = model_worker(one_pass[number], *place)
            if most[number] <= epochs[number]:
                weights[number] = 0
                continue
            block = next(streams[number])
        yield number, block[0], block[1]
        served += 1
        if not run.num_workers and served % run.micro_batch_size == 0:
            weights = [rule(served // run.micro_batch_size) for rule in rules]
            weights = [0 if most[each] <= epochs[each] else weight for each, weight in enumerate(weights)]


def model_rank(run: PackedRun, count: int) -> list[tuple[int, int, int]]:
    workers = [model_worker_mix(run, worker) for worker in range(max(1, run.num_workers))]
    rows: list[tuple[int, int, int]] = []
    while len(rows) < count:
        for worker in workers:
            for _ in range(run.micro_batch_size):
                if (row := next(worker, None)) is None:
                    return rows[:count]
                rows.append(row)
    return rows[:count]


def random_schedule(choose: random.Random) -> WeightSchedule:
    kind = choose.choice(["const", "step", "linear", "cosine"])
    numbers: dict[str, tuple[float, ...]] = {
        "const": (choose.random(),),
        "step": (choose.random(), choose.randrange(1, 9), choose.random()),
        "linear": (choose.random(), choose.choice([0, choose.random()]), choose.randrange(1, 40)),
        "cosine": (choose.random(), choose.random(), choose.randrange(1, 40)),
    }
    return WeightSchedule(kind, numbers[kind])


@pytest.mark.parametrize("seed", range(60))
def test_scheduled_runs_are_those_of_the_fork(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_order, "DRAWN_AT_ONCE", 64)
    choose = random.Random(seed)
    num_sets, ranks, workers = choose.randrange(1, 4), choose.randrange(1, 3), choose.randrange(3)
    sets = [
        PackedSet(choose.randrange(12, 30), choose.randrange(1, 5), choose.randrange(1, 3), seed, at_end=AtEnd.repeat)
        for _ in range(num_sets)
    ]
    schedules = [random_schedule(choose) for _ in range(num_sets)]
    most = [choose.choice([None, 1, 2]) for _ in range(num_sets - 1)]
    if num_sets > 1:  # one that never ends
        schedules[-1] = WeightSchedule("const", (0.1,))
    rank = choose.randrange(ranks)
    run = PackedRun(sets, None, seed, rank, ranks, workers, choose.randrange(1, 4), schedules, [*most, None])
    needed = model_rank(run, 400)
    found = run.blocks(0, len(needed))
    assert [tuple(row) for row in found[:, :3].tolist()] == needed
    for first in (len(needed) // 2, 3):
        assert (run.blocks(first, first + 9) == found[first : first + 9]).all()


def test_schedules_are_described_in_the_file(tmp_path: Path) -> None:
    builder = PackedDatasetBuilder(f"{tmp_path}/packed", "web", 40, 0, "uint16")
    builder.add_array(packed_order.np.arange(37 * 40, dtype="uint16"))
    builder.write_reminder()
    one = {"name": "web", "files": builder.filenames, "scheduler": ["linear", 30, 70, 1000]}
    two = {"name": "again", "files": builder.filenames, "weight": 70, "max_epoch": 2}
    described = {"fork": "umd", "block_size": 9, "n_chunks": 2, "seed": 3, "sets": [one, two], "num_ranks": 2}
    file = tmp_path / "packed.json"
    file.write_text(json.dumps(described))
    order = load_packed_run(str(file))
    assert order.packed.schedules == [WeightSchedule("linear", (30, 70, 1000)), WeightSchedule("const", (70.0,))]
    assert order.readings(range(50)).sample.shape == (100,)
    assert order.fingerprint != load_packed_run(str(_without(file, described))).fingerprint
    for changes, message in (
        ({"fork": "tinyllama"}, "scheduler, max_epoch: found in a run of tinyllama, only umd has them"),
        ({"sets": [{**one, "scheduler": ["linear", 1, 2]}]}, "scheduler: found .'linear', 1, 2., needs const W"),
        ({"sets": [{**one, "scheduler": ["sine", 1]}]}, "scheduler: found .'sine', 1., needs const W"),
    ):
        file.write_text(json.dumps({**described, **changes}))
        with pytest.raises(ConfigError, match=message):
            load_packed_run(str(file))


def _without(file: Path, described: dict[str, object]) -> Path:
    sets = [{"name": name, "files": described["sets"][0]["files"]} for name in ("web", "again")]  # type: ignore[index]
    other = file.with_name("other.json")
    other.write_text(json.dumps({**described, "sets": sets}))
    return other
