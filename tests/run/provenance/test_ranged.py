"""Orders asked without loading indices: the same answers as of whole ones, in few bytes, and never of another cache."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import Tokenizer
from helpers.traceable_runs import random_config, write_source
from servers.latency_proxy import Proxy, latency_proxy

import binidx
from binidx import RunOrder
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.ordered_dataset import make_opener
from binidx.dataset.split_requests import request_splits
from binidx.errors import ConfigError, ObjectChangedError
from binidx.format.arrow import pa
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.order.blended_order import list_members
from binidx.order.staged.window_order import WindowRequest
from binidx.run.provenance.accounts import account
from binidx.run.run_file import Run
from binidx.storage.location import Location
from binidx.storage.ranged_arrays import MAX_GAP, RangedArray

DAY_OLD = "binidx.index.cache.manifest.SETTLED_SECONDS"


def random_run(place: str, sources: list[str], seed: int) -> Run:
    """A random run over one of the sources or all, whose indices are cached however small they are."""
    choose = random.Random(seed)
    prefixes = sources[: choose.choice([1, len(sources)])]
    weights = [choose.random() + 0.05 for _ in prefixes] if choose.random() < 0.6 else None
    config, sizes = random_config(choose, seed, prefixes, weights, f"{place}/cache{seed}", cache_small_indices=True)
    return Run(config, sizes if weights else [None] * 3, 1)


def write_sources(directory: Path, seed: int) -> list[str]:
    choose = random.Random(seed)
    return [write_source(directory / f"s{seed}-{n}", choose, choose.random() < 0.5) for n in range(3)]


def upload(prefixes: list[str], where: str) -> list[str]:
    for prefix in prefixes:
        for end in ("bin", "idx"):
            with fsspec.open(f"{where}/{Path(prefix).name}.{end}", "wb") as file:
                file.write(Path(f"{prefix}.{end}").read_bytes())
    return [f"{where}/{Path(prefix).name}" for prefix in prefixes]


def assert_same(one: RunOrder, whole: RunOrder) -> None:
    """Tables with documents and tokens, epochs, and what the order is known by."""
    count = whole.num_steps() or 0
    assert (one.num_steps(), len(one.order)) == (count, len(whole.order))
    for step in {0, count // 3, count - 1}:
        steps = range(step, min(step + 20, count))
        assert one.table(steps, tokens=True) == whole.table(steps, tokens=True)
    assert one.fingerprint == whole.fingerprint
    for documents in ([0], [1, 4]):
        found, needed = (each.where(0, documents, count)[0] for each in (one, whole))
        assert all((a == b).all() for a, b in zip(found, needed, strict=True))
    assert account(one, count, repeats=True) == account(whole, count, repeats=True)


def is_ranged(order: RunOrder) -> bool:
    """Whether the indices of all sources stay in the store."""
    return all(isinstance(member.shuffle_index, RangedArray) for member in list_members(order.order))


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_whole_indices(seed: int, s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    run = random_run(where, upload(write_sources(tmp_path, seed), where), seed)
    whole, one = RunOrder.of(run), RunOrder.open(run)
    assert_same(one, whole)
    assert is_ranged(one)


TREES = ("view over the blend", "view over a source", "view over each source", "stages", "view over stages")


def run_of_tree(name: str, place: str, prefixes: list[str]) -> Run:
    """A run whose request is a tree of some height, over indices that are cached in a bucket."""
    with fsspec.open(f"{place}/list.txt", "w") as file:
        file.write(f"{prefixes[0]}\t1\n{prefixes[0]}\t3\n{prefixes[1]}\t0\n")
    over: Any = "source" if name == "view over each source" else "blend"
    order = binidx.View(f"{place}/list.txt", over=over) if "view" in name else None
    chosen = prefixes[:1] if name == "view over a source" else prefixes
    if len(chosen) == 1:
        with fsspec.open(f"{place}/list.txt", "w") as file:
            file.write("1\n3\n")
    config = replace(
        one_source(place, prefixes[0]).config, sequence_length=16, order=order, mid_level_dataset_surplus=0.5,
        blend=(chosen, [2.0, 1.0, 1.0] if len(chosen) > 1 else None),
    )  # fmt: skip
    if "stages" not in name:
        return Run(config, [300, 0, 0] if len(chosen) > 1 else [None] * 3, 2)
    first, second = binidx.Stage((prefixes[:2], [3.0, 1.0]), 70, 90), binidx.Stage((prefixes, [1.0, 1.0, 0.5]), 230)
    return Run(config, [0, 0, 0], 2, stages=[first, second])


@pytest.mark.parametrize("name", TREES)
def test_views_and_stages_are_opened_by_ranges(name: str, s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    run = run_of_tree(name, where, upload(write_sources(tmp_path, 5), where))
    whole, one = RunOrder.of(run), RunOrder.open(run)
    assert_same(one, whole)
    assert is_ranged(one)
    assert one.stage_starts == whole.stage_starts
    assert RunOrder.open(run).per_process().get().fingerprint == whole.fingerprint
    steps = range(3, 6)
    assert pickle.loads(pickle.dumps(one)).table(steps) == whole.table(steps)


def test_windows_are_cut_of_indices_by_ranges(s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    config = run_of_tree("stages", where, upload(write_sources(tmp_path, 5), where)).config
    [asked] = request_splits(binidx.GPTDataset, config, [60, 0, 0])[binidx.Split.train]
    lengths = [binidx.LengthStage(4, 40), binidx.LengthStage(16, 12)]
    request = WindowRequest(asked, lengths, 4, Location(f"{where}/cache"))
    whole, built, cached = (
        make_opener(config, access=access).open(request) for access in ("whole", "ranges", "ranges")
    )
    samples = np.arange(len(whole))
    for order in (built, cached):
        assert order.identity == whole.identity
        for one, other in zip(order.spans(samples), whole.spans(samples), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(order.find(1, np.arange(3)), whole.find(1, np.arange(3)))
        assert all(isinstance(member.document_index, RangedArray) for member in list_members(order))
    assert all(isinstance(member.sample_index, RangedArray) for member in list_members(cached))


def test_a_view_moves_the_arrays_that_it_searches_and_no_idx(large: Run, counting: Proxy, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("777\n")
    options = {"binidx": {"max_gap": 4096}}  # or all of these small files is one gap
    config = replace(large.config, order=binidx.View(f"{tmp_path}/list.txt"), storage_options=options)
    order = RunOrder.open(replace(large, config=config))
    order.trace(range(100, 101))
    moved, below = counting.counts(), list_members(order.order)[0].source.order
    arrays = below.document_index, below.shuffle_index
    assert moved.bytes <= sum(len(array) * array.row_bytes for array in arrays) + 4096 * 60 + 1000 * moved.requests
    assert moved.bytes < 20 * 20_000  # an `.idx` has 20 bytes a document


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_from_gcs(seed: int, gs: str, tmp_path: Path) -> None:
    where = f"{gs}/ranged{seed}"
    run = random_run(where, upload(write_sources(tmp_path, seed), where), seed)
    assert_same(RunOrder.open(run), RunOrder.of(run))
    again = RunOrder.open(run)
    assert_same(again, RunOrder.of(run))
    assert is_ranged(again)


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_from_files_and_without_a_cache(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DAY_OLD, 0)
    run = random_run(str(tmp_path), write_sources(tmp_path, seed), seed)
    assert_same(RunOrder.open(run), RunOrder.of(run))
    assert_same(RunOrder.open(run), RunOrder.of(run))


def test_a_local_array_is_believed_only_under_a_manifest_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DAY_OLD, 0)
    run = one_source(str(tmp_path), write_large(tmp_path / "en", 400))
    whole = RunOrder.of(run)
    [manifest] = (tmp_path / "cache").glob("*-binidx.json")
    [array] = (tmp_path / "cache").glob("*-shuffle_index.npy")
    for last, ranged in ((manifest, True), (array, False), (manifest, True)):
        time.sleep(0.02)
        os.utime(last)
        order = RunOrder.open(run)
        assert is_ranged(order) == ranged
        assert_same(order, whole)


def one_source(place: str, prefix: str, **fields: Any) -> Run:
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=64, blend=([prefix], None), split="1,0,0", tokenizer=Tokenizer(pad=-5, eod=-6),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=f"{place}/cache",
        cache_small_indices=True, **fields,
    )  # fmt: skip
    return Run(config, [None, None, None], 8)


def write_large(prefix: Path, num_documents: int, first: int = 0, length: int = 40) -> str:
    """Documents of one sequence each, that say whose they are."""
    with IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        for number in range(num_documents):
            builder.add_document(np.arange(length) + 1000 * (number + first), [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def large(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """20,000 documents in a bucket, their index cached there: 0.4 MB of `.idx`, 0.3 MB of arrays."""
    where = s3.fresh()
    [prefix] = upload([write_large(tmp_path_factory.mktemp("large") / "en", 20_000)], where)
    run = one_source(where, prefix)
    run.build()
    return run


@pytest.fixture
def counting(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What is asked of the bucket from now on, by a node that has nothing of it."""
    monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path))
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy, proxy.in_environment():
        fsspec.filesystem("s3").clear_instance_cache()
        yield proxy


