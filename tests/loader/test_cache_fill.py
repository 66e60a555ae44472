"""A loader fills the disk cache while it serves: the same samples, and a second pass that moves no token."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

import binidx
from binidx import RunOrder
from binidx.corpus.convert import convert_dataset
from binidx.loader.cache_fill import ExtentPlaces, count_uses, open_filling, ranks_of_node, steps_ahead
from binidx.loader.samplers import build_sampler
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.read_planning import plan_reads, write_read_plan
from binidx.storage.cache import block_files
from binidx.storage.stats import usage, usage_since
from binidx.storage.usage_report import report_line


@pytest.fixture(scope="module")
def prefixes(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same dataset of three extents on the disk and in a bucket."""
    directory, rng = tmp_path_factory.mktemp("fill"), np.random.default_rng(0)
    lengths = rng.integers(1, 60_000, 300).tolist()
    documents = [Document(rng.integers(0, 999, length, np.uint16), [length], []) for length in lengths]
    local, remote = build_ours(directory / "en", documents, np.uint16), f"{s3.fresh()}/en"
    convert_dataset(local, remote, verify="size")
    return str(local), remote


def loader_of(prefix: str, indices: Path, workers: int = 0, **options: Any) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=4096, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(indices),
        storage_options={"binidx": options} if options else None,
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    return binidx.build_pretraining_data_loader(train, 0, 8, num_workers=workers)


def wait_for_fillings() -> None:
    for thread in threading.enumerate():
        if thread.name == "binidx-fill":
            thread.join(300)


@pytest.mark.parametrize("fill", ["auto", "all"])
def test_samples_are_the_local_ones_and_a_second_pass_moves_no_token(
    s3: Bucket, prefixes: tuple[str, str], tmp_path: Path, fill: str
) -> None:
    local, remote = prefixes
    needed = [*loader_of(local, tmp_path / "local")]
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        loader = loader_of(remote, tmp_path / "remote", cache_dir=str(tmp_path / "cache"), cache_fill=fill)
        before = usage()
        for found, right in zip(loader, needed, strict=True):
            assert_same_sample(found, right)
            wait_for_fillings()
        filled = usage_since(before)
        stored = Path(f"{local}.bin").stat().st_size
        assert (filled["filled extents"], filled["filled bytes"]) == (3, pytest.approx(stored, abs=2 << 16))
        assert "filled 3 extents, 18.9 MB" in report_line(filled)
        proxy.reset()
        for found, right in zip(loader, needed, strict=True):
            assert_same_sample(found, right)
        assert [each.path for each in proxy.log() if each.path.endswith(".bin")] == []
    never = loader_of(remote, tmp_path / "remote", cache_dir=str(tmp_path / "cache"), cache_fill="never")
    assert open_filling(never.dataset, never.batch_sampler) is None


def test_files_that_a_read_plan_opens_late_are_filled(prefixes: tuple[str, str], tmp_path: Path) -> None:
    run = loader_of(prefixes[1], tmp_path / "remote", cache_dir=str(tmp_path / "cache")).dataset
    order = RunOrder.of_dataset(run, GlobalOrder(BatchSchedule(8, 8, 1), len(run), "single"))
    write_read_plan(order, str(tmp_path / "plan"), plan_reads(order, range(order.num_steps() or 0)))
    planned = binidx.PlannedDataset(str(tmp_path / "plan"), run.config)
    loader = binidx.build_pretraining_data_loader(planned, 0, 8)
    before = usage()
    for number, found in enumerate(loader or ()):
        wait_for_fillings()
        if number % 32 == 0:
            assert_same_sample({"tokens": found["tokens"][0]}, {"tokens": run[8 * number]["tokens"]})
    assert usage_since(before)["filled extents"] == 3


def test_a_cache_in_memory_is_filled_by_one_worker_for_all(
    prefixes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_files, "SHARED_MEMORY", str(tmp_path))
    local, remote = prefixes
    loader = loader_of(remote, tmp_path / "remote", workers=2, cache_dir="memory")
    for found, right in zip(loader, loader_of(local, tmp_path / "local"), strict=True):
        assert_same_sample(found, right)
    assert [*(tmp_path / f"binidx-{os.getuid()}" / "cache" / "objects").iterdir()] != []


def test_uses_are_those_of_all_samples_of_the_node(prefixes: tuple[str, str], tmp_path: Path) -> None:
    dataset = loader_of(prefixes[1], tmp_path / "remote", cache_dir=str(tmp_path / "cache")).dataset
    sampler = build_sampler("single", dataset, 64, 4, 5, 8)
    places, steps = ExtentPlaces(dataset.token_readers()), steps_ahead(sampler)
    read = count_uses(dataset, sampler, steps, range(4, 8), places)
    used, first = np.zeros(3), {}
    for step in range(2, len(dataset) // 32):
        for _, ranges, _ in dataset.locate_bytes(np.arange(step * 32 + 16, step * 32 + 32)):
            touched = np.concatenate([np.arange(*each, 2) for each in ranges.tolist()]) >> 23
            used += 2 * np.bincount(touched, minlength=3)
            first = dict.fromkeys(touched.tolist(), step - 2) | first
    assert read.used.tolist() == used.tolist()
    assert read.first.tolist() == [first[number] for number in range(3)]
    in_pieces = count_uses(dataset, sampler, steps, range(4, 8), places, samples_at_once=16)
    assert in_pieces.used == pytest.approx(read.used, rel=0.2)


def test_an_endless_sampler_reads_the_rest_of_its_epoch_and_then_the_others() -> None:
    assert steps_ahead(build_sampler("single", range(40), 12, 2, 0, 2)).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert steps_ahead(build_sampler("cyclic", range(20), 32, 2, 0, 2)).tolist() == [8, 9, 5, 6, 7]


def test_the_ranks_of_a_node_follow_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_of_node(5, 8) == range(5, 6)
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_node(4, 8) == range(4, 8)
    assert ranks_of_node(9, 16) == range(8, 16)
    assert ranks_of_node(0, 1) == range(1)
