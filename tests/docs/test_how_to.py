"""What the pages of docs/how-to and docs/tutorials show runs, and does what they say.

A page with blocks of Python has a test with its name.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import random
import re
import shutil
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers import trained_tokenizers
from helpers.gpt_data import Tokenizer, write_with_megatron
from helpers.gpt_samples import config
from helpers.lineage_data import build_with_lineage, read_lineage
from helpers.pages import DOCS, python_blocks, read_page, run_blocks
from helpers.preprocess_jobs import corpus, files_of, theirs, tokenizer_path, write_lines
from helpers.registering import registered_order
from helpers.shuffle_oracle import new_order
from helpers.traceable_runs import write_source

import binidx
from binidx.corpus.shuffle import shuffle_datasets
from binidx.errors import IndexBuildError
from binidx.format.idx import SequenceIndex
from binidx.index.document_sample import plan_epochs
from binidx.run.plan.forecast import blend_bytes, build_seconds, gpt_index_bytes
from binidx.run.run_file import SavedTokenizer
from binidx.tools import main

PAGES = sorted(
    str(path.relative_to(DOCS).with_suffix(""))
    for part in ("how-to", "tutorials")
    for path in (DOCS / part).glob("*.md")
)
EXAMPLES = DOCS.parent / "examples"
ELSEWHERE = {"tutorials/text-to-step", "how-to/publish-a-package", "how-to/twenty-questions"}
"""Pages with a test module of their own."""


def test_every_page_with_python_is_run() -> None:
    shown = {page for page in PAGES if python_blocks(read_page(page))} - ELSEWHERE
    assert {f"test_{page.partition('/')[2].replace('-', '_')}" for page in shown} <= globals().keys()


# Data in memory of the loaders' pages


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_source(folder / name, random.Random(name), False) for name in ("en", "code", "math")}


def train_of(source: str, **options: Any) -> Any:
    made = config(([source], None), split="1,0,0", **options)
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [300, 0, 0], lambda: True, made).build()[0]


@pytest.fixture
def names(sources: dict[str, str]) -> dict[str, Any]:
    train = train_of(sources["en"])
    return {"binidx": binidx, "config": config(([sources["en"]], None)), "train": train, **sources}


def test_a_tool_of_the_core(
    sources: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["longest.py", f"{sources['en']}.idx"])
    run_blocks("reference/core", {})
    printed = [
        [int(word.replace(",", "")) for word in line.split()[:2]] for line in capsys.readouterr().out.splitlines()
    ]
    data = binidx.IndexedDataset(sources["en"])
    lengths = [
        sum(len(data[sequence]) for sequence in range(*pair))
        for pair in itertools.pairwise(data.document_indices.tolist())
    ]
    assert [length for _, length in printed] == sorted(lengths, reverse=True)[:5]
    assert all(lengths[document] == length for document, length in printed)


def test_load_data(sources: dict[str, str]) -> None:
    names = run_blocks("how-to/load-data", dict(sources))
    shown = re.search(r"^    config = .*?\n\n", page := read_page("how-to/load-data"), re.S | re.M)
    assert shown is not None, page
    folder = str(Path(sources["en"]).parent)
    code = shown[0].strip().replace("\n    ", "\n").replace("s3://corpus", folder)
    assert names["short"].as_code() == code
    assert {each: tuple(names["batch"][each].shape) for each in ("tokens", "labels", "loss_mask", "position_ids")} == (
        dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), (8, 64))
    )
    assert names["short"].read_tokens([0, 1, 2]).shape == (3, 65)


def test_resume(names: dict[str, Any]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_blocks("how-to/resume", names)
        signal.raise_signal(signal.SIGTERM)
        assert names["signals"] == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert names["state"]["consumed_samples"] == 8
    assert (names["second"]["tokens"] == names["again"]["tokens"]).all()
    assert not (names["first"]["tokens"] == names["again"]["tokens"]).all()
    other = binidx.build_pretraining_data_loader(train_of(names["en"], random_seed=4), 0, 8)
    with pytest.raises(binidx.errors.ConfigError, match="resume: state is for fingerprint"):
        other.load_state_dict(names["state"])


def test_many_nodes(names: dict[str, Any]) -> None:
    run_blocks("how-to/many-nodes", names)
    assert (names["rank"], names["size"]) == (0, 1)
    assert (next(iter(names["loader"]))["tokens"][0] == names["train"][0]["tokens"]).all()


def test_validate(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def loss_and_tokens(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = batch["loss_mask"]
        losses = (model(batch["tokens"][..., None] / 1e5) - batch["labels"][..., None] / 1e5) ** 2
        return (losses[..., 0] * mask).sum(), mask.sum()

    names |= {"en_valid": names["math"], "code_valid": names["code"], "loss_and_tokens": loss_and_tokens}
    names["model"] = torch.nn.Linear(1, 1)
    names = run_blocks("how-to/validate", names)
    assert len(names["valid"]) == len(names["full_valid"]) == len(names["losses"]) == 2

    def run_from(*stops: int) -> list[str]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for step, stop in itertools.pairwise((0, *stops)):
            names["run"](model, optimizer, step, stop)
        return capsys.readouterr().out.splitlines()

    capsys.readouterr()
    whole = run_from(60)
    assert [line.partition("  loss")[0] for line in whole] == [
        f"step {step}  {name}" for step in (20, 40, 60) for name in ("en", "code")
    ]
    assert run_from(30, 60) == whole  # each evaluation reads what it would have read


def test_change_the_blend(names: dict[str, Any]) -> None:
    run_blocks("how-to/change-the-blend", names)
    page, lines = read_page("how-to/change-the-blend"), names["train"].proof.splitlines()
    shown = re.findall(r"^    (.*)$", page[page.index("print(train.proof)") :], re.M)
    shape, expected = (
        [re.sub(r"\S*/(\w+)  from its sample (\d+) of .*", r"\1 from \2", line) for line in each]
        for each in (lines, shown)
    )
    assert shape[:-1] == expected[:-1]
    assert shape[-1].startswith(expected[-1].removesuffix(" ..."))  # the page shortens it


def test_change_the_length(names: dict[str, Any]) -> None:
    names["train_of"] = lambda **options: train_of(names["en"], **options)
    train = run_blocks("how-to/change-the-length", names)["train"]
    assert [len(train[number]["tokens"]) for number in (0, 159, 160)] == [16, 16, 64]
    with pytest.raises(binidx.errors.ConfigError):
        binidx.LengthStagedDataset(names["windows"], [binidx.LengthStage(16, 161)])
    loader = binidx.build_pretraining_data_loader(train, 158, 4)
    with pytest.raises(RuntimeError, match="size"):
        next(iter(loader))


def test_pack_documents(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("how-to/pack-documents", names)
    assert capsys.readouterr().out.startswith("torch.Size([8]) tensor(")


def test_choose_an_order(sources: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "drop.txt").write_text("0\n3\n")
    lines = [{"source": sources[name], "document": n, "times": w} for name, n, w in (("en", 3, 3), ("code", 2, 0))]
    times = tmp_path / "times.jsonl"
    times.write_text("\n".join(map(json.dumps, lines)))
    names = run_blocks("how-to/choose-an-order", {**sources, "drop": f"{tmp_path}/drop.txt", "times": str(times)})
    assert 0 < len(names["train"]) < len(binidx.load_dataset(sources["en"], 64, num_samples=300))
    assert len(names["usual"]) == 2 * len(names["half"]) == 300
    check_repeated(names["Repeat"](str(times)), sources, tmp_path)


def check_repeated(option: Any, sources: dict[str, str], folder: Path) -> None:
    """Check the documents that one epoch of each source has with the option, and the option in a run file."""
    whole = binidx.load_dataset({sources["en"]: 0.5, sources["code"]: 0.5}, 64, num_samples=300, order=option)
    for name, number, times in (("en", 3, 3), ("code", 2, 0)):
        member = whole.wrapped.datasets[["en", "code"].index(name)]
        stored = binidx.IndexedDataset(sources[name])
        found = np.bincount(member.document_index, minlength=len(stored)) / member.num_epochs
        assert found.tolist() == [times if document == number else 1 for document in range(len(stored))]
    with registered_order("repeat", type(option)):
        binidx.save_run(whole, f"{folder}/run.json")
        saved = json.loads((folder / "run.json").read_text())["config"]["order"]
        assert saved == {"kind": "repeat", "times": option.times, "digest": option.read(None)[1]}
        again = binidx.Run.load(f"{folder}/run.json").build()[0]
        assert (again.read_tokens(range(300)) == whole.read_tokens(range(300))).all()
        text = Path(option.times).read_text()
        Path(option.times).write_text(text.replace("3", "4"))
        with pytest.raises(binidx.errors.ConfigError, match=r"times\.jsonl: another list"):
            binidx.Run.load(f"{folder}/run.json").build()
    Path(option.times).write_text(text)
    with pytest.raises(binidx.errors.ConfigError, match=r"times\.jsonl: found .*, needs a source of the run"):
        binidx.load_dataset(sources["math"], 64, num_samples=300, order=option)


def test_add_a_dataset(sources: dict[str, str]) -> None:
    names = run_blocks("how-to/add-a-dataset", dict(sources))
    part = names["train"].datasets[0]
    stored = binidx.IndexedDataset(sources["en"])
    for number in range(len(part.indices) + 2):
        document = stored[part.indices[number % len(part.indices)]]
        count = min(16, len(document))
        first, last = part[number]["tokens"].numpy()
        assert [*first[:count], *last[:count]] == [*document[:count], *document[-count:]]
    assert names["batch"]["tokens"].shape == (8, 2, 16)
    shorter = names["DocumentEndsConfig"](
        random_seed=1234, sequence_length=32, blend=sources["en"], split="1,0,0", num_tokens=2
    )
    build = binidx.BlendedMegatronDatasetBuilder(names["ShortEnds"], [9, 0, 0], lambda: True, shorter)
    tokens = next(iter(binidx.build_pretraining_data_loader(build.build()[0], 0, 1)))["tokens"]
    assert tokens[0, 0, :2].tolist() == stored[0][:2].tolist()
    assert not tokens[0, :, 2:].any()
    check_arrays(names["ArrayGPTDataset"], sources["en"])


def check_arrays(kind: Any, prefix: str) -> None:
    """Check that tokens in arrays are trained on like those of a `.bin`, and pickle without their data."""
    stored = binidx.IndexedDataset(prefix)
    sequences = [stored[number] for number in range(len(stored))]
    np.save(f"{prefix}.npy", np.concatenate(sequences))
    np.save(f"{prefix}.lengths.npy", np.array([*map(len, sequences)], np.int32))
    made = config(([prefix], None), split="1,0,0")
    found, needed = (
        binidx.BlendedMegatronDatasetBuilder(cls, [300, 0, 0], lambda: True, made).build()[0]
        for cls in (kind, binidx.GPTDataset)
    )
    assert (found.read_tokens(range(300)) == needed.read_tokens(range(300))).all()
    assert found.dataset.identity == stored.identity
    rebuild, arguments = found.dataset.__reduce__()
    assert (rebuild(*arguments).sequence_lengths == stored.sequence_lengths).all()


def test_cyclic(names: dict[str, Any]) -> None:
    names = run_blocks("how-to/cyclic", names)
    first, again = (next(iter(names["loader"]))["tokens"] for _ in range(2))
    assert first.shape == again.shape == (8, 8)
    assert len(names["epochs"][0]) == len(names["train"])


# Runs


def test_plan_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_tokenizers.save("gpt2", tmp_path)
    for name in ("en", "code"):
        with binidx.IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", np.uint16) as builder:
            for number in range(120):
                builder.add_document([number] * 200, [200])
            builder.finalize(f"{tmp_path}/{name}.idx")
    names = run_blocks("how-to/plan-a-run", {"folder": str(tmp_path)})
    assert [len(names[split]) for split in ("train", "valid", "test")] == [1000, 40, 10]
    assert main(["plan", f"{tmp_path}/run.json"]) == 0
    out = capsys.readouterr().out
    assert "15 steps of 64 samples on 4 ranks, 2 at a time" in out
    page = read_page("how-to/plan-a-run")
    for label in ("steps", "may grow", "index"):
        assert f"\n{label}" in out, label
        assert f"\n    {label} " in page, label


def test_the_sizes_before_there_is_data_are_those_of_a_plan() -> None:
    page = read_page("how-to/plan-a-run")
    rows = {row[0]: row[2:] for row in (line.strip("| ").split(" | ") for line in re.findall(r"^\| .*$", page, re.M))}
    units = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "ms": 1e-3, "s": 1.0}
    shown = {
        label: [float(number) * units[unit] for number, unit in map(str.split, cells)]
        for label, cells in rows.items()
        if len(cells) == 3 and cells[0] != "---:" and not cells[0].startswith("10^")
    }
    names = [".bin", ".idx", "index", "index of a blend", "a node's disk", "a `BINIDX_CACHE_DIR`", "time to build"]
    assert len(shown) == len(names)
    for column, documents in enumerate((10**6, 10**8, 10**9)):
        plan = plan_epochs(1000 * documents, 4096, None, add_extra_token=True, drop_last_partial=True)
        index, blend = gpt_index_bytes(documents, plan), blend_bytes(plan.num_samples)
        idx, tokens = SequenceIndex.file_bytes(documents, documents + 1), 2000 * documents
        needed = tokens, idx, index, blend, idx + index + blend, tokens, build_seconds(documents, plan)
        for label, name, size in zip(shown, names, needed, strict=True):
            assert label.strip("`").startswith(name.strip("`")), label
            assert shown[label][column] == pytest.approx(size, rel=0.02), label


def test_the_rates_to_begin_with_are_near_the_committed_ones() -> None:
    page = read_page("how-to/plan-a-run")
    results = min((DOCS.parent / "tests/bench/results").glob("*.json"))
    benches = json.loads(results.read_text())["benches"]
    ours = {row["work"]: row["ours"] for name in ("from_s3", "item_time") for row in benches[name]["rows"]}
    rates = {
        "from S3, 30 ms away, documents shuffled": ours["samples from S3, 30 ms away, documents shuffled"],
        "from S3, 30 ms away, each sample in one piece": ours["samples from S3, 30 ms away, contiguous"],
        "from a local file in the page cache": 1e6 / ours["a sample of a stacked micro-batch of 8, against the same"],
    }
    for work, rate in rates.items():
        samples, millions = re.findall(rf"^\| {work} \| ([\d,]+) \| ([\d.]+) million \|$", page, re.M)[0]
        assert int(samples.replace(",", "")) == pytest.approx(rate, rel=0.3), work
        assert float(millions) * 1e6 == pytest.approx(int(samples.replace(",", "")) * 4096, rel=0.05), work


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a run.json of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    with binidx.IndexedDatasetBuilder(f"{folder}/en.bin", np.uint16) as builder:
        for number in range(80):
            builder.add_document([number] * 30, [30])
        builder.finalize(f"{folder}/en.idx")
    tokenizer = SavedTokenizer.of(Tokenizer(pad=-5, eod=-6))
    described = config(([f"{folder}/en"], None), sequence_length=24, split="1,0,0", tokenizer=tokenizer)
    binidx.Run(described, [None, None, None], 2, 2, global_batch_size=8).save(f"{folder}/run.json")
    return str(folder)


def test_find_documents(saved_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_blocks("how-to/find-documents", {"folder": saved_run})
    assert found["table"].num_rows == 4
    assert "document " in capsys.readouterr().out
    readings, _ = found["order"].where(0, [7], found["order"].num_steps())
    assert set(found["seen"]) >= set(zip(*(each.tolist() for each in readings[:3]), strict=True))


def test_explore(saved_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_blocks("how-to/explore", {"folder": saved_run})
    assert len(found["rest"]) == 3
    assert (found["third"]["tokens"] == found["train"][2]["tokens"]).all()
    assert "── document " in capsys.readouterr().out
    assert Path(f"{saved_run}/epochs.pdf").stat().st_size > 1000


def test_bake(saved_run: str) -> None:
    found = run_blocks("how-to/bake", {"folder": saved_run})
    train, order = found["run"].build()[0], found["order"]
    assert (next(iter(found["loader"]))["tokens"][0] == train[order.trace(range(1))[0].sample[0]]["tokens"]).all()


def test_read_plan(saved_run: str) -> None:
    found = run_blocks("how-to/read-plan", {"folder": saved_run})
    train, order = found["run"].build()[0], found["order"]
    assert (next(iter(found["loader"]))["tokens"][0] == train[order.trace(range(1))[0].sample[0]]["tokens"]).all()


# Text and documents


def test_tokenize_text(tmp_path: Path) -> None:
    [code] = python_blocks(read_page("how-to/tokenize-text"))
    inputs = corpus(tmp_path / "in")
    with ThreadPoolExecutor(2) as executor:  # worker processes would import this module
        known = {"base": f"{tmp_path}/in", "tokenizer": tokenizer_path(), "executor": executor}
        exec(code.replace("workers=2", "executor=executor"), known)
    assert files_of(tmp_path / "in" / "out_text_document") == theirs(inputs, tmp_path / "theirs")


def test_shuffle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("en", "code")):
        build_with_lineage(tmp_path / name, 30, seed)
    run_blocks("how-to/shuffle", {"base": str(tmp_path)})
    assert capsys.readouterr().out == "60 1\n"


def test_search(saved_run: str) -> None:
    found = run_blocks("how-to/search", {"binidx": binidx, "folder": saved_run})["found"]
    assert found.document.tolist() == [7, 21]


def test_lineage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [build_with_lineage(tmp_path / name, 30, seed) for seed, name in enumerate(("en", "code"))]
    shuffle_datasets(sources, f"{tmp_path}/all", seed=1, memory_bytes=512 << 20)
    run_blocks("how-to/lineage", {"base": str(tmp_path)})
    rows = [row for source in sources for row in read_lineage(source)]
    assert capsys.readouterr().out.strip() == str({n: rows[m] for n, m in enumerate(new_order(1, 60)[:2])})


def test_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "the sea"}] * 5)
    shutil.copy(tokenizer_path(), tmp_path / "tokenizer.json")
    run_blocks("how-to/estimate", {"base": str(tmp_path)})
    assert re.fullmatch(r"(\d+) to \1 tokens, \d+ bytes\n", capsys.readouterr().out)


# Stores


def test_credentials(s3: Bucket, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"{s3.fresh()}/en"
    assert main(["convert", sources["en"], "--to", prefix]) == 0
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    server = {"key": s3.server.key, "secret": s3.server.secret, "endpoint": s3.server.endpoint}
    found = run_blocks("how-to/credentials", {"binidx": binidx, "prefix": prefix, **server})
    assert len(found["dataset"]) == len(binidx.IndexedDataset(sources["en"]))
    assert len(found["train"]) > 0


def test_debug_slow_reads(
    s3: Bucket,
    sources: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("binidx"), "level", logging.INFO)
    prefix = f"{s3.fresh()}/en"
    assert main(["convert", sources["en"], "--to", prefix]) == 0
    loader = binidx.load_dataset(prefix, 4).loader(2)
    stepped: list[Any] = []
    names = {"binidx": binidx, "itertools": itertools, "loader": loader, "train_step": stepped.append}
    try:
        found = run_blocks("how-to/debug-slow-reads", names)
    finally:
        logging.getLogger("binidx.requests").setLevel(logging.NOTSET)  # the page asks for DEBUG
    assert len(stepped) == 20
    assert re.search(r"[\d.]+% of the time waited\n", capsys.readouterr().out)
    next(iter(loader))
    assert any(re.search("requests? moved", record.getMessage()) for record in caplog.records)
    page = read_page("how-to/debug-slow-reads")
    told = {name for row in re.findall(r"^\| .*$", page, re.M) for name in re.findall(r"`([a-z_]+)`", row)}
    assert {"wait_seconds", "wait_share", "disk_hit_rate", "requests", "bytes_moved"} <= told & found["interval"].keys()


def test_the_page_of_trainers_shows_every_one() -> None:
    page = read_page("how-to/train-with")
    shown = re.findall(r'^ *``` { .python title="(.*)" }\n *--8<-- "(.*)"\n *```', page, re.M)
    trainers = {path.name for path in EXAMPLES.glob("*.py")} - {"compare_with_megatron.py", "common.py"}
    assert sorted(shown) == sorted((f"examples/{name}",) * 2 for name in trainers)


def example(name: str) -> Any:
    """The module of a file of examples/."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_the_comparison_with_megatron_names_the_first_value_that_differs() -> None:
    first_difference = example("compare_with_megatron").first_difference
    # So many names that no hash seed puts the first one first in a set.
    old = {"dataset_id": np.int16(0), "tokens": torch.arange(4), "mask": torch.zeros(1, 2, 2)}
    old |= {f"more_{number}": torch.arange(2) for number in range(50)}
    after = {name: value + 1 for name, value in old.items() if name.startswith("more")}
    for name, changed, needed in (
        ("dataset_id", np.int16(5), "dataset_id is 0, and 5 in binidx"),
        ("tokens", torch.tensor([0, 1, 7, 3]), "tokens is 2 at position 2, and 7 in binidx"),
        ("mask", torch.tensor([[[0.0, 0.0], [5.0, 0.0]]]), "mask is 0.0 at position 0, 1, 0, and 5.0 in binidx"),
    ):
        assert first_difference([old], [{**old, name: changed, **after}], [0]) == f"sample 0: {needed}"
        assert first_difference([old], [{**old, name: changed}], [0]) == f"sample 0: {needed}"
    assert first_difference([old], [old], [0]) is None
    lacking = {"tokens": old["tokens"]}
    assert (
        first_difference([{**lacking, "mask": 0}], [lacking], [0]) == "sample 0: has tokens, mask, and tokens in binidx"
    )


