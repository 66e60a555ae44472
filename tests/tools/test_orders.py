"""binidx trace, where, account, order and pack, as a person calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import binidx
from binidx.format.arrow import pa, parquet
from binidx.format.indexed_dataset import IndexedDataset
from binidx.loader.losses import LossRecorder
from binidx.packed.packed_files import PackedDatasetBuilder
from binidx.run.provenance.exposures import Exposures
from binidx.storage.location import Location
from binidx.tools import main
from binidx.tools._runs import exposure_rows

WORDS = [f"w{number}" for number in range(500)]


@dataclass
class Words:
    eod: int = 0
    pad: int = 600
    unique_identifiers: OrderedDict[str, Any] = field(default_factory=lambda: OrderedDict(kind="words"))


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved run over two sources, and the tokenizer of their text, in one directory."""
    directory = tmp_path_factory.mktemp("orders")
    rng = np.random.default_rng(0)
    for name in ("en", "code"):
        with binidx.IndexedDatasetBuilder(f"{directory}/{name}.bin", np.uint16) as builder:
            for _ in range(60):
                tokens = [*rng.integers(1, 500, 30), 0]
                builder.add_document(tokens, [len(tokens)])
            builder.finalize(f"{directory}/{name}.idx")
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=24, blend=([f"{directory}/en", f"{directory}/code"], [0.7, 0.3]),
        split="1,0,0", tokenizer=Words(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        path_to_cache=f"{directory}/cache",
    )  # fmt: skip
    binidx.Run(config, [120, 0, 0], 2, 2, global_batch_size=8).save(f"{directory}/run.json")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{directory}/tokenizer.json")
    return directory / "run.json"


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_trace_shows_what_the_loader_served(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = str(run_file.parent / "tokenizer.json")
    found = rows(capsys, "trace", str(run_file), "--steps", "3", "--rank", "1", "--tokenizer", tokenizer)
    train = binidx.Run.load(str(run_file)).build()[0]
    loader = binidx.build_pretraining_data_loader(train, 3 * 8, 2, 1, 2)
    served = [row for batch, _ in zip(loader, range(2), strict=False) for row in batch["tokens"].tolist()]
    assert [row["slot"] for row in found] == [0, 1, 2, 3]
    for row, tokens in zip(found, served, strict=True):
        text = " ".join(doc["text"] for doc in row["docs"]).split()
        assert text[:24] == [WORDS[token] for token in tokens]


def test_trace_reads_well(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_file), "--steps", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0  rank 0  slot 0  sample 0  ")
    assert "  document " in lines[1]
    assert sum(line.startswith("step 0") for line in lines) == 8


def test_where_is_the_way_back(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = [row for step in range(15) for row in rows(capsys, "trace", str(run_file), "--steps", str(step))]
    source = str(run_file.parent / "code")
    needed = [row for row in traced if row["source"] == source and any(doc["doc"] == 7 for doc in row["docs"])]
    found = rows(capsys, "where", str(run_file), "--document", "7", "--source", source)
    assert found == sorted(needed, key=lambda row: row["position"])
    assert needed
    early = rows(capsys, "where", str(run_file), "--document", "7", "--source", source, "--steps", ":5")
    assert early == [row for row in found if row["step"] < 5]


@pytest.mark.parametrize("consumed", [104, 112])
def test_where_finds_what_a_resumed_run_has_read_before(
    consumed: int, run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, source = str(tmp_path / "run.json"), str(run_file.parent / "code")
    resumed = replace(binidx.Run.load(str(run_file)), data_parallel_size=1, consumed_samples=consumed)
    resumed.save(saved)
    asked = ["--document", "7", "--source", source]
    needed = rows(capsys, "where", str(run_file), *asked)
    found = rows(capsys, "where", saved, *asked)
    assert [row["sample"] for row in found] == [row["sample"] for row in needed]
    past = [row for row in found if row["position"] < consumed]
    assert past
    assert all((row["step"], row["rank"], row["slot"]) == (None, None, None) for row in past)
    assert [row["step"] for row in found[len(past) :]] == [
        (row["position"] - consumed) // 8 for row in needed[len(past) :]
    ]
    assert rows(capsys, "where", saved, *asked, "--steps", ":0") == past
    assert rows(capsys, "where", saved, *asked, "--no-earlier") == found[len(past) :]

    assert main(["where", saved, *asked]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"before consumed_samples  position {past[0]['position']}  sample ")
    assert f"and the {consumed} samples before consumed_samples; {len(past)} of them before" in told.err
    assert main(["where", saved, *asked, "--no-earlier"]) == 0
    assert f"not searched: the {consumed} samples before consumed_samples" in capsys.readouterr().err

    replace(resumed, dataloader_type="cyclic").save(saved)
    asked += ["--steps", ":5"]
    assert main(["where", saved, *asked]) == 2
    assert f"the {consumed} samples before consumed_samples of a cyclic run" in capsys.readouterr().err
    assert rows(capsys, "where", saved, *asked, "--no-earlier") is not None


def test_account_of_a_staged_run_proves_its_seams(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = binidx.Run.load(str(run_file))
    en, code = run.config.blend[0]
    stages = [binidx.Stage(([en], [1.0]), 40), binidx.Stage(([en, code], [1.0, 1.0]), 40)]
    binidx.Run(run.config, [0, 0, 0], 2, 2, global_batch_size=8, stages=stages).save(f"{tmp_path}/staged.json")
    assert main(["account", f"{tmp_path}/staged.json"]) == 0
    out = capsys.readouterr().out
    assert "stage 1: samples 40 to 80" in out
    assert f"50.0%  {en}  from its sample 40 of" in out
    assert f"50.0%  {code}  from its sample 0 of" in out
    assert "checked: each of 80 samples is the next one of its source" in out


def test_account_adds_up(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", str(run_file), "--repeats"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in table if "first token read" not in line)
    names = [line.split()[0] for line in table if "first token read" not in line and not line.startswith(" ")]
    assert [name.rpartition("/")[2] for name in names] == ["source", "en", "code", "all"]
    assert main(["account", str(run_file), "--repeats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(row["samples_read"] for row in found) == 120
    assert all(sum(row["seen"]) == row["documents"] == 60 for row in found)


def test_an_account_at_a_checkpoint_is_that_before_its_next_step(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*asked: str) -> str:
        assert main(["account", str(run_file), *asked]) == 0
        return capsys.readouterr().out

    assert said("--consumed-samples", "40") == said("--steps", ":5")
    assert said("--consumed-samples", "0") == said("--steps", ":0")
    assert said("--consumed-samples", "120") == said()
    assert main(["account", str(run_file), "--consumed-samples", "43"]) == 2
    assert "within a step; steps begin at 40 and 48" in capsys.readouterr().err
    assert main(["account", str(run_file), "--consumed-samples", "128"]) == 2


def test_trace_and_where_select_the_same_steps(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["where", str(run_file), "--document", "7", "--source", binidx.Run.load(str(run_file)).config.blend[0][0]]
    for steps in ("3:9", ":4", "6:", "2"):
        traced = [row["sample"] for row in rows(capsys, "trace", str(run_file), "--steps", steps)]
        found = [row["sample"] for row in rows(capsys, *asked, "--steps", steps)]
        assert found == [row["sample"] for row in rows(capsys, *asked) if row["sample"] in traced]
    for count in ([*asked, "--count"], ["account", str(run_file)]):
        assert main([*count, "--steps", "3:9"]) == 2
        assert "--steps: found 3:9, counts are of all steps before one; need :9" in capsys.readouterr().err


def test_figures_of_a_run_are_written(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(*options: str) -> bytes:
        call = ["account", str(run_file), "--to", f"{tmp_path}/run.svg", *options]
        assert rows(capsys, *call) == [{"figure": f"{tmp_path}/run.svg"}]
        return (tmp_path / "run.svg").read_bytes()

    figures = {kind: drawn("--figure", kind) for kind in ("blend", "epochs", "lengths", "repeats")}
    assert all(figure.startswith(b"<?xml") for figure in figures.values())
    assert drawn("--figure", "lengths", "--width", "6.75") != figures["lengths"]
    assert (
        drawn("--figure", "epochs", "--steps", "3:9")
        != figures["epochs"]
        != drawn("--figure", "epochs", "--steps", ":9")
    )
    assert drawn("--figure", "repeats", "--steps", ":2") != figures["repeats"]
    for call, told in (
        (["--card", "--figure", "blend", "--to", "a.svg"], "--card: not with --figure"),
        (["--figure", "blend", "--to", "a.gif"], "--to: found a.gif, needs a name that ends in .pdf, .png, .svg"),
        (["--figure", "blend", "--world", "2", "--to", "a.svg"], "--world: not with --figure"),
        (["--width", "3"], "--width: only with --figure"),
        (["--public"], "--public: only with --card"),
    ):
        assert main(["account", str(run_file), *call]) == 2
        assert f"binidx account: {told}" in capsys.readouterr().err
    assert main(["plot", str(run_file), "blend", "--to", f"{tmp_path}/run.svg"]) == 0
    assert capsys.readouterr().err == "binidx plot is binidx account --figure KIND now\n"


@pytest.mark.parametrize("stop", ["-1", "16"])
@pytest.mark.parametrize("command", [["account"], ["where", "--document", "7", "--source"]])
def test_steps_that_the_run_does_not_have(
    run_file: Path, capsys: pytest.CaptureFixture[str], command: list[str], stop: str
) -> None:
    source = binidx.Run.load(str(run_file)).config.blend[0][0]
    name, *rest = command
    assert main([name, str(run_file), "--steps", f":{stop}", *rest, *([source] if rest else [])]) == 2
    wrong = ", needs the first step before the last;" if stop == "-1" else ","
    assert f"--steps: found 0:{stop}{wrong} the run has 15 steps, counted from 0" in capsys.readouterr().err


def test_order_writes_and_goes_on(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["order", str(run_file), "--to", str(tmp_path), "--tokens"]) == 0
    assert "2 files, 2 written now, 120 rows" in capsys.readouterr().out
    assert main(["order", str(run_file), "--to", str(tmp_path), "--tokens"]) == 0
    assert "2 files, 0 written now, 120 rows" in capsys.readouterr().out
    found = parquet.read_table(f"{tmp_path}/worker_1-of-2_ordered_dataset.parquet").to_pylist()
    traced = rows(capsys, "trace", str(run_file), "--steps", "14", "--rank", "1")
    assert [row["sample"] for row in found[-4:]] == [row["sample"] for row in traced]
    assert main(["order", str(run_file), "--to", f"{tmp_path}/s", "--steps", "2:9", "--steps-per-file", "4"]) == 0
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        f"steps-{a:09d}-{b:09d}.parquet" for a, b in ((2, 4), (4, 8), (8, 9))
    ]


def test_a_baked_run_is_the_run(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for shard in ("1/2", "0/2"):
        assert main(["prepare", "bake", str(run_file), "--to", f"{tmp_path}/baked", "--shard", shard]) == 0
    again = "give the same command again when the other shards have ended"
    assert f"stage places: 1 task of other shards missing; {again}" in capsys.readouterr().out
    assert (
        main(["prepare", "bake", str(run_file), "--to", f"{tmp_path}/baked", "--engine", "local", "--workers", "1"])
        == 0
    )
    assert "120 samples in 1 part, 5.9 KiB; 1 written now, complete\n" in capsys.readouterr().out
    assert main(["prepare", "bake", str(run_file), "--to", f"{tmp_path}/baked", "--json"]) == 0
    sizes = {"samples": 120, "parts": 1, "written": 0, "missing": 0, "num_bytes": 6000}
    ended = {"stage": "parts", "waits_for": 0}
    assert json.loads(capsys.readouterr().out) == {"to": f"{tmp_path}/baked", **sizes, **ended}
    train = binidx.Run.load(str(run_file)).build()[0]
    baked = binidx.BakedDataset(f"{tmp_path}/baked", train.config)
    for number in (0, 7, 119):
        assert baked[number]["tokens"].tolist() == train[number]["tokens"].tolist()


def test_a_planned_run_is_the_run(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["prepare", "read-plan", str(run_file), "--to", f"{tmp_path}/plan", "--shard", "1/2"]) == 0
    assert "0 samples in 0 parts, 0 written now, 1 missing" in capsys.readouterr().out
    assert main(["prepare", "read-plan", str(run_file), "--to", f"{tmp_path}/plan", "--shard", "0/2"]) == 0
    assert "120 samples in 1 part, 1 written now, 0 missing\n" in capsys.readouterr().out
    assert main(["prepare", "read-plan", str(run_file), "--to", f"{tmp_path}/plan", "--json"]) == 0
    sizes = {"samples": 120, "parts": 1, "written": 0, "missing": 0}
    assert json.loads(capsys.readouterr().out) == {"to": f"{tmp_path}/plan", **sizes}
    train = binidx.Run.load(str(run_file)).build()[0]
    planned = binidx.PlannedDataset(f"{tmp_path}/plan", train.config)
    for number in (0, 7, 119):
        assert planned[number]["tokens"].tolist() == train[number]["tokens"].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "{run}", "--steps", "15"], "--steps: found 15, the run has 15 steps, counted from 0"),
        (["trace", "{run}", "--steps", "0", "--rank", "2"], "--rank: found 2, the run has ranks 0 to 1"),
        (["where", "{run}", "--document", "0"], "--source: not given, document 0 needs one of"),
        (["where", "{run}", "--document", "60", "--source", "{en}"], "document 60, it has 60"),
        (["where", "{run}", "--document", "0", "--source", "en"], "--source: found en, did you mean {en}?"),
        (["where", "{run}", "--document", "0", "--source", "{en}s"], "--source: found {en}s, did you mean {en}"),
        (["where", "{run}", "--document", "0", "--source", "?"], "--source: found ?, needs one of {en}, "),
        (["trace", "http://127.0.0.1:1/run.json", "--steps", "0"], "binidx trace: http://127.0.0.1:1/run.json: Client"),
        (["trace", __file__, "--steps", "0"], "(char 2); needs the file of a run, which binidx.save_run writes"),
        (["order", "{run}"], "--to, --check-nesting: found none, need one"),
        (["prepare", "bake", "{run}", "--to", "x", "--steps", "3:99"], "--steps: found 3:99, the run has 15 steps"),
        (["prepare", "bake", "{run}", "--to", "x", "--steps", "9:9"], "--steps: found 9:9, need one to bake"),
        (
            ["prepare", "read-plan", "{run}", "--to", "x", "--steps", "3:99"],
            "--steps: found 3:99, the run has 15 steps",
        ),
        (["prepare", "read-plan", "{run}", "--to", "x", "--steps", "9:9"], "--steps: found 9:9, need one to plan"),
        (["order", "{run}", "--to", "x", "--steps", "3:99"], "--steps: found 3:99, the run has 15 steps"),
        (
            ["order", "{run}", "--to", "x", "--steps", "9:2"],
            "--steps: found 9:2, needs the first step before the last; the run has 15 steps",
        ),
        (["order", "{run}", "--to", "x", "--steps-per-file", "0"], "--steps-per-file: found 0, needs at least 1"),
        (["order", "{run}", "--check-nesting", "2,4"], "needs packed files"),
        (["plan", "{run}", "--train-iters", "0"], "--train-iters, --train-samples: found 0, needs 1 or more"),
        (["plan", "{run}", "--train-iters", "-1"], "--train-iters: found -1, needs 0 or more"),
        (["plan", "{run}", "--nodes", "0"], "need numbers above 0"),
        (["explore", "{run}", "--html", "{run}/a.html"], "run.json: is a file, needed a folder; name another place"),
        (["explore", "{run}", "--html", "{folder}"], "is a folder, needed the name of a file; name another place"),
        (["order", "{tokenizer}", "--to", "x"], "tokenizer.json: $: missing required field config"),
    ],
)
def test_a_wrong_call_says_what_it_needs(
    run_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_file.parent
    names = {"run": run_file, "en": folder / "en", "tokenizer": folder / "tokenizer.json", "folder": folder}
    assert main([each.format(**names) for each in arguments]) == 2
    assert message.format(**names) in capsys.readouterr().err


def test_packed_runs_are_ordered_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = PackedDatasetBuilder(f"{tmp_path}/packed", "web", 40, 0, np.uint16)
    builder.add_array(np.random.default_rng(0).integers(1, 999, 37 * 40))
    builder.write_reminder()
    (tmp_path / "files.txt").write_text("\n".join(builder.filenames))
    described = {
        "fork": "umd", "block_size": 9, "n_chunks": 2, "seed": 3, "num_ranks": 2, "micro_batch_size": 2,
        "sets": [{"name": "web", "files": f"{tmp_path}/files.txt"}],
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(described))
    assert main(["order", f"{tmp_path}/run.json", "--check-nesting", "2,4"]) == 0
    out = capsys.readouterr().out
    assert "2, 4 ranks read the same set of blocks every 288 tokens (8 files)" in out
    assert "4 times in a pass, the last after 1,152 tokens" in out
    assert "2 ranks: 4 files after it are not in step, 1 are never read" in out
    assert main(["order", f"{tmp_path}/run.json", "--check-nesting", "2,4", "--json"]) == 0
    [nested] = json.loads(capsys.readouterr().out)
    assert (nested["sync_tokens"], nested["sync_files"], nested["syncs"]) == (288, 8, 4)
    assert nested["ranks"][0] == {"ranks": 2, "files_behind": 4, "files_dropped": 1}
    order = ["order", f"{tmp_path}/run.json", "--to", f"{tmp_path}/out", "--steps", ":50", "--tokens", "--json"]
    assert main(order) == 0
    assert json.loads(capsys.readouterr().out) == {"to": f"{tmp_path}/out", "files": 2, "written": 2, "rows": 200}
    found = parquet.read_table(f"{tmp_path}/out/worker_0-of-2_ordered_dataset.parquet")
    assert (found.num_rows, len(found["input_ids"][0])) == (100, 9)
    assert main(["order", f"{tmp_path}/run.json", "--to", f"{tmp_path}/out"]) == 2
    assert "--steps: this run has no end, needs A:B" in capsys.readouterr().err
    assert main(["trace", f"{tmp_path}/run.json", "--steps", "0", "--world", "0"]) == 2
    assert "--world: found 0, needs a whole number from 1" in capsys.readouterr().err
    assert main(["prepare", "bake", f"{tmp_path}/run.json", "--to", f"{tmp_path}/baked"]) == 2
    assert "a run over packed files; trace, where, account and order take it" in capsys.readouterr().err
    (tmp_path / "run.json").write_text(json.dumps({**described, "fork": "mine"}))
    assert main(["order", f"{tmp_path}/run.json", "--to", f"{tmp_path}/out"]) == 2
    assert "fork: found 'mine', needs one of lit-gpt" in capsys.readouterr().err


def test_packed_files_are_exported_and_imported(run_file: Path, tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "binidx"
    prefix = str(run_file.parent / "en")
    call = [command, "export", "litpkds", prefix, "--to", f"{tmp_path}/packed", "--chunk-size", "100", "--eod", "0"]
    subprocess.run(call, check=True)
    files = sorted(map(str, (tmp_path / "packed").glob("*.bin")))
    assert len(files) == 19
    subprocess.run([command, "import", "litpkds", *files, "--to", f"{tmp_path}/en2", "--eod", "0"], check=True)
    assert Path(f"{tmp_path}/en2.bin").read_bytes() == Path(f"{prefix}.bin").read_bytes()
    assert Path(f"{tmp_path}/en2.idx").read_bytes() == Path(f"{prefix}.idx").read_bytes()
    assert len(IndexedDataset(f"{tmp_path}/en2")) == 60


def test_trace_and_where_say_which_file_a_document_came_from(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from binidx.corpus.lineage.lineage_writer import LineageWriter, build_lineage_table

    prefix = run_file.parent / "en"
    writer = LineageWriter(Location.of(f"{prefix}.lineage.parquet"))
    ids = [f"id-{number}" for number in range(60)]
    places = ["s3://text/en.jsonl"], np.zeros(60, np.int32), np.arange(60) + 1000, None
    writer.write(build_lineage_table(*places, ids, None))
    writer.publish()
    try:
        found = rows(capsys, "trace", str(run_file), "--steps", "3")
        assert main(["where", str(run_file), "--document", "7", "--source", str(prefix)]) == 0
        said = capsys.readouterr().out
        for name in ("id=id-7", "en.jsonl:1007", "s3://text/en.jsonl:1007"):
            assert main(["where", str(run_file), "--document", name, "--source", str(prefix)]) == 0
            assert capsys.readouterr().out == said
        assert main(["where", str(run_file), "--document", "id=other", "--source", str(prefix)]) == 2
        assert f"id=other not found in {prefix}\n" in capsys.readouterr().err
        for name in ("id=id-7", "en.jsonl:1007"):
            assert main(["where", str(run_file), "--document", name]) == 0
            out, err = capsys.readouterr()
            assert out == said
            assert f"{name}: document 7 of {prefix}" in err
        assert main(["where", str(run_file), "--document", "id=other"]) == 2
        assert "id=other not found in 2 sources, 1 have no lineage or no ids in it" in capsys.readouterr().err
        assert main(["trace", str(run_file), "--steps", "3", "--no-lineage"]) == 0
        assert "from " not in capsys.readouterr().out
        writer = LineageWriter(Location.of(f"{prefix}.lineage.parquet"))
        writer.write(build_lineage_table(*places, None, None))
        writer.publish()
        for source in (["--source", str(prefix)], []):
            assert main(["where", str(run_file), "--document", "id=id-7", *source]) == 2
        assert "has no ids, which binidx preprocess stores with --id-key; name the document" in capsys.readouterr().err
    finally:
        Path(f"{prefix}.lineage.parquet").unlink()
    for source in (["--source", str(prefix)], []):
        assert main(["where", str(run_file), "--document", "id=id-7", *source]) == 2
    assert "lineage.parquet: not found; binidx preprocess writes it" in capsys.readouterr().err
    for name in ("en.jsonl", "9" * 20, f"en.jsonl:{'9' * 20}"):
        assert main(["where", str(run_file), "--document", name, "--source", str(prefix)]) == 2
        assert "needs a number, FILE:ROW or id=ID" in capsys.readouterr().err
    listed = prefix.parent / "list.txt"
    listed.write_text(f"{prefix}\t{'9' * 20}\n")
    assert main(["where", str(run_file), "--documents", str(listed)]) == 2
    assert "needs [PREFIX TAB] NUMBER" in capsys.readouterr().err
    for row in found:
        for doc in row["docs"]:
            origin = doc.get("origin")
            if row["source"] == str(prefix):
                assert (origin["source"], origin["row"], origin["id"]) == (
                    "s3://text/en.jsonl", 1000 + doc["doc"], f"id-{doc['doc']}"
                )  # fmt: skip
            else:
                assert origin is None
    assert {row["source"] for row in found} == {str(prefix), str(run_file.parent / "code")}
    assert 'from s3://text/en.jsonl row 1,007, id "id-7"' in said


@pytest.fixture(scope="module")
def resumed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork of that run at step 5, on four ranks, with iterations to skip."""
    run = replace(binidx.Run.load(str(run_file)), data_parallel_size=4, first_step=5, consumed_samples=40)
    file = run_file.parent / "resumed.json"
    replace(run, previous=str(run_file), iterations_to_skip=[7, 8]).save(str(file))
    assert json.loads(file.read_text())["previous"] == "run.json"
    return file


def test_a_step_of_a_history_is_that_of_the_run_that_had_it(
    run_file: Path, resumed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = rows(capsys, "trace", str(resumed), "--steps", "3:8")
    assert every[:16] == rows(capsys, "trace", str(run_file), "--steps", "3:5")
    assert [row["rank"] for row in every if row["step"] == 5] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {row["step"] for row in every if not row["trained"]} == {6, 7}
    assert sorted(row["sample"] for row in every) == list(range(24, 64))
    assert main(["trace", str(resumed), "--steps", "6", "--rank", "3"]) == 0
    assert capsys.readouterr().out.startswith("step 6  rank 3  slot 0  not trained  sample 54  ")
    other = rows(capsys, "trace", str(run_file), "--steps", "2", "--world", "1", "--micro-batch-size", "8")
    assert [(row["rank"], row["slot"], row["sample"]) for row in other] == [(0, slot, 16 + slot) for slot in range(8)]
    assert main(["trace", str(resumed), "--steps", "40"]) == 2
    assert "--steps: found 40, the run has 15 steps, counted from 0" in capsys.readouterr().err


def test_one_command_counts_the_reads_of_a_document(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(resumed.parent / "code")
    asked = ["where", str(resumed), "--document", "7", "--document", "3", "--source", source, "--steps", ":12"]
    found = rows(capsys, *asked)
    (counted,) = rows(capsys, *asked, "--count")
    assert len(counted["documents"]) == 2
    for each in counted["documents"]:
        own = [row for row in found if any(doc["doc"] == each["document"] for doc in row["docs"])]
        steps = [row["step"] for row in own]
        assert (each["first_step"], each["last_step"]) == (min(steps, default=None), max(steps, default=None))
        assert (each["samples"], each["samples_trained"]) == (len(own), sum(row["trained"] for row in own))
    assert main([*asked, "--count"]) == 0
    assert "in steps" in capsys.readouterr().out


def test_rows_that_are_made_some_at_a_time_are_those_of_all_columns() -> None:
    columns = [np.arange(5) + number for number in range(len(fields(Exposures)))]
    found = {"en": Exposures(*columns), "code": Exposures(*columns[::-1])}
    made = [*exposure_rows(found, 2)]
    assert made == [*exposure_rows(found)]
    assert [row["document"] for row in made] == [*columns[0], *columns[-1]]


def test_counts_have_engines_and_no_shards(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(resumed), "--source", str(resumed.parent / "code"), "--steps", ":12"]
    asked += [word for number in range(50) for word in ("--document", str(number))]
    for shown in (["--count"], ["--count", "--json"]):
        assert main(["where", *asked, *shown]) == 0
        expected = capsys.readouterr().out
        assert main(["where", *asked, *shown, "--workers", "2"]) == 0
        assert capsys.readouterr().out == expected
    assert len(json.loads(expected)["documents"]) == 50
    assert expected == json.dumps(json.loads(expected)) + "\n"
    for command in (["where", *asked, "--count"], ["where", *asked], ["account", str(resumed)],
                    ["account", str(resumed), "--repeats"], ["account", str(resumed), "--card"],
                    ["account", str(resumed), "--figure", "epochs", "--to", "a.svg"]):  # fmt: skip
        assert main([*command, "--shard", "0/2"]) == 2
        assert "shard: a count needs the results of all parts; name an engine instead" in capsys.readouterr().err
    for command, flag in ((["where", *asked], "count"), (["account", str(resumed)], "repeats")):
        assert main([*command, "--engine", "local"]) == 2
        assert f"only with --{flag}, which workers make" in capsys.readouterr().err


@pytest.fixture(scope="module")
def changed(resumed: Path) -> Path:
    """A third run that follows at step 9, over one of the two sources, from its first sample on."""
    run = binidx.Run.load(str(resumed))
    config = replace(run.config, blend=([f"{resumed.parent}/code"], None))
    follows = {"first_step": 9, "consumed_samples": 0, "earlier_samples": 72, "previous": str(resumed)}
    file = resumed.parent / "changed.json"
    replace(run, config=config, sizes=[168, 0, 0], **follows).save(str(file))
    return file


def test_exposures_and_the_card_are_those_of_the_history(
    changed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listed = [(f"{changed.parent}/{name}", number) for name in ("en", "code") for number in (3, 7, 50)]
    (tmp_path / "list.txt").write_text("".join(f"{name}\t{number}\n" for name, number in listed))
    asked = [str(changed), "--documents", f"{tmp_path}/list.txt", "--steps", ":15"]
    reads = rows(capsys, "where", *asked)
    assert {row["source"] for row in reads if row["step"] < 9} == {name for name, _ in listed}
    assert {row["source"] for row in reads if row["step"] >= 9} == {listed[-1][0]}
    (found,) = rows(capsys, "where", *asked, "--count")
    assert [(row["source"], row["document"]) for row in found["documents"]] == listed
    for row in found["documents"]:
        pieces = [
            (each["step"], each["trained"], min(doc["dst"] + doc["len"], 24) - doc["dst"])
            for each in reads if each["source"] == row["source"]
            for doc in each["docs"] if doc["doc"] == row["document"] and doc["len"]
        ]  # fmt: skip
        own = [piece for piece in pieces if piece[2] > 0]
        steps = [step for step, *_ in own]
        assert (row["samples"], row["samples_trained"]) == (len(own), sum(trained for _, trained, _ in own))
        assert (row["first_step"], row["last_step"]) == (min(steps, default=None), max(steps, default=None))
        assert row["tokens"] == sum(tokens for _, _, tokens in own)
    (card,) = rows(capsys, "account", "--card", str(changed), "--steps", ":15")
    (accounts,) = rows(capsys, "account", str(changed), "--steps", ":15")
    assert (card["runs"], card["tokens_read"]) == (3, 15 * 8 * 24)
    assert [(each["source"], each["tokens_read"]) for each in card["sources"]] == [
        (each["source"], each["tokens_read"]) for each in accounts
    ]
    (tmp_path / "list.txt").write_text(f"{changed.parent}/fr\t1\n")
    assert main(["where", "--count", *asked]) == 2
    assert "fr, needs the prefix of one of 2 sources" in capsys.readouterr().err


def test_spikes_of_a_history_are_those_of_the_steps_that_were_trained(
    changed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rng, folders = np.random.default_rng(0), [f"{tmp_path}/{name}" for name in "abc"]
    for folder, first, steps in zip(folders, (0, 40, 0), (range(8), range(5, 12), range(9, 26)), strict=True):
        recorder = LossRecorder(folder)
        for step in steps:
            spike = 5 * (folder != folders[2] and step in (5, 10)) + 5 * (folder == folders[2] and step == 22)
            recorder.record(first + (step - steps[0]) * 8, 2 + spike + 0.01 * rng.random(8))
        recorder.close()
    given = [option for folder in folders for option in ("--losses", folder)]
    (found,) = rows(capsys, "spikes", str(changed), *given, "--window", "12")
    assert [(spike["step"], spike["last_step"]) for spike in found["spikes"]] == [(22, 22)]
    assert {sample["source"] for sample in found["spikes"][0]["samples"]} == {f"{changed.parent}/code"}
    (found,) = rows(capsys, "spikes", str(changed), *given, "--window", "12", "--steps", ":22")
    assert found["spikes"] == []
    assert main(["spikes", str(changed), *given, "--window", "12", "--tokenizer", f"{tmp_path}/none.json"]) == 2
    assert f"{tmp_path}/none.json: no such file" in capsys.readouterr().err
    (found,) = rows(capsys, "spikes", str(changed), *given, "--window", "12", "--threshold", "1e9")
    assert found["spikes"] == []
    assert main(["spikes", str(changed), *given[:2]]) == 2
    assert "two runs of the history wrote losses of the same positions" in capsys.readouterr().err
    assert main(["spikes", str(changed), *given[:4]]) == 2
    assert "found 2 folders, needs one, or one of each of 3 runs" in capsys.readouterr().err
    assert main(["spikes", str(changed)]) == 2
    assert "losses: no such object" in capsys.readouterr().err


def test_a_history_is_accounted_and_exported(resumed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["account", str(resumed), "--repeats"]) == 0
    out = capsys.readouterr().out
    assert "tokens trained" in out
    assert out.endswith("consumed_train_samples 120, skipped_train_samples 16\n")
    (found,) = rows(capsys, "account", str(resumed), "--consumed-samples", "64", "--repeats")
    assert sum(row["samples_read"] for row in found) == 64
    assert sum(row["samples_trained"] for row in found) == 48
    assert main(["order", str(resumed), "--to", str(tmp_path)]) == 2
    assert "--steps-per-file: found none" in capsys.readouterr().err
    assert main(["order", str(resumed), "--to", str(tmp_path), "--steps-per-file", "4"]) == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name[6:25] for file in files[:3]] == [
        "000000000-000000004",
        "000000004-000000005",
        "000000005-000000008",
    ]
    tables = [parquet.read_table(file) for file in files]
    assert sorted(sample for table in tables for sample in table["sample"].to_pylist()) == list(range(120))
    assert tables[2]["trained"].to_pylist() == [True] * 8 + [False] * 16
    assert pa.concat_tables(tables)["trained"].to_pylist().count(False) == 16


def test_a_prefix_needs_no_file(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prefix, saved = str(run_file.parent / "en"), str(tmp_path / "saved.json")
    sizes = ["--sequence-length", "24", "--world", "2", "--micro-batch-size", "2"]
    binidx.save_run(binidx.load_dataset(prefix, 24), saved, data_parallel_size=2, micro_batch_size=2)
    assert rows(capsys, "trace", prefix, "--steps", "1", *sizes) == rows(capsys, "trace", saved, "--steps", "1")
    assert rows(capsys, "account", prefix, *sizes) == rows(capsys, "account", saved)
    assert main(["plan", prefix, *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == len(binidx.Run.load(saved).build()[0]) // 4


def test_a_run_that_follows_itself_is_an_error(
    resumed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = replace(binidx.Run.load(str(resumed)), previous=f"{tmp_path}/b.json")
    run.save(f"{tmp_path}/a.json")
    replace(run, previous=f"{tmp_path}/a.json").save(f"{tmp_path}/b.json")
    assert main(["trace", f"{tmp_path}/a.json", "--steps", "6"]) == 2
    assert "previous: " in (err := capsys.readouterr().err)
    assert "needs a run from before step 5" in err
    replace(run, first_step=6, previous=str(resumed)).save(f"{tmp_path}/late.json")
    replace(run, first_step=5, previous=f"{tmp_path}/late.json").save(f"{tmp_path}/c.json")
    assert main(["where", f"{tmp_path}/c.json", "--document", "1", "--source", "en"]) == 2
    assert "late.json begins with step 6, needs a run from before step 5" in capsys.readouterr().err