def test_a_step_moves_kilobytes_and_a_second_time_nothing(large: Run, counting: Proxy) -> None:
    order = RunOrder.open(large)
    opened = counting.counts()
    order.trace(range(100, 101))
    traced = counting.counts() - opened
    order.trace(range(100, 101))
    assert (counting.counts() - opened - traced).requests == 0
    assert opened.requests <= 8
    # 8 samples: one place of shuffle_index, 8 of each other array, 3 documents a sample; 4 KiB each, and small gaps.
    assert traced.requests <= 1 + 8 + 8 + 3 * 8
    assert traced.bytes <= 4096 * 80 + 1000 * traced.requests


def test_an_account_moves_kilobytes_and_where_the_arrays_but_not_the_idx(large: Run, counting: Proxy) -> None:
    order = RunOrder.open(large)
    account(order, 3)
    accounted = counting.counts()
    order.where(0, [777], 100)
    searched = counting.counts() - accounted
    arrays = order.order.source.order.document_index, order.order.source.order.shuffle_index
    whole = sum(len(array) * array.row_bytes for array in arrays)
    assert accounted.requests <= 10
    assert accounted.bytes <= 4096 * 6 + MAX_GAP + 1000 * accounted.requests
    assert searched.bytes <= whole + 4096 * 20 + MAX_GAP + 1000 * searched.requests


