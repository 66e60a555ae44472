"""A baked run against the run itself: the same batches on any number of ranks, from any position."""

import json
import pickle
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers.pickling_executor import PicklingExecutor
from helpers.traceable_runs import random_config, random_run
from servers.latency_proxy import latency_proxy

import binidx.corpus.exchange as exchange_module
import binidx.order.stored.baked_order as baked_module
import binidx.run.stored.baking as bake_module
from binidx import RunOrder, load_dataset
from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.stored.baked import BakedDataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectExistsError, ObjectNotFoundError
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.parts import Shard, Workers
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.baking import bake, plan_bake
from binidx.storage.location import Location
from binidx.storage.requests.listing import list_matches
from binidx.testing import check_order

KINDS = ["single", "cyclic"]


def order_of(directory: Path, seed: int, kind: Any = "single") -> tuple[RunOrder, Any]:
    dataset = random_run(directory, seed)
    return RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 1, 2), len(dataset), kind)), dataset


def batches(dataset: Any, consumed: int, rank: int, ranks: int, micro: int, kind: Any = "single") -> list[Any]:
    found = build_pretraining_data_loader(dataset, consumed, micro, rank, ranks, dataloader_type=kind)
    assert found is not None
    return list(islice(found, 8))


def assert_same_batches(ours: list[Any], needed: list[Any]) -> None:
    assert len(ours) == len(needed)
    for our, need in zip(ours, needed, strict=True):
        assert list(our) == list(need)
        for name in need:
            assert our[name].dtype == need[name].dtype
            assert torch.equal(our[name], need[name]), name


