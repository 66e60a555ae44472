"""A view that begins in the middle of a run: its place, by what loaders served, and what a history says of it."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import binidx
from binidx.errors import ConfigError
from binidx.run.history import RunHistory
from binidx.tools.account import main as account
from binidx.tools.trace_step import main as trace

S, MICRO, RANKS = 16, 2, 2
STEP = MICRO * RANKS


def load(blend: Any, **options: Any) -> Any:
    options = {"num_samples": 160, "random_seed": 5, "mid_level_dataset_surplus": 3.0, **options}
    return binidx.load_dataset(blend, S, **options).wrapped


def served(dataset: Any, start: int, stop: int | None = None) -> list[tuple[int, ...]]:
    """Rows of the batches of all ranks, in the order of steps."""
    rows: list[tuple[int, ...]] = []
    loaders = [binidx.build_pretraining_data_loader(dataset, start, MICRO, rank, RANKS) for rank in range(RANKS)]
    for batches in zip(*loaders, strict=True):  # type: ignore[arg-type]
        for batch in batches:
            rows += map(tuple, np.column_stack([batch["tokens"], batch["labels"][:, -1]]).tolist())
        if stop is not None and start + len(rows) >= stop:
            break
    return rows


def kept(dataset: Any) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in dataset.read_tokens(range(len(dataset) // STEP * STEP)).tolist())


@pytest.fixture
def blend(tmp_path: Path) -> dict[str, float]:
    """Three sources of one epoch, in which no two samples are equal."""
    for number in range(3):
        choose = random.Random(number)
        with binidx.IndexedDatasetBuilder(f"{tmp_path}/s{number}.bin", np.int32) as builder:
            for document in range(400):
                length = choose.randrange(1, 40)
                builder.add_document(np.arange(length) + 1000 * (document + 1000 * number), [length])
            builder.finalize(f"{tmp_path}/s{number}.idx")
    return {f"{tmp_path}/s{number}": 1.0 + number for number in range(3)}


def drop(tmp_path: Path, blend: dict[str, float], seed: int) -> str:
    choose = random.Random(seed)
    (tmp_path / "drop.txt").write_text(
        "".join(f"{prefix}\t{document}\n" for prefix in blend for document in choose.sample(range(400), 20))
    )
    return f"{tmp_path}/drop.txt"


def refused(before: Any, viewed: Any, consumed: int, **options: Any) -> str:
    options = {"dataloader_type": "single", **options}
    loaders: list[Any] = [
        binidx.build_pretraining_data_loader(each, consumed if each is before else 0, MICRO, 0, RANKS, **options)
        for each in (before, viewed)
    ]
    with pytest.raises(ConfigError) as error:
        loaders[1].load_state_dict(loaders[0].state_dict())
    return str(error.value)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("over", ["blend", "source"])
def test_the_place_in_a_view_skips_no_sample_and_names_those_that_it_repeats(
    over: Any, seed: int, blend: dict[str, float], tmp_path: Path
) -> None:
    order, consumed = binidx.View(drop(tmp_path, blend, seed), over=over), STEP * (5 + 4 * seed)
    before, viewed = load(blend), load(blend, order=order)
    text = refused(before, viewed, consumed)
    place = int(re.findall(r"consumed_samples=(\d+) skips none", text)[0])
    assert place % STEP == 0
    read, rest = Counter(served(before, 0, consumed)), Counter(served(viewed, place))
    missing = kept(viewed) - (read | rest)
    assert not missing
    assert any(row not in read for row in served(viewed, place, place + STEP)[:STEP])  # the next step skips one
    again = sum((read & rest).values())
    assert (f"reads {again:,} again" in text) == bool(again)
    assert text.count("To continue all the same") == 0
    if over == "blend":
        assert again < STEP
    else:
        assert ("no place is that of every source" in text) == bool(again)
        counts = Counter(row[0] // 1_000_000 for row in (kept(viewed) & read).elements())
        for number, prefix in enumerate(blend):
            assert f"{prefix} at {counts[number]:,}" in text or not again


def test_an_order_with_an_index_of_its_own_continues_nothing(blend: dict[str, float], tmp_path: Path) -> None:
    before = load(blend)
    for order in (binidx.View(drop(tmp_path, blend, 1), how="rebuild"), "first_fit"):
        text = refused(before, load(blend, order=order), 8)
        assert "continues this run; begin a stage anew of what binidx where --count shows as unread" in text
    text = refused(before, load(blend, order=binidx.View(drop(tmp_path, blend, 1))), 8, dataloader_type="cyclic")
    assert "continues this run; begin a stage anew" in text
    assert "To continue all the same, set consumed_samples=8" in refused(before, load(blend, random_seed=6), 8)


def test_a_history_proves_the_place_and_names_what_a_view_leaves_out(
    blend: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = binidx.load_dataset(blend, S, num_samples=160, random_seed=5, mid_level_dataset_surplus=3.0)
    first = binidx.Run(whole.config, whole.sizes, MICRO, RANKS, directory=None)
    first.save(f"{tmp_path}/first.json")
    listed, consumed = drop(tmp_path, blend, 3), 15 * STEP
    viewed = load(blend, order=binidx.View(listed))
    place = int(re.findall(r"consumed_samples=(\d+) skips", refused(whole.wrapped, viewed, consumed))[0])
    read = Counter(served(whole.wrapped, 0, consumed))
    all_kept = Counter(map(tuple, viewed.read_tokens(range(len(viewed))).tolist()))
    left_out = Counter(map(tuple, whole.read_tokens(range(consumed, len(whole))).tolist())) - all_kept
    for begin in (place, consumed):
        config = replace(whole.config, order=binidx.View(listed))
        options = {"first_step": 15, "consumed_samples": begin, "earlier_samples": consumed - begin}
        second = replace(first, config=config, previous=f"{tmp_path}/first.json", **options)
        second.save(f"{tmp_path}/second.json")
        third = replace(second, previous=f"{tmp_path}/second.json", first_step=18)
        third = replace(third, consumed_samples=begin + 3 * STEP)
        third.save(f"{tmp_path}/third.json")
        for file in ("second", "third"):
            history = RunHistory.of(binidx.Run.load(f"{tmp_path}/{file}.json"))
            (line,) = history.describe_continuations()
            never = Counter(map(tuple, viewed.read_tokens(range(begin)).tolist())) - read
            again = Counter(map(tuple, viewed.read_tokens(range(begin, len(viewed))).tolist())) & read
            assert f"begins at sample {begin:,}: {sum((all_kept & read).values()):,} were read before" in line
            assert f"{sum(again.values()):,} are read again, {sum(never.values()):,} are never read" in line
            assert f"leaves out {sum(left_out.values()):,} others" in line
            assert (f"consumed_samples={place} skips none" in line) == (begin != place)
            capsys.readouterr()
            for command in ([account, f"{tmp_path}/{file}.json"], [trace, f"{tmp_path}/{file}.json", "--steps", "17"]):
                assert command[0](command[1:]) == 0  # type: ignore[operator]
                assert "are never read; it leaves out" in " ".join(capsys.readouterr().err.split())
    assert sum(left_out.values())


def test_a_history_counts_reads_of_an_index_of_other_documents_apart(blend: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("".join(f"{prefix}\t3\n" for prefix in blend))
    (tmp_path / "second.txt").write_text((tmp_path / "first.txt").read_text() + f"{min(blend)}\t4\n")
    before, after = (
        binidx.load_dataset(blend, S, num_samples=160, random_seed=5, mid_level_dataset_surplus=3.0,
                            order=binidx.View(f"{tmp_path}/{name}.txt", how="rebuild"))
        for name in ("first", "second")
    )  # fmt: skip
    first = binidx.Run(before.config, before.sizes, MICRO, RANKS, directory=None)
    first.save(f"{tmp_path}/first.json")
    earlier = {"first_step": 10, "earlier_samples": 10 * STEP, "previous": f"{tmp_path}/first.json"}
    (line,) = RunHistory.of(replace(first, config=after.config, **earlier)).describe_continuations()
    read, rest = (before.read_tokens(part) for part in (range(10 * STEP), range(10 * STEP, len(before))))
    unchanged = [Counter(map(tuple, rows[rows[:, 0] >= 1_000_000].tolist())) for rows in (read, rest)]
    served = Counter(map(tuple, after.read_tokens(range(len(after))).tolist()))
    counts = [sum(each.values()) for each in (unchanged[0] & served, unchanged[1] - served)]
    assert f"{counts[0]:,} were read before" in line
    assert f"leaves out {counts[1]:,} others; {sum(read[:, 0] < 1_000_000):,} more were read, of sources whose" in line
    assert 0 < counts[0] < len(read)


@pytest.mark.parametrize("change", [{"how": "rebuild"}, {"dataloader_type": "cyclic"}])
def test_a_history_says_where_no_place_continues(change: Any, blend: dict[str, float], tmp_path: Path) -> None:
    whole = binidx.load_dataset(blend, S, num_samples=160, random_seed=5, mid_level_dataset_surplus=3.0)
    kind, options = change.get("dataloader_type", "single"), {"how": change.get("how", "skip")}
    first = binidx.Run(whole.config, whole.sizes, MICRO, RANKS, dataloader_type=kind)
    first.save(f"{tmp_path}/first.json")
    config = replace(whole.config, order=binidx.View(drop(tmp_path, blend, 3), **options))
    second = replace(first, config=config, previous=f"{tmp_path}/first.json", first_step=5, earlier_samples=5 * STEP)
    (line,) = RunHistory.of(second).describe_continuations()
    assert line == "step 5: order view is another one: no place in it continues the run before"
