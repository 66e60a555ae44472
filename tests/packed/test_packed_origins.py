"""trace, where and account of packed runs against every block that their ranks read, and the tokens in it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.packed_runs import SEPARATOR, write_packed_run

from binidx.errors import ConfigError
from binidx.order.reads import OrderReads
from binidx.packed import packed_order
from binidx.packed.packed_blocks import PackedBlocks
from binidx.packed.packed_files import PackedFiles
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet
from binidx.packed.packed_run import PackedReading, PackedRunOrder, load_packed_run
from binidx.run.provenance.exposures import count_exposures
from binidx.testing import check_order
from binidx.tools import main


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check_run(directory: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    file, choose = write_packed_run(directory, seed)
    order = load_packed_run(file)
    count = order.num_steps()
    stop = min(20, 20 if count is None else count)
    if not stop:
        return
    found = rows(capsys, "trace", file, "--steps", f"0:{stop}")
    readings = order.readings(range(stop))
    assert [(row["step"], row["rank"], row["slot"]) for row in found] == [
        *zip(readings.step.tolist(), readings.rank.tolist(), readings.slot.tolist(), strict=True)
    ]
    for row, tokens in zip(found, order.read(readings.sample).tolist(), strict=True):
        assert row["dataset"] == f"{directory}/{row['source']}"
        of_docs: list[Any] = [SEPARATOR] * len(tokens)
        for doc in row["docs"]:
            first = doc["doc"] * 1000 + doc["start"]
            of_docs[doc["dst"] : doc["dst"] + doc["len"]] = range(first, first + doc["len"])
        assert of_docs == tokens
    document, source = choose.randrange(5), choose.choice(order.packed.names)
    needed = [row for row in found if row["source"] == source and any(doc["doc"] == document for doc in row["docs"])]
    inputs = [row for row in needed if any(doc["doc"] == document and "only_label" not in doc for doc in row["docs"])]
    asked = ["where", file, "--document", str(document), "--source", source, "--steps", f":{stop}"]
    assert sorted(rows(capsys, *asked), key=lambda row: row["position"]) == sorted(
        needed, key=lambda row: row["position"]
    )
    (counted,) = rows(capsys, *asked, "--count")
    steps = [row["step"] for row in inputs]
    assert [(row["samples"], row["first_step"], row["last_step"]) for row in counted["documents"]] == [
        (len(steps), min(steps, default=None), max(steps, default=None))
    ]
    listed = [(f"{directory}/{name}", number) for name in order.packed.names for number in sorted({0, document})]
    (directory / "list.txt").write_text("".join(f"{name}\t{number}\n" for name, number in listed))
    (exposed,) = rows(capsys, "where", "--count", file, "--documents", f"{directory}/list.txt", "--steps", f":{stop}")
    assert [(row["source"], row["document"]) for row in exposed["documents"]] == [*dict.fromkeys(listed)]
    for row in exposed["documents"]:
        inputs = [
            (int(step), own)
            for step, tokens, of in zip(readings.step, order.read(readings.sample)[:, :-1], found, strict=True)
            if of["dataset"] == row["source"] and len(own := tokens[tokens // 1000 == row["document"]])
        ]
        times = sum(int((own == row["document"] * 1000).sum()) for _, own in inputs)
        counts = [times, len(inputs), sum(len(own) for _, own in inputs)]
        assert [row[name] for name in ("times_started", "samples", "tokens")] == counts
        steps = [step for step, _ in inputs]
        assert (row["first_step"], row["last_step"]) == (min(steps, default=None), max(steps, default=None))
    for name, number in {*listed}:
        (own,) = count_exposures(order, {name: np.array([[number, 1, 4]])}, stop).values()
        held = [
            (int(step), len({*tokens.tolist()} & {*range(number * 1000 + 1, number * 1000 + 4)}))
            for step, tokens, of in zip(readings.step, order.read(readings.sample)[:, :-1], found, strict=True)
            if of["dataset"] == name
        ]
        whole, part = ([step for step, count in held if count in needed] for needed in ((3,), (1, 2)))
        assert (own.samples_whole[0], own.samples_part[0]) == (len(whole), len(part))
        assert (own.first_step_whole[0], own.last_step_part[0]) == (min(whole, default=-1), max(part, default=-1))
    (accounts,) = rows(capsys, "account", file, "--steps", f":{stop}")
    assert [row["blocks_read"] for row in accounts] == [
        sum(row["source"] == name for row in found) for name in order.packed.names
    ]
    one = found[0]
    asked = ["where", file, "--document", f"{one['file']}:{one['block']}", "--steps", f":{stop}"]
    assert one in rows(capsys, *asked)
    [counted] = rows(capsys, *asked, "--count")[0]["documents"]
    same = [row["step"] for row in found if (row["file"], row["block"]) == (one["file"], one["block"])]
    assert [counted[name] for name in ("samples", "first_step", "last_step")] == [len(same), same[0], same[-1]]
    assert main([*asked[:3], f"{one['file']}:999", *asked[4:]]) == 2
    assert "block 999, it has" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(12))
def test_packed_runs_answer_the_same_questions(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_run(tmp_path, seed, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 112))
def test_many_packed_runs_do(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_run(tmp_path, seed, capsys)


@pytest.mark.parametrize("at_end", [AtEnd.stop, AtEnd.repeat])
def test_draws_are_the_same_from_any_kept_state(at_end: AtEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [PackedSet(17, 6, 2, 3, at_end=at_end), PackedSet(9, 40, 1, 3, at_end=at_end)]
    whole = PackedRun(sets, [0.3, 0.7], 77_001, 0, 1, 2, 3).blocks(0, 90)
    packed_order._draws_of.cache_clear()
    monkeypatch.setattr(packed_order, "DRAWN_AT_ONCE", 7)
    run = PackedRun(sets, [0.3, 0.7], 77_001, 0, 1, 2, 3)
    for first in (80, 3, 0, 41, 80):
        assert (run.blocks(first, first + 10) == whole[first : first + 10]).all()
    for count in range(90):
        assert run.count_sets(count).tolist() == np.bincount(whole[:count, 0], minlength=2).tolist()
    packed_order._draws_of.cache_clear()


def test_files_are_opened_as_they_are_needed(tmp_path: Path) -> None:
    file, _ = write_packed_run(tmp_path, 3)
    described = json.loads(Path(file).read_text())
    names = described["sets"][0]["files"]
    for name in names[1:]:
        Path(name).unlink()
    files = PackedFiles(names, described["block_size"])
    sets = [PackedSet(len(names), files.num_blocks, 1, 0)]
    order = PackedBlocks(sets, ["web"], [files])
    assert len(OrderReads(order).trace(np.array([len(names) // 2 * files.num_blocks])).document)
    with pytest.raises(IndexError, match="document 4000, it has"):
        OrderReads(order).find(0, [4000])
    Path(f"{tmp_path}/packed/web.packed.json").unlink()
    with pytest.raises(ConfigError, match=r"web\.packed\.json: not found, so the documents of its files are not known"):
        PackedRunOrder(PackedReading(sets, ["web"]), [files]).select_sources()


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_an_order_of_their_datasets(seed: int, tmp_path: Path) -> None:
    file, choose = write_packed_run(tmp_path, seed)
    order = load_packed_run(file)
    check_order(order.order, seed=seed)
    later = np.array([choose.randrange(len(order.order)) for _ in range(5)], np.int64) + 2 * len(order.order)
    again = OrderReads(order.order).trace(later)
    assert (again.epoch == 2).all()
    assert (again.document == OrderReads(order.order).trace(later % len(order.order)).document).all()
    if order.num_steps() != 0:
        positions = np.array([order.reading.schedule.global_batch_size - 1, 0], np.int64)
        assert (order.reading.samples_at(positions) == order.readings(range(1)).sample[positions]).all()
