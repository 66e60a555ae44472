"""Look-ahead over real datasets in a store: the samples are those that are read one by one, whatever the config."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.readahead_loaders import wait_for
from servers.latency_proxy import latency_proxy
from torch.utils.data import default_collate

import binidx
from binidx import RunOrder
from binidx.loader.cache_fill import open_forward
from binidx.loader.dataset_protocols import is_pure, remote_places
from binidx.loader.samplers import build_sampler
from binidx.packed.packed_files import PackedDataset, PackedFiles
from binidx.packed.packed_order import PackedRun, PackedSet
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.baking import bake, plan_bake
from binidx.storage import stats
from binidx.storage.open import open_object
from binidx.storage.requests.cancellation import Scope

FLAGS = ["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"]


def upload(directory: Path, base: str) -> list[str]:
    prefixes = []
    rng = np.random.default_rng(5)
    for i, dtype in enumerate((np.uint16, np.int32, np.uint16)):
        prefix = write_with_megatron(directory / f"s{i}", rng.integers(0, 60, 150).astype(np.int32), rng, dtype)
        for end in ("bin", "idx"):
            with fsspec.open(f"{base}/s{i}.{end}", "wb") as out:
                out.write(Path(f"{prefix}.{end}").read_bytes())
        prefixes.append(f"{base}/s{i}")
    return prefixes


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """In fsspec's memory: as remote as any other store, but for the waiting."""
    return upload(tmp_path_factory.mktemp("ahead"), "memory://ahead")


@pytest.fixture(scope="module")
def s3_prefixes(tmp_path_factory: pytest.TempPathFactory, s3: Any) -> list[str]:
    return upload(tmp_path_factory.mktemp("ahead-s3"), s3.fresh())


def build(prefixes: list[str], kind: type[binidx.GPTDataset] = binidx.GPTDataset, **changes: Any) -> Any:
    weights = None if len(prefixes) == 1 else [1.0 + i for i in range(len(prefixes))]
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 24, "blend": (prefixes, weights), "split": "1,0,0",
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        **changes,
    })  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(kind, [200, 0, 0], lambda: True, config).build()[0]


def served(dataset: Any, consumed: int, m: int, count: int = 10**6, **options: Any) -> list[dict[str, Any]]:
    loader = binidx.build_pretraining_data_loader(dataset, consumed, m, **options)
    assert loader is not None
    return [*islice(loader, count)]


def assert_same_batches(ours: list[dict[str, Any]], needed: list[dict[str, Any]]) -> None:
    assert len(ours) == len(needed) > 0
    for one, other in zip(ours, needed, strict=True):
        assert_same_sample(one, other)


def test_random_runs_are_the_same_with_and_without(prefixes: list[str]) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        flags = {flag: bool(rng.integers(2)) for flag in FLAGS}
        length = int(rng.integers(8, 40))
        dataset = build(
            prefixes[: rng.integers(1, 4)], sequence_length=length, random_seed=int(rng.integers(9)), **flags
        )
        m, size = (int(each) for each in rng.integers(1, 6, 2))
        run = {
            "consumed": int(rng.integers(0, len(dataset) // (m * size))) * m * size, "m": m,
            "data_parallel_rank": int(rng.integers(size)), "data_parallel_size": size,
            "dataloader_type": str(rng.choice(["single", "cyclic"])), "data_sharding": bool(rng.integers(2)),
        }  # fmt: skip
        needed = served(dataset, **run, look_ahead=0)
        assert_same_batches(served(dataset, **run), needed)
        assert_same_batches(served(dataset, **run, look_ahead=int(rng.integers(1, 20))), needed)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (1, "fork"), (2, "spawn"), (4, "fork")])
def test_workers_read_ahead_from_s3(s3_prefixes: list[str], num_workers: int, context: str | None) -> None:
    dataset = build(s3_prefixes)
    for kind in ("single", "cyclic"):
        needed = served(dataset, 16, 8, dataloader_type=kind, look_ahead=0)
        workers = {"num_workers": num_workers, "multiprocessing_context": context}
        assert_same_batches(served(dataset, 16, 8, dataloader_type=kind, **workers), needed)
        if context == "spawn":
            return  # each takes seconds to start


