"""Histories that begin with a run over packed files: their sources, their unknown blocks, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.copied_runs import LENGTH, run_over, write_corpus

import binidx
from binidx.errors import ConfigError
from binidx.packed.packed_convert import indexed_to_packed
from binidx.run.history import RunHistory
from binidx.run.provenance.accounts import IN_RUN, OF_BLOCKS, REORDERED, account
from binidx.run.provenance.exposures import count_exposures
from binidx.tools import main

STEP, STOP, BLOCK = 6, 12, 9
"""First step of the run after that over packed files, its end, and the size of a block."""


def write_history(folder: Path, **options: Any) -> tuple[str, list[str]]:
    """Write a run over packed files of two corpora, four blocks a step, and a run after it; return its file."""
    corpora = [write_corpus(folder / name, number) for number, name in ((1, "en"), (2, "code"))]
    sets = []
    for prefix, name in zip(corpora, ("web", "git"), strict=True):
        files = indexed_to_packed(binidx.IndexedDataset(prefix), f"{folder}/packed", name, 4 * BLOCK + 1, 0)
        sets.append({"name": name, "files": files, "weight": 0.5})
    described = {"fork": "lit-gpt-wrap", "block_size": BLOCK, "n_chunks": 1, "seed": 3, "sets": sets, "num_ranks": 2}
    (folder / "packed.json").write_text(json.dumps({**described, "micro_batch_size": 2}))
    options = {"consumed_samples": 0, "earlier_samples": 4 * STEP, **options}
    run = replace(run_over((corpora, [0.7, 0.3]), STEP, **options), previous=f"{folder}/packed.json")
    run.save(f"{folder}/run.json")
    return f"{folder}/run.json", corpora


def open_packed(file: str) -> RunHistory:
    return RunHistory.of(binidx.Run.load(file), load_packed=binidx.packed.load_packed_run)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_steps_of_a_history_are_those_of_the_packed_run_and_of_the_run_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = write_history(tmp_path)
    packed = printed(capsys, "trace", f"{tmp_path}/packed.json", "--steps", f"0:{STEP}")
    later = printed(capsys, "trace", file, "--steps", f"{STEP}:{STOP}")
    assert printed(capsys, "trace", file, "--steps", f"0:{STOP}") == [*packed, *later]
    assert {row["step"] for row in later} == {*range(STEP, STOP)}
    first = packed[0]
    rows = printed(capsys, "where", file, "--document", f"{first['file']}:{first['block']}")
    assert rows == [row for row in packed if (row["file"], row["block"]) == (first["file"], first["block"])]
    asked = ["account", file, "--consumed-samples"]
    in_packed = printed(capsys, *asked, "8")
    assert in_packed == printed(capsys, "account", file, "--steps", ":2")
    assert sum(row["samples_read"] for row in in_packed[0]) == 8
    assert printed(capsys, *asked, str(4 * STOP)) == printed(capsys, "account", file, "--steps", f":{STOP}")
    assert main([*asked, "9"]) == 2
    assert "steps begin at 8 and 12" in capsys.readouterr().err
    assert main(["account", file, "--steps", f":{STOP}"]) == 0
    assert f"{IN_RUN}\nconsumed_train_samples {4 * STOP}, " in capsys.readouterr().out
    assert main(["order", file, "--steps", f"0:{STOP}", "--steps-per-file", "3", "--to", f"{tmp_path}/order"]) == 0
    capsys.readouterr()


def test_first_tokens_of_packed_documents_are_counted(tmp_path: Path) -> None:
    file, corpora = write_history(tmp_path)
    history = open_packed(file)
    found = account(history, STOP, repeats=True)
    for each, prefix in zip(found, corpora, strict=True):
        exposed = count_exposures(history, {prefix: range(30)}, STOP)[prefix]
        assert each.source == prefix
        assert each.tokens_read == exposed.tokens.sum()
        assert each.seen == tuple(np.bincount(exposed.times_started))


def test_a_copy_and_a_relative_prefix_are_the_data_that_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, corpora = write_history(tmp_path)
    monkeypatch.chdir(tmp_path)
    counts = {"consumed_samples": 0, "earlier_samples": 4 * STEP}
    relative = replace(run_over((["en", "code"], [0.7, 0.3]), STEP, **counts), previous="packed.json")
    assert open_packed_of(relative).select_sources("en").keys() == {corpora[0]}
    for name in ("en", "code"):
        for suffix in (".bin", ".idx"):
            shutil.copy(name + suffix, f"{name}-copy{suffix}")
    copied = replace(run_over((["en-copy", "code-copy"], [0.7, 0.3]), STEP, **counts), previous="packed.json")
    history = open_packed_of(replace(copied, same_data={"en-copy": corpora[0], "code-copy": corpora[1]}))
    assert [each.source for each in account(history, STOP)] == corpora


def open_packed_of(run: binidx.Run) -> RunHistory:
    return RunHistory.of(run, load_packed=binidx.packed.load_packed_run)


def test_blocks_of_unknown_documents_are_counted_as_blocks_and_refused_as_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, corpora = write_history(tmp_path)
    before = {each.source: each for each in account(open_packed(file), STOP)}
    reads = printed(capsys, "trace", f"{tmp_path}/packed.json", "--steps", f"0:{STEP}")
    for missing in ({"git": 1}, {"git": 1, "web": 0}):
        for name in missing:
            Path(f"{tmp_path}/packed/{name}.packed.json").unlink(missing_ok=True)
        history = open_packed(file)
        for repeats in (False, True):
            found = account(history, STOP, repeats=repeats)
            assert sum(each.samples_read for each in found) == 4 * STOP
            rows = {each.source: each for each in found}
            for name, number in missing.items():
                blocks = sum(row["source"] == name for row in reads)
                own = rows[name]
                assert (own.samples_read, own.tokens_read) == (blocks, blocks * (BLOCK - 1))
                assert own.documents == own.samples_built == own.tokens // (BLOCK - 1)
                assert rows[corpora[number]].samples_read == before[corpora[number]].samples_read - blocks
            notes = [note for note in found.notes if note.endswith(OF_BLOCKS)]
            assert [re.findall(r"(\w+)\.packed\.json: not found", note)[0] for note in notes] == sorted(
                missing, reverse=True
            )
        assert len(printed(capsys, "trace", file, "--steps", f"0:{STOP}")) == 4 * STOP
        (tmp_path / "list.txt").write_text(f"{corpora[0]}\t3\n")
        for more in ([], ["--count"]):
            assert main(["where", file, "--documents", f"{tmp_path}/list.txt", *more]) == 2
            assert re.search(r"\w+\.packed\.json: not found.* restore the file", capsys.readouterr().err)
        one = reads[0]
        assert one["step"] in {row["step"] for row in printed(
            capsys, "where", file, "--document", f"{one['file']}:{one['block']}"
        )}  # fmt: skip


def test_a_run_that_does_not_follow_its_packed_run_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = write_history(tmp_path)
    run = binidx.Run.load(file)
    with pytest.raises(ConfigError, match=r"packed\.json is a run over packed files, which is not opened here"):
        RunHistory.of(run)
    assert main(["spikes", file]) == 2
    assert "which is not opened here; trace, where" in capsys.readouterr().err
    wrong = r"packed\.json reads another number of samples .*found 25 as .*needs 24: 6 steps of 4 on 2 ranks; or 0"
    with pytest.raises(ConfigError, match=wrong):
        open_packed_of(replace(run, earlier_samples=25))
    described = json.loads((tmp_path / "packed.json").read_text())
    (tmp_path / "packed.json").write_text(json.dumps({**described, "fork": "lit-gpt"}))
    end = binidx.packed.load_packed_run(f"{tmp_path}/packed.json").num_steps()
    assert end is not None
    late = replace(run, first_step=end + 1, earlier_samples=4 * (end + 1))
    with pytest.raises(ConfigError, match=rf"packed\.json ends too early \(found {end} steps, .* needs {end + 1}\)"):
        open_packed_of(late)
    assert open_packed_of(replace(late, first_step=end, earlier_samples=4 * end)).first_step == 0
    assert open_packed_of(replace(run, first_step=0, earlier_samples=0)).packed is None


def test_samples_that_count_as_consumed_were_not_read_in_that_order(tmp_path: Path) -> None:
    file, _ = write_history(tmp_path, consumed_samples=4 * STEP, earlier_samples=0)
    assert account(open_packed(file), STOP).notes == [IN_RUN, f"step {STEP}: {REORDERED}"]


def test_the_file_of_a_run_after_packed_files_begins_with_its_data(tmp_path: Path) -> None:
    _, corpora = write_history(tmp_path)
    command = f"pretrain_gpt.py --seq-length {LENGTH} --micro-batch-size 4 --global-batch-size 4 --train-iters 20"
    command += f" --data-path 0.7 {corpora[0]} 0.3 {corpora[1]} --split 1,0,0 --tokenizer-type NullTokenizer"
    command += " --vocab-size 3000000"
    asked = ["--previous", f"{tmp_path}/packed.json", "--first-step", str(STEP), "--gpus", "1"]
    assert main(["plan", *asked, "--to", f"{tmp_path}/next.json", "--from-megatron", *command.split()]) == 0
    run = binidx.Run.load(f"{tmp_path}/next.json")
    assert (run.first_step, run.consumed_samples, run.earlier_samples) == (STEP, 0, 4 * STEP)
