"""binidx plan: what it tells before a run is what the run then does, and it hardly reads anything for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import Proxy, latency_proxy

import binidx
from binidx import RunOrder
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.dataset.staged import Stage
from binidx.run.provenance.accounts import account
from binidx.tools import main

COUNTS = {"en": 20_000, "code": 9_000, "tiny": 40}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    rng = np.random.default_rng(0)
    for name, count in COUNTS.items():
        lengths = rng.integers(1, 60, count).tolist()
        documents = [Document(rng.integers(1, 500, length, dtype=np.uint16), [length], [0]) for length in lengths]
        build_ours(directory / name, documents, np.uint16, multimodal=False)
    return directory


@pytest.fixture(scope="module")
def remote(local: Path, s3: Bucket) -> str:
    base = s3.fresh()
    convert_dataset(local / "en", f"{base}/en", way=StorageFormat(checksums=True))
    convert_dataset(local / "code", f"{base}/code", way=StorageFormat(codec="zstd"))
    return base


@pytest.fixture(scope="module")
def proxy(s3: Bucket) -> Iterator[Proxy]:
    with latency_proxy(s3.server.endpoint, delay_ms=10) as found, found.in_environment():
        yield found


def save(directory: Path, blend: Any, sizes: Any = (30_000, 100, 100), **changes: Any) -> Path:
    names = changes.keys() - binidx.Run.__dataclass_fields__.keys()
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 16, "blend": blend, "split": "98,1,1", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        "path_to_cache": f"{directory}/cache", **{name: changes.pop(name) for name in names},
    })  # fmt: skip
    path = directory / "run.json"
    given = {"micro_batch_size": 4, "data_parallel_size": 2, "global_batch_size": 16, **changes}
    binidx.Run(config, [*sizes], **given).save(str(path))
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int | None = 0) -> str:
    assert main(["plan", *map(str, arguments)]) in ({0, 1} if status is None else {status})
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int | None = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(capsys, *arguments, "--json", status=status))
    return found


def states(found: dict[str, Any]) -> list[str]:
    return [row["cache"] for row in found["indices"]]


BLENDS: dict[str, Any] = {
    "alone": (["en"], None), "weighted": (["en", "code"], [0.7, 0.3]), "whole": (["en", "code"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", BLENDS)
def test_samples_epochs_and_sizes_are_those_of_the_run(
    name: str, local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes, weights = BLENDS[name]
    path = save(tmp_path, ([f"{local}/{each}" for each in prefixes], weights))
    found = told(capsys, path)
    assert not (tmp_path / "cache").exists()

    run = binidx.Run.load(str(path))
    built: list[Any] = run.build()
    datasets = [each for split in built for each in (split, *getattr(split, "datasets", ()))]
    assert [row["samples"] for row in found["indices"]] == [len(each) for each in datasets]
    assert [row["epochs"] for row in found["indices"]] == [getattr(each, "num_epochs", None) for each in datasets]
    assert found["steps"] == run.reading_order.num_steps()
    order = RunOrder.of(run)
    accounts = account(order, order.num_steps() or 0)
    for source, truth in zip(found["sources"], accounts, strict=True):
        assert (source["documents"], source["tokens"]) == (truth.documents, truth.tokens)
        assert source["epochs"] == pytest.approx(truth.epochs_read, rel=0.01)
    for row in (each for each in told(capsys, path)["indices"] if each["cache"] not in ("not kept", "missing")):
        files = [*(tmp_path / "cache").glob(f"*-{'Blended' if 'blend' in row['source'] else 'GPT'}*-{row['split']}-*")]
        assert row["num_bytes"] in [
            sum(file.stat().st_size for file in files if file.name.startswith(stem) and file.suffix == ".npy")
            for stem in {file.name.partition("-")[0] for file in files}
        ]


def test_it_reads_neither_an_idx_nor_an_array(
    remote: str, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"{remote}/cache"
    path = save(tmp_path, ([f"{remote}/en", f"{remote}/code"], [0.7, 0.3]), path_to_cache=cache)
    assert set(states(told(capsys, path))) == {"missing", "not kept"}
    assert main(["prepare", "index", str(path)]) == 0
    capsys.readouterr()
    proxy.reset()
    found = told(capsys, path)
    assert set(states(found)) == {"there", "not kept"}
    log = proxy.log()
    read = {end: sum(each.bytes for each in log if each.path.endswith(end)) for end in (".idx", ".npy")}
    assert read[".npy"] == 0
    assert read[".idx"] < 4096  # of 420 kB: neighbouring pointers share a request
    assert {each.method for each in log} <= {"GET", "HEAD"}
    en, code = found["sources"]
    assert (en["checked"], en["compressed"], code["checked"], code["compressed"]) == (True, False, False, True)
    assert found["link"]["latency_seconds"] < 3
    assert found["link"]["latency_seconds"] >= 0.01
    assert found["dollars"]["s3"] == pytest.approx(found["requests"] * 0.4e-6)


def test_a_stale_cache_is_told(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, ([f"{local}/en"], None))
    binidx.Run.load(str(path)).build()
    manifest = next((tmp_path / "cache").glob("*-train-binidx.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"random_seed": 1', b'"random_seed": 2'))
    found = told(capsys, path)
    assert states(found)[0] == "stale"
    assert any("index stale" in each for each in found["cautions"])


def test_growth_that_changes_the_order_is_told_before(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, ([f"{local}/en"], None), cache_small_indices=True)
    binidx.Run.load(str(path)).build()
    most = told(capsys, path)["same_order_up_to"]
    run = binidx.Run.load(str(path))
    for size, changed in ((most, False), (most + 1, True)):
        longer = binidx.Run(run.config, [size, 100, 100], 4, 2, global_batch_size=16)
        longer.save(str(tmp_path / "longer.json"))
        cautions = told(capsys, tmp_path / "longer.json")["cautions"]
        assert any("each sample gets another place" in each for each in cautions) == changed


def test_a_run_that_reads_more_than_it_requests_may_grow_to_less_than_it_reads(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, ([f"{local}/en"], None), (50_000, 0, 0), split="1,0,0")
    found, text = told(capsys, path), " ".join(call(capsys, path).split())
    samples, tokens, most = found["samples"], found["tokens"], found["same_order_up_to"]
    assert 50_000 < most < samples  # of two epochs; the second is shuffled by itself up to 80 % of its samples
    requested = "50,000 samples requested, and the rest of their last epoch"
    assert f"train {samples:,} samples of 16 tokens, {tokens:,} in all: {requested} steps" in text
    assert f"may grow to {most:,} requested samples; a request for more reorders all of them" in text


def test_what_a_person_would_want_to_know(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blend = ([f"{local}/en", f"{local}/tiny"], [0.5, 0.5])
    path = save(tmp_path, blend, (20_003, 0, 0), split="1,0,0", rampup_batch_size=(8, 8, 100))
    cautions = "\n".join(told(capsys, path)["cautions"])
    assert re.search(r"tiny: read \d+\.\d times; after about 4 passes", cautions)
    assert "the batch grows from 8 to 16 samples in 2 stages, until step" in cautions
    assert re.search(r"the last \d+ samples fill no step of 16", cautions)
    path = save(tmp_path, ([f"{local}/en"], [1.0]), (20_001, 0, 0), split="1,0,0")
    assert "the last sample fills no step of 16, and is not read" in told(capsys, path)["cautions"]
    path = save(tmp_path, ([f"{local}/tiny"], None), (5, 5, 5), split="98,1,1")
    cautions = "\n".join(told(capsys, path)["cautions"])
    assert "one micro-batch of each rank needs" in cautions or "tiny" in cautions
    path = save(tmp_path, ([f"{local}/en"], None), (20_003, 0, 0), dataloader_type="cyclic")
    found = told(capsys, path)
    assert found["steps"] is None
    assert re.search(r"cyclic: \d+ samples fill no micro-batch", "\n".join(found["cautions"]))


def test_a_split_without_samples_is_told(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, ([f"{local}/tiny", f"{local}/en"], None), (100, 10, 10), split="99,0.5,0.5")
    refused = f"{local}/tiny, valid: no sample in 0 documents of 0 tokens; a blend refuses it"
    assert refused in told(capsys, path)["cautions"]
    path = save(tmp_path, ([f"{local}/tiny", f"{local}/en"], [0.5, 0.5]), (100, 0, 0), split="99,0.5,0.5")
    assert not any("no sample in" in each for each in told(capsys, path)["cautions"])
    path = save(tmp_path, ([f"{local}/tiny", f"{local}/en"], [1e-300, 1e300]), (100, 10, 0), split="99,0.5,0.5")
    assert [each for each in told(capsys, path)["cautions"] if "no sample in" in each] == [refused]  # a share of 0.0
    path = save(tmp_path, ([f"{local}/tiny"], None), (8, 5, 5), split="99,0.5,0.5")
    assert any("check the split and the data" in each for each in told(capsys, path)["cautions"])


def test_a_cache_smaller_than_an_epoch_is_named(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, ([f"{remote}/en"], None), (64, 0, 0))
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path / "disk"))
    for num_bytes, small in (("1000", True), ("1GB", False)):
        monkeypatch.setenv("BINIDX_CACHE_BYTES", num_bytes)
        assert any("chunks that do not fit" in each for each in told(capsys, path)["cautions"]) is small
    text = " ".join(call(capsys, path).split())
    assert re.search(rf"cache fill \S+ \S+ a node, 1 request, .* of {remote}/en: a node reads .* times its bytes", text)
    monkeypatch.setenv("BINIDX_CACHE_FILL", "never")
    assert "cache fill" not in call(capsys, path)


def test_a_store_that_is_too_far_for_the_speed_is_told(
    remote: str, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What is small stays in memory, so one process that reads little of it asks for each of its chunks.
    path = save(tmp_path, ([f"{remote}/en"], None), (64, 0, 0))
    text = "\n".join(told(capsys, path, "--tokens-per-second", 1e9, status=1)["cautions"])
    assert re.search(r"a rank needs .* samples/s, and can have .* of this store: 128 requests in flight", text)
    assert not re.search("of this store", "\n".join(told(capsys, path, "--tokens-per-second", 10)["cautions"]))


def test_a_fleet_that_asks_more_than_a_bucket_grants_is_told_before(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save(tmp_path, ([f"{remote}/en"], None))
    bucket = "/".join(remote.split("/")[:3])
    slow = told(capsys, run, "--tokens-per-second", 16_000)
    [rate] = slow["request_rates"]
    assert (rate["place"], rate["limit"]) == (bucket, 5_500)
    assert rate["requests_per_second"] == pytest.approx(slow["requests"] * 16_000 / slow["tokens"])
    busy = f"{bucket}: .* requests/s of all ranks, s3 publishes 5,500 for a prefix, which S3 divides"
    assert not any(re.match(busy, caution) for caution in slow["cautions"])
    fast = told(capsys, run, "--tokens-per-second", 16e9, "--nodes", 1_000, status=1)
    assert fast["request_rates"][0]["requests_per_second"] == pytest.approx(1e6 * rate["requests_per_second"])
    assert any(re.match(busy, caution) for caution in fast["cautions"])
    assert fast["start"]["bytes_of_all_nodes"] == 1_000 * slow["start"]["bytes_of_all_nodes"] > 0
    printed = call(capsys, run, "--tokens-per-second", 16e9, "--nodes", 1_000, status=1)
    assert f"requests of all ranks to {bucket}, 5,500 published" in " ".join(printed.split())
    assert re.search(
        r"to start [\d,]+ HEAD, 0 LIST, [\d,]+ GET to .* at least [\d.]+ s at 5,500 a second", " ".join(printed.split())
    )
    assert not told(capsys, run)["request_rates"]


def rates(found: dict[str, Any]) -> dict[str, float]:
    """Requests a second to each folder, one source after the other."""
    folders: dict[str, float] = {}
    for source in found["sources"]:
        folder = source["prefix"].rpartition("/")[0]
        folders[folder] = folders.get(folder, 0.0) + source["requests"] * 16_000_000 / found["tokens"]
    return folders


def test_the_limit_holds_for_a_partition_as_far_as_names_tell(
    local: Path, s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, speed = s3.fresh(), ("--tokens-per-second", 16_000_000)
    apart = [f"{base}/{number}/en" for number in range(6)]
    together = [f"{base}/all/en-{number}" for number in range(6)]
    for prefix in (*apart, *together):
        convert_dataset(local / "code", prefix, verify="size")
    equal, large = [1.0] * 6, [12.0, *[1.0] * 5]
    for prefixes, weights in ((apart, equal), (apart, large), (together, equal), ([*apart[:3], *together[:3]], large)):
        run = save(tmp_path, (prefixes, weights), (60_000, 0, 0))
        found = told(capsys, run, *speed, status=None)
        [rate], folders = found["request_rates"], rates(found)
        assert rate["partitions"] == len(folders)
        assert rate["requests_per_second"] == pytest.approx(sum(folders.values()))
        assert rate["requests_per_second_to_busiest"] == pytest.approx(max(folders.values()))
        over = max(folders.values()) > 5_500
        assert over == any("and refuses the rest" in line for line in found["cautions"])
        assert over == any("more pairs about as large" in line for line in found["advice"])
        call(capsys, run, *speed, status=int(over))
        most = max(source["requests"] * 16_000_000 / found["tokens"] for source in found["sources"])
        for count in (1, 4, 64):  # of the same bucket, divided by its provider: one object is never divided
            [divided] = told(capsys, run, *speed, "--partitions", count, status=None)["request_rates"]
            needed = max(rate["requests_per_second"] / count, most)
            assert divided["requests_per_second_to_busiest"] == pytest.approx(needed)


def test_what_all_ranks_ask_at_once_is_told(remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, ([f"{remote}/en"], None))
    found = told(capsys, path, "--world", 4)
    a_sample = found["requests"] / found["samples"]
    step, begin = found["samples_at_once"].values()
    assert (step, begin > step) == (16, True)
    text = " ".join(call(capsys, path, "--world", 4).split())
    assert f"{a_sample * step:,.0f} requests to {remote[: remote.rfind('/')]} when all ranks read a micro-batch" in text
    assert f"in lock-step, {a_sample * begin:,.0f} when they begin, at least 0.0 s as published" in text
    link = found["link"]["bytes_per_second"]
    assert found["index_files_seconds"] == pytest.approx(found["disk_of_a_node"]["index_files_bytes"] / link)
    many = ("--world", 40_000, "--global-batch-size", 160_000)
    late = told(capsys, save(tmp_path, ([f"{remote}/en"], None), (600_000, 0, 0)), *many)
    assert any("requests at once when all ranks begin to read" in line for line in late["cautions"])


def test_stages_and_virtual_merges_are_planned(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merge_virtually([str(local / "en"), str(local / "code")], str(tmp_path / "both"))
    stages = [
        Stage(([str(tmp_path / "both")], [1.0]), 1000),
        Stage(([str(tmp_path / "both"), str(local / "tiny")], [0.5, 0.5]), 2000),
    ]
    path = save(tmp_path, ([str(local / "en")], None), (0, 0, 0), split="1,0,0", stages=stages)
    found = told(capsys, path)
    assert (found["samples"], found["steps"]) == (2992, 187)
    assert [source["samples"] for source in found["sources"]] == [pytest.approx(2992 * part) for part in (2 / 3, 1 / 3)]
    assert found["sources"][0]["num_parts"] == 2
    assert found["sources"][0]["documents"] == COUNTS["en"] + COUNTS["code"]


@pytest.mark.parametrize("columns", [60, 160])
def test_a_person_sees_all_of_it(
    columns: int, remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = save(tmp_path, ([f"{remote}/en", f"{remote}/code"], [0.7, 0.3]))
    out = call(capsys, path, "--tokens-per-second", 50_000, "--nodes", 2)
    text = " ".join(out.split())
    assert "train 30,000 samples of 16 tokens, 480,000 in all" in text
    assert "steps 1,875 steps of 16 samples on 2 ranks, 4 at a time; 2 nodes" in text
    assert re.search(r"70\.0%,? (documents )?19,600,? .*[\d.]+ [KM]iB checked", text)
    assert re.search(r"30\.0%,? (documents )?8,820,? .*[\d.]+ [KM]iB zstd", text)
    assert re.search(r"an hour [\d,]+ requests, .*iB at 50,000 tokens/s", text)
    assert re.search(r"the run [\d,]+ requests, [\d.]+ [KM]iB, \$0\.0\d at list price", text)
    assert all(len(line) <= columns for line in out.splitlines()), max(out.splitlines(), key=len)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--nodes", "-1"], "need numbers above 0"), (["--tokens-per-second", "0"], "need numbers above 0")],
)
def test_a_call_that_cannot_be_is_an_error(
    arguments: list[str], message: str, local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, ([f"{local}/en"], None))
    assert main(["plan", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    path = save(tmp_path, ([f"{local}/nothing"], None))
    assert main(["plan", str(path)]) == 2
    assert "nothing.bin" in capsys.readouterr().err


FILES = ("", ".idx", ".bin.zst")
COMMANDS = {
    "plan": [], "trace": ["--steps", "0"], "where": ["--document", "1"], "account": [], "order": ["--to", "out"],
    "prepare bake": ["--to", "out"], "prepare read-plan": ["--to", "out"], "prepare index": [],
}  # fmt: skip


def test_a_dataset_instead_of_a_run_is_told_how_a_run_is_written(
    local: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # An index cache beside the data, its default place: the prefix is a folder, too.
    for prefix in (f"{local}/tiny", f"{remote}/code"):
        load_dataset_with_a_cache(prefix)
    for name, rest in COMMANDS.items():
        for uri in (f"{local}/tiny", *(f"{remote}/code{end}" for end in FILES)):
            assert main([*name.split(), uri, *rest]) == 2
            message = capsys.readouterr().err
            assert message.startswith(
                f"binidx {name.split()[0]}: {uri}: not the file of a run (found a dataset, needs JSON"
            )
            assert "--sequence-length" in message
            assert "binidx.save_run(loader, 'run.json', global_batch_size=N)" in message


def load_dataset_with_a_cache(prefix: str) -> None:
    binidx.load_dataset(prefix, 16, tokenizer=TOKENIZER, cache_small_indices=True)