class OneByOne(binidx.GPTDataset):
    """Has samples of its own, made one by one."""

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        return {"number": np.int64(idx or 0), **super().__getitem__(idx)}


class Assembled(binidx.GPTDataset):
    def assemble(self, idx: Any, sequences: Any) -> Any:
        return super().assemble(idx, [sequence[::-1] for sequence in sequences])


@pytest.mark.parametrize("kind", [OneByOne, Assembled])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_datasets", [1, 3])
def test_kinds_with_ways_of_their_own(prefixes: list[str], kind: Any, num_workers: int, num_datasets: int) -> None:
    dataset = build(prefixes[:num_datasets], kind)
    needed = served(dataset, 8, 4, look_ahead=0)
    assert_same_batches(served(dataset, 8, 4, look_ahead=6, num_workers=num_workers), needed)


def test_read_ahead_is_the_default_for_pure_samples_of_remote_bytes(prefixes: list[str], tmp_path: Path) -> None:
    def looks_ahead(dataset: Any) -> bool:
        loader: Any = binidx.build_pretraining_data_loader(dataset, 0, 4)
        return bool(loader._reads_ahead)

    rng = np.random.default_rng(0)
    local = write_with_megatron(tmp_path / "local", np.full(100, 30, np.int32), rng)
    assert looks_ahead(build(prefixes))
    assert looks_ahead(build(prefixes[:1]))
    assert looks_ahead(build([prefixes[0], local]))
    assert not looks_ahead(build([local]))
    assert not looks_ahead(build([local, local]))
    for place in ("memory://ahead-packed", str(tmp_path / "packed")):
        builder = binidx.packed.PackedDatasetBuilder(place, "en", 48, 0, np.uint16)
        builder.add_array(np.arange(96))
        builder.write_reminder()
        files = PackedFiles(builder.filenames, 4)
        run = PackedRun([PackedSet(2, files.num_blocks, 1, 7)], None, 0, 0, 1, 0, 4)
        assert looks_ahead(PackedDataset(run, [files])) == (place != str(tmp_path / "packed"))
    for kind in (OneByOne, Assembled):
        # What they do in threads, and out of turn, is theirs to know.
        assert not looks_ahead(build(prefixes, kind))
        assert remote_places(build(prefixes, kind))
        assert not is_pure(build(prefixes, kind))


class BackwardsBaked(binidx.BakedDataset):
    def __getitems__(self, idxs: Any) -> Any:
        return super().__getitems__([*idxs][::-1])


def test_a_baked_run_in_a_store_is_read_ahead_by_default(prefixes: list[str], tmp_path: Path) -> None:
    dataset = build(prefixes)
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(8, 4, 2), len(dataset)))
    for directory in ("memory://ahead-baked", str(tmp_path / "baked")):
        bake(order, directory, plan_bake(order, range(20)))
    baked = binidx.BakedDataset("memory://ahead-baked", dataset.config)
    assert remote_places(baked)
    assert is_pure(baked)
    before = stats.usage()
    batches = served(baked, 0, 4)
    assert stats.usage_since(before)["samples_ahead"] == 0
    assert_same_batches(batches, served(dataset, 0, 4, look_ahead=0)[: len(batches)])
    loader: Any = binidx.build_pretraining_data_loader(baked, 0, 4)
    before = stats.usage()
    batches = iter(loader)
    next(batches)
    wait_for(lambda: stats.usage_since(before)["samples_ahead"] > 0)
    del batches
    assert not remote_places(binidx.BakedDataset(str(tmp_path / "baked"), dataset.config))
    assert not is_pure(BackwardsBaked("memory://ahead-baked", dataset.config))