def test_move_a_megatron_run(tmp_path: Path, s3: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    compare, moved = example("compare_with_megatron").main, s3.fresh()
    for seed, name in enumerate(("en", "code")):
        lengths = np.random.default_rng(seed).integers(1, 60, 100).astype(np.int32)
        write_with_megatron(tmp_path / name, lengths, np.random.default_rng(seed))
        assert main(["convert", f"{tmp_path}/{name}", "--to", f"{moved}/{name}"]) == 0
    page = read_page("tutorials/move-a-megatron-run")
    [shown] = re.findall(r"python examples/compare_with_megatron.py (.*?)\n```", page, re.S)
    options = shown.replace("\\\n", "").replace("/data", str(tmp_path)).replace("s3://corpus", moved).split()
    small = ["--seq-length", "16", "--train-iters", "20", "--global-batch-size", "4", "--split", "8,1,1", "--eod", "0"]
    small += ["--eval-iters", "2", "--eval-interval", "10", "--first", "5", "--random", "5"]
    capsys.readouterr()
    assert compare([*options, *small, "--eod-mask-loss", "--reset-position-ids"]) == 0
    assert capsys.readouterr().out == "the same samples, bit for bit: train 10 of 80, valid 10 of 25, test 9 of 9\n"
    with pytest.raises(IndexBuildError, match="test split of 0 sequences"):  # Megatron would not return
        compare([*options, *small, "--split", "9,1,0.01"])
    swapped = ["--moved-data-path", "0.7", f"{moved}/code", "0.3", f"{moved}/en"]
    assert compare([*options, *small, *swapped]) == 1
    assert re.match(
        r"different: train, sample 0: \w+ is \d+ at position \d+, and \d+ in binidx\n", capsys.readouterr().out
    )