def test_a_cache_of_other_options_is_not_believed(large: Run) -> None:
    other = Run(replace(large.config, add_extra_token_to_sequence=False), [None, None, None], 8)
    order = RunOrder.open(other)
    # The same name in the cache, by Megatron's rule: it was built anew, and is now that of the other run.
    assert not is_ranged(order)
    assert_same(order, RunOrder.of(other))
    assert_same(RunOrder.open(large), RunOrder.of(Run(large.config, [None, None, None], 8)))


def test_other_data_under_the_same_name_is_never_traced_with_the_old_index(s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    [prefix] = upload([write_large(tmp_path / "en", 6000)], where)
    run = one_source(where, prefix)
    run.build()
    order = RunOrder.open(run)
    assert is_ranged(order)
    upload([write_large(tmp_path / "en", 6000, 5000, length=50)], where)
    with pytest.raises(ObjectChangedError, match="open it again"):
        order.trace(range(300, 301))
    again = one_source(where, prefix)
    assert_same(RunOrder.open(again), RunOrder.of(again))
    assert RunOrder.open(again).table(range(1), tokens=True)["input_ids"].to_pylist()[0][0] >= 5_000_000


@pytest.mark.parametrize("array", ["shuffle_index", "sample_index", "document_index"])
def test_an_array_replaced_while_it_is_traced_is_an_error(array: str, s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    [prefix] = upload([write_large(tmp_path / "en", 6000)], where)
    run = one_source(where, prefix)
    run.build()
    needed, order = RunOrder.of(run), RunOrder.open(run)
    assert is_ranged(order)
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    [path] = fs.glob(f"{where}/cache/*{array}.npy".removeprefix("s3://"))
    content = fs.cat(path)
    fs.pipe(path, content[:128] + bytes(len(content) - 128))
    with pytest.raises(ObjectChangedError, match=f"{array}.npy: changed since it was opened"):
        order.trace(range(300, 301))
    # Opened anew it is read whole, found wrong by its sum, and built again.
    found = RunOrder.open(run)
    assert not is_ranged(found)
    assert_same(found, needed)


def test_sources_that_a_step_does_not_touch_are_not_opened(s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    prefixes = upload([write_large(tmp_path / f"s{n}", 50, first=100 * n) for n in range(30)], where)
    run = one_source(where, prefixes[0])
    config = replace(run.config, blend=(prefixes, [1.0] * 30))
    run = Run(config, [600, 0, 0], 4)
    whole = RunOrder.of(run)
    order = RunOrder.open(run)
    order.trace(range(50, 51))
    opened = [member for member in order.order.members if "order" in vars(member.source)]
    assert 1 <= len(opened) <= 4
    assert_same(order, whole)


def test_threads_may_ask_at_the_same_time_and_orders_travel(s3: Bucket, large: Run) -> None:
    needed = RunOrder.of(large).table(range(30, 60))
    for _ in range(5):
        order = RunOrder.open(large)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda step, order=order: order.table(range(step, step + 1)), range(30, 60)))
        assert pa.concat_tables(found).equals(needed)
    assert pickle.loads(pickle.dumps(order)).table(range(30, 60)) == needed


def test_a_dataset_read_by_ranges_is_the_ordinary_one(large: Run) -> None:
    order, needed = RunOrder.open(large), RunOrder.of(large)
    source, whole = order.sources[0], needed.sources[0]
    assert is_ranged(order)
    assert (len(order.order), order.order.num_epochs) == (len(needed.order), needed.order.num_epochs)
    assert (type(source.dataset), len(source.dataset)) == (binidx.IndexedDataset, len(whole.dataset))
    assert source.dataset.identity == whole.dataset.identity
    again = pickle.loads(pickle.dumps(source.dataset))
    for dataset in (source.dataset, again):
        assert dataset[7].tolist() == dataset[-19_993].tolist() == whole.dataset[7].tolist()
        assert [each.tolist() for each in dataset[3:6]] == [each.tolist() for each in whole.dataset[3:6]]
        assert dataset.get(8, 3, 5).tolist() == whole.dataset.get(8, 3, 5).tolist()


def test_a_blend_whose_order_is_asked_for_is_the_ordinary_one_and_travels(s3: Bucket, tmp_path: Path) -> None:
    where = s3.fresh()
    prefixes = upload([write_large(tmp_path / f"s{n}", 50, first=100 * n) for n in range(3)], where)
    config = replace(one_source(where, prefixes[0]).config, blend=(prefixes, [1.0] * 3))
    run = Run(config, [60, 0, 0], 4)
    whole, order = RunOrder.of(run), RunOrder.open(run)
    assert isinstance(order.order.dataset_index, RangedArray)
    assert_same(pickle.loads(pickle.dumps(order)), whole)


def test_a_trace_does_without_torch(large: Run, tmp_path: Path) -> None:
    large.save(f"{tmp_path}/run.json")
    program = (
        "import sys; from binidx.tools.trace_step import main; "
        f"assert main(['{tmp_path}/run.json', '--steps', '3']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_run_without_a_train_split_is_refused(tmp_path: Path) -> None:
    run = one_source(str(tmp_path), write_large(tmp_path / "en", 30))
    run = Run(replace(run.config, split="0,1,0"), [None, None, None], 1)
    with pytest.raises(ConfigError, match="has no train split"):
        RunOrder.open(run)