@pytest.mark.parametrize(
    ("ranks", "has_cache", "is_forward"), [(1, False, True), (4, False, True), (8, False, False), (1, True, False)]
)
def test_extents_of_a_baked_run_are_read_where_their_bytes_are_used(
    prefixes: list[str], tmp_path: Path, ranks: int, has_cache: bool, is_forward: bool
) -> None:
    dataset = build(prefixes)
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(32, 4, 2), len(dataset)))
    bake(order, (directory := f"memory://{tmp_path.name}"), plan_bake(order, range(4)))
    config = replace(dataset.config, storage_options={"binidx": {"cache_dir": str(tmp_path)}} if has_cache else None)
    baked = binidx.BakedDataset(directory, config)
    sampler = build_sampler("single", baked, 0, 2, 0, ranks)
    assert (open_forward(baked, sampler, Scope()) is not None) == is_forward


def test_a_sample_is_read_once_and_many_batches_at_once(s3_prefixes: list[str]) -> None:
    dataset = build(s3_prefixes[:1])
    before = stats.usage()
    batches = served(dataset, 0, 2)
    wanted = stats.usage_since(before)
    assert wanted["samples"] == 2 * len(batches)
    assert wanted["tokens"] == 2 * len(batches) * 24
    assert 0 < wanted["wait_seconds"] <= wanted["seconds"]
    tokens = dataset.dataset.index.num_tokens
    # Requests and chunks: the whole .bin is one chunk of the ChunkCache.
    assert wanted["remote requests"] <= 1
    assert tokens * 2 < 65536


def test_a_part_of_a_group_is_a_batch_that_stands_alone(prefixes: list[str]) -> None:
    dataset = build(prefixes, create_attention_mask=True)
    needed = [default_collate([dataset[idx] for idx in range(start, start + 4)]) for start in range(0, 160, 4)]
    for step, batch in enumerate(binidx.build_pretraining_data_loader(dataset, 0, 4, look_ahead=32) or []):
        if step < len(needed):
            assert_same_sample(batch, needed[step])
        for column in batch.values():
            column.zero_()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_report_at_the_end_counts_the_bytes_read(s3_prefixes: list[str], num_workers: int, caplog: Any) -> None:
    dataset = build(s3_prefixes)
    loader = binidx.build_pretraining_data_loader(dataset, 0, 8, num_workers=num_workers)
    assert loader is not None
    with caplog.at_level(logging.INFO, "binidx"):
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        assert not caplog.records
        del batches
        wait_for(lambda: len(caplog.records) == 1)  # a thread logs it
        count = len([*loader])
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("960 tokens in ")
    assert second.startswith(f"{count * 8 * 24:,} tokens in ")
    for line in (first, second) if num_workers else ():
        # Workers have their own caches, and tell what they read; here there may be nothing left to read.
        assert re.search(r"request.* moved .* wanted|chunk cache 100% hits", line), line


def test_a_loader_that_is_dropped_drops_its_requests(s3: Any, s3_prefixes: list[str]) -> None:
    """Answers take ten minutes by then; nobody waits for them, and the next loader does not either."""
    options = {"binidx": {"hedge": False}}
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        dataset = build(s3_prefixes[:1], storage_options=options)
        dataset.dataset.bin_reader = open_object(f"{s3_prefixes[0]}.bin", storage_options=options, cache=False)
        batches = iter(binidx.build_pretraining_data_loader(dataset, 0, 2) or [])
        next(batches)
        known = -1
        while known != (known := len(proxy.log())) or any(each.ended is None for each in proxy.log()):
            time.sleep(1)  # until no more answers are on their way
        proxy.become(delay_ms=600_000)
        next(batches)
        began = time.monotonic()
        del batches
        while any(thread.name == "binidx-ahead" for thread in threading.enumerate()):
            assert time.monotonic() < began + 300
            time.sleep(0.01)
        proxy.become(delay_ms=1)
        assert_same_batches(served(dataset, 0, 2, count=5), served(dataset, 0, 2, count=5, look_ahead=0))
        assert time.monotonic() < began + 500