@pytest.mark.parametrize("seed", range(12))
def test_every_rank_gets_what_the_run_gives(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, run = order_of(tmp_path, seed)
    count = order.num_steps()
    if not count:
        pytest.skip("a run of no step")
    baked = plan_bake(order, range(count), 1500)
    assert bake(order, f"{tmp_path}/baked", baked).written == len(baked.parts())
    dataset = BakedDataset(f"{tmp_path}/baked", run.config)
    check_order(dataset.order)
    for ranks, micro, consumed in [(1, 1, 0), (2, 1, 2), (2, 2, len(dataset) // 2)]:
        if consumed >= len(dataset):
            continue
        for rank in range(ranks):
            stop = (len(dataset) - consumed) // (ranks * micro)
            needed = batches(run, consumed, rank, ranks, micro)[:stop]
            assert_same_batches(batches(dataset, consumed, rank, ranks, micro), needed)


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_what_a_builder_writes_of_the_samples(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "POSITIONS": (7, 7),
        "BAKE_CHUNK_BYTES": (72, 72),
        "PIECE_BYTES": 8,
        "ROUND_BYTES": 40,
        "PLACED_AT_ONCE": 3,
    }
    for name, size in {**sizes, "GAP_BYTES": 4 * (seed % 2)}.items():
        monkeypatch.setattr(bake_module, name, size)
    monkeypatch.setattr(exchange_module, "HELD_BYTES", 200)
    order, _ = order_of(tmp_path, seed)
    baked = plan_bake(order, range(order.num_steps() or 0), 1500)
    with PicklingExecutor(2) as executor:
        bake(order, f"{tmp_path}/baked", baked, workers=Workers(executor=executor))
    for part in baked.parts():
        with IndexedDatasetBuilder(f"{tmp_path}/needed.bin", order.token_dtype) as builder:
            for text in order.read(np.asarray(part)):
                builder.add_document(text, [len(text)])
            builder.finalize(f"{tmp_path}/needed.idx")
        for suffix in ("bin", "idx"):
            found = Path(f"{baked.part_file(Location(f'{tmp_path}/baked'), part)}.{suffix}").read_bytes()
            assert found == Path(f"{tmp_path}/needed.{suffix}").read_bytes()
    assert not Path(f"{tmp_path}/baked/exchange").exists()


def test_tokens_of_sources_of_two_dtypes_are_stored_in_the_wider_one(tmp_path: Path) -> None:
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", dtype) as builder:
            for number in range(20):
                builder.add_document(np.arange(number) + 60_000, [number])
            builder.finalize(f"{tmp_path}/{name}.idx")
    config, sizes = random_config(random.Random(5), 5, [f"{tmp_path}/a", f"{tmp_path}/b"], [0.5, 0.5], f"{tmp_path}/c")
    run = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    order = RunOrder.of_dataset(run, GlobalOrder(BatchSchedule(2, 1, 1), len(run)))
    bake(order, f"{tmp_path}/baked", plan_bake(order, range(order.num_steps() or 0)))
    assert_same_batches(batches(BakedDataset(f"{tmp_path}/baked", run.config), 0, 0, 1, 4), batches(run, 0, 0, 1, 4))


def test_a_task_whose_object_is_gone_is_made_again_once_its_record_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, run = order_of(tmp_path, 2)
    baked, where = plan_bake(order, range(order.num_steps() or 0), 1500), tmp_path / "baked"
    bake(order, str(where), baked, workers=Workers(count=1, shard=Shard(0, 2)))
    file = next((where / "exchange").glob("tokens-*.exchange"))
    file.write_bytes(b"")
    with pytest.raises(BinidxError, match=file.name):
        bake(order, str(where), baked)
    Path(f"{where}/exchange/{file.stem}.json").unlink()
    bake(order, str(where), baked)
    assert_same_batches(batches(BakedDataset(str(where), run.config), 0, 0, 1, 4), batches(run, 0, 0, 1, 4))


def test_a_cyclic_run_is_read_in_order_once_it_is_baked(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 3, "cyclic")
    epoch = len(run) // 4
    bake(order, f"{tmp_path}/baked", plan_bake(order, range(2 * epoch)))
    dataset = BakedDataset(f"{tmp_path}/baked", run.config)
    for rank in range(2):
        for consumed in (0, 4 * epoch):  # a loader of the run ends with its epoch
            needed = batches(run, consumed, rank, 2, 1, "cyclic")
            assert_same_batches(batches(dataset, consumed, rank, 2, 1)[: len(needed)], needed)


def test_some_steps_of_a_run_are_baked_where_they_stand(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 2)
    bake(order, f"{tmp_path}/baked", plan_bake(order, range(3, 6)))
    dataset = BakedDataset(f"{tmp_path}/baked", run.config)
    assert_same_batches(batches(dataset, 12, 1, 2, 1), batches(run, 12, 1, 2, 1)[:6])
    with pytest.raises(IndexError, match="found 12 to 24"):
        dataset[11]


def test_machines_share_the_work_and_a_bake_goes_on(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bake_module, "POSITIONS", (5, 5))
    (order, run), where = order_of(tmp_path, 2), s3.fresh()
    baked = plan_bake(order, range(order.num_steps() or 0), 900)
    shards = [Workers(count=1, shard=Shard(number, 2)) for number in range(2)]
    count = len(baked.parts())
    assert count > 3
    first = bake(order, where, baked, workers=shards[1])
    assert (first.stage, first.written, first.missing) == ("places", 0, count)
    assert first.waits_for == -(-baked.stop // 5 // 2)
    with pytest.raises(ObjectNotFoundError):
        BakedDataset(where, run.config)
    done = [bake(order, where, baked, workers=shards[number % 2]) for number in range(4)]
    assert sum(each.written for each in done) == count
    assert done[-1].missing == done[-1].waits_for == 0
    assert not any("exchange" in uri for uri in list_matches(Location(f"{where}/")))
    assert_same_batches(batches(BakedDataset(where, run.config), 0, 0, 1, 4), batches(run, 0, 0, 1, 4))


@pytest.mark.parametrize("num_parts", [1, 8])
def test_a_bake_sends_a_request_for_8_mib(num_parts: int, s3: Bucket, tmp_path: Path) -> None:
    """Each byte of 64 MiB is read from the source, then from an object between the stages, with the rows beside it."""
    piece, length = exchange_module.PIECE_BYTES, 1024
    tokens = np.random.default_rng(0).integers(1, 9999, 8 * piece // 4, np.int32)
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        builder.add_document(tokens, np.full(len(tokens) // 256, 256).tolist())
        builder.finalize(f"{tmp_path}/en.idx")
    where = s3.fresh()
    fsspec.filesystem("s3").put([f"{tmp_path}/en.{end}" for end in ("bin", "idx")], f"{where}/")
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy, proxy.in_environment():
        run: Any = load_dataset(f"{where}/en", length, random_seed=1).wrapped
        order = RunOrder.of_dataset(run, GlobalOrder(BatchSchedule(1, 1, 1), len(run)))
        baked = plan_bake(order, range(len(run)), -(-len(run) // num_parts) * (length + 1) * 4)
        assert len(baked.parts()) == num_parts
        bake(order, f"{where}/baked", baked, workers=Workers(count=1))
        sizes = [each.bytes for each in proxy.log() if each.method == "GET" and each.bytes > piece // 128]
    assert sum(sizes) > 2 * tokens.nbytes
    assert len(sizes) <= 1.1 * sum(sizes) / piece, sizes


def test_a_micro_batch_is_one_range(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 2)
    bake(order, f"{tmp_path}/baked", plan_bake(order, range(4)))
    dataset = BakedDataset(f"{tmp_path}/baked", run.config)
    ranges = [(sample * dataset.sample_bytes, (sample + 1) * dataset.sample_bytes) for sample in range(4, 8)]
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    [(reader, located, places)] = dataset.locate_bytes(np.arange(4, 8))
    assert (reader, located.tolist(), places.tolist()) == (dataset.reader, [*map(list, ranges)], [0, 1, 2, 3])


def test_parts_are_opened_when_they_are_read(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (order, run), where = order_of(tmp_path, 2), s3.fresh()
    baked = plan_bake(order, range(order.num_steps() or 0), 900)
    bake(order, where, baked)
    opened: list[str] = []
    open_object = baked_module.open_object

    def open_and_note(location: Any, **options: Any) -> Any:
        opened.append(str(location).rpartition("/")[2])
        return open_object(location, **options)

    monkeypatch.setattr(baked_module, "open_object", open_and_note)
    dataset = pickle.loads(pickle.dumps(BakedDataset(where, run.config)))
    assert opened == []
    for position in (0, baked.stop - 1):
        assert dataset[position]["tokens"].equal(run[position]["tokens"])
    tokens = [name for name in opened if name.endswith(".bin")]
    assert tokens == [f"{part.start:012d}.bin" for part in (baked.parts()[0], baked.parts()[-1])]
    fsspec.filesystem("s3").rm(f"{where}/complete.json")
    fsspec.filesystem("s3").rm(f"{where}/{baked.parts()[1].start:012d}.idx")
    with pytest.raises(ObjectNotFoundError, match="no such object"):
        BakedDataset(where, run.config)


def test_a_part_of_another_size_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, run = order_of(tmp_path, 2)
    baked = plan_bake(order, range(order.num_steps() or 0), 900)
    bake(order, f"{tmp_path}/baked", baked)
    file = Path(f"{baked.part_file(Location(f'{tmp_path}/baked'), baked.parts()[-1])}.bin")
    file.write_bytes(file.read_bytes()[:-4])
    dataset = BakedDataset(f"{tmp_path}/baked", run.config)
    with pytest.raises(FormatError, match=r"\.bin: wrong size \(found [\d,]+ bytes, need [\d,]+\); bake it again"):
        dataset[baked.stop - 1]


def test_a_state_of_another_bake_of_equal_length_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order, run = order_of(tmp_path, 3)
    steps = range(order.num_steps() or 0)
    shuffled = replace(order, reading=replace(order.reading, dataloader_type="cyclic"))
    loaders = []
    for name, each in (("one", order), ("again", order), ("other", shuffled)):
        bake(each, f"{tmp_path}/{name}", plan_bake(each, steps))
        loaders.append(build_pretraining_data_loader(BakedDataset(f"{tmp_path}/{name}", run.config), 0, 2))
    one, again, other = loaders
    next(iter(one))
    state = json.loads(json.dumps(one.state_dict()))
    again.load_state_dict(state)
    assert again.consumed_samples == 2
    assert not caplog.records
    with pytest.raises(
        ConfigError, match=r"resume: state is for the order [0-9a-f]{32}, BakedDataset\(.*other.* stores"
    ):
        other.load_state_dict(state)
    assert other.consumed_samples == 0
    other.load_state_dict({name: state[name] for name in ("consumed_samples", "fingerprint")})  # of an earlier release
    assert other.consumed_samples == 2
    assert "resume: the state does not name the run whose order" in caplog.text


def test_the_config_of_another_order_is_refused_by_what_differs_and_one_of_moved_data_is_not(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 2)
    where = f"{tmp_path}/baked"
    bake(order, where, plan_bake(order, range(4)))
    seed = run.config.random_seed
    differs = rf"is of another order: random_seed \(found {seed}, the config has {seed + 1}\)"
    with pytest.raises(ConfigError, match=differs):
        BakedDataset(where, replace(run.config, random_seed=seed + 1))
    moved = replace(run.config, blend=([f"{tmp_path}/moved/{n}" for n in range(len(run.config.prefixes))], None))
    moved = replace(moved, blend=(moved.blend[0], run.config.blend[1]))
    assert_same_batches(batches(BakedDataset(where, moved), 0, 0, 1, 2), batches(run, 0, 0, 1, 2))
    for file in (Path(f"{where}/baked.json"), Path(f"{where}/complete.json")):
        early = json.loads(file.read_text())
        assert early.pop("options")["random_seed"] == seed
        file.write_text(json.dumps(early))  # of before 0.2
    BakedDataset(where, replace(run.config, random_seed=seed + 1))


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 2)
    where = f"{tmp_path}/baked"
    bake(order, where, plan_bake(order, range(4)))
    with pytest.raises(ObjectExistsError, match="of another run, of other steps of it"):
        bake(order, where, plan_bake(order, range(5)))
    longer = replace(run.config, sequence_length=99)
    with pytest.raises(ConfigError, match="need \\(99"):
        BakedDataset(where, longer)
    Path(f"{where}/baked.json").write_text("{}")
    with pytest.raises(
        FormatError, match=r"baked.json: \$.binidx: expected 'baked' \(found None\); needs a file written by"
    ):
        BakedDataset(where, run.config)
    with pytest.raises(IndexError, match="steps: found 0:9999"):
        plan_bake(order, range(9999))
