"""A run read by its read plan against the run itself: the same batches, from the places of its tokens alone."""

import json
import pickle
import random
import re
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers.gpt_data import Tokenizer, assert_same_sample
from helpers.traceable_runs import random_config, random_run, write_source

import binidx
import binidx.run.stored.read_planning as planning
from binidx import RunOrder, bake, plan_bake
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.dataset.rank_comparison import identify, identify_options
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from binidx.jobs.parts import Shard, Workers
from binidx.loader.dataset_protocols import is_pure, remote_places
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.order.reads import TokenPlaces
from binidx.order.stored.planned_order import PlannedRows, ReadPlan, format_blocks, seal
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.read_planning import plan_reads, write_read_plan
from binidx.storage.location import Location
from binidx.testing import check_order

S = 16


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PART_SAMPLES", 70)
    monkeypatch.setattr(planning, "PLANNED_AT_ONCE", 64)


def order_of(dataset: Any, kind: Any = "single") -> RunOrder:
    return RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 1, 2), len(dataset), kind))


def planned(dataset: Any, where: str, kind: Any = "single", steps: range | None = None) -> binidx.PlannedDataset:
    """The dataset of a plan of all steps of a run over `dataset`, or of some."""
    order = order_of(dataset, kind)
    plan = plan_reads(order, range(order.num_steps() or 0) if steps is None else steps)
    assert write_read_plan(order, where, plan) == (len(plan.parts()), 0)
    return binidx.PlannedDataset(where, dataset.config)


def load(prefixes: Any, num_samples: int | None = 150, **options: Any) -> Any:
    options = {"random_seed": 5, "tokenizer": Tokenizer(pad=-5, eod=-6), **options}
    return binidx.load_dataset(prefixes, S, num_samples=num_samples, **options).wrapped


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


def assert_same_samples(dataset: Any, run: Any) -> None:
    """Each sample alone, and all of them in another order in one batch."""
    check_order(dataset.order)
    shuffled = random.Random(1).sample(range(len(dataset)), len(dataset))
    batch = dataset.__getitems__(shuffled)
    for place, number in enumerate(shuffled):
        assert list(dataset[number]) == list(run[number])
        assert_same_sample(dataset[number], run[number])
        assert_same_sample(batch[place], run[number])


def stored_bytes(dataset: Any) -> list[bytes]:
    """The bytes of each sample, where the dataset locates them."""
    samples = [b""] * len(dataset)
    for reader, ranges, places in dataset.locate_bytes(np.arange(len(dataset))):
        for view, place in zip(reader.read(ranges.tolist()), places.tolist(), strict=True):
            samples[place] += view
    return samples


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write_source(tmp_path / f"s{n}", random.Random(n), n % 2 == 0) for n in range(3)]


@pytest.mark.parametrize("seed", range(12))
def test_every_rank_gets_what_the_run_gives(seed: int, tmp_path: Path) -> None:
    run = random_run(tmp_path, seed)
    dataset = planned(run, f"{tmp_path}/plan")
    assert_same_samples(dataset, run)
    assert stored_bytes(dataset) == stored_bytes(run)[: len(dataset)]
    for ranks, micro, consumed in [(1, 1, 0), (2, 1, 2), (2, 2, len(dataset) // 2)]:
        for rank in range(ranks):
            stop = (len(dataset) - consumed) // (ranks * micro)
            needed = batches(run, consumed, rank, ranks, micro)[:stop]
            assert_same_batches(batches(dataset, consumed, rank, ranks, micro), needed)


def test_a_cyclic_run_is_read_in_order_once_it_is_planned(tmp_path: Path) -> None:
    run = random_run(tmp_path, 3)
    epoch = len(run) // 4
    dataset = planned(run, f"{tmp_path}/plan", "cyclic", range(2 * epoch))
    for rank in range(2):
        for consumed in (0, 4 * epoch):  # a loader of the run ends with its epoch
            needed = batches(run, consumed, rank, 2, 1, "cyclic")
            assert_same_batches(batches(dataset, consumed, rank, 2, 1)[: len(needed)], needed)


def test_some_steps_of_a_run_are_planned_where_they_stand(tmp_path: Path) -> None:
    run = random_run(tmp_path, 2)
    dataset = planned(run, f"{tmp_path}/plan", steps=range(3, 6))
    assert_same_batches(batches(dataset, 12, 1, 2, 1), batches(run, 12, 1, 2, 1)[:6])
    for number in (11, 24, -1):
        with pytest.raises(IndexError, match="found 12 to 24"):
            dataset[number]


OPTIONS: dict[str, dict[str, Any]] = {
    "bounds of documents": {"inter_document_masking": True},
    "masks": {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    "no extra token": {"add_extra_token_to_sequence": False, "create_attention_mask": False},
    "best fit": {"order": "best_fit"},
    "first fit, bounds of documents": {"order": "first_fit", "inter_document_masking": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_samples_of_any_options_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    paths = [write_source(tmp_path / f"s{n}", random.Random(n), False) for n in range(2)]
    for number, blend in enumerate((paths[0], {paths[0]: 0.3, paths[1]: 0.7})):
        run = load(blend, **OPTIONS[name])
        assert_same_samples(planned(run, f"{tmp_path}/plan{number}"), run)


def test_samples_of_packed_documents_keep_their_labels(tmp_path: Path) -> None:
    run = random_run(tmp_path, 4, binidx.megatron.BestFitGPTDataset)
    assert_same_samples(planned(run, f"{tmp_path}/plan"), run)


@pytest.mark.parametrize("over", ["blend", "source"])
def test_a_view_is_planned_without_the_samples_that_it_leaves_out(
    over: Any, prefixes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text("".join(f"{prefix}\t{n}\n" for prefix in prefixes[:2] for n in range(3)))
    view = binidx.View(f"{tmp_path}/list.txt", over=over)
    run = load(dict.fromkeys(prefixes, 1.0), 100, order=view, mid_level_dataset_surplus=3.0)
    dataset = planned(run, f"{tmp_path}/plan")
    assert len(dataset) > 4
    assert_same_samples(dataset, run)


def test_a_partial_last_sample_is_padded_as_in_the_run(prefixes: list[str], tmp_path: Path) -> None:
    choose = random.Random(0)
    config, _ = random_config(
        choose, 1, prefixes[:1], None, f"{tmp_path}/c", drop_last_partial_validation_sequence=False
    )
    config = replace(config, split="0,1,0", sequence_length=7)
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [0, None, 0], lambda: True, config)
    valid: Any = builder.build()[1]
    order = RunOrder.of_dataset(valid, GlobalOrder(BatchSchedule(1, 1, 1), len(valid)))
    write_read_plan(order, f"{tmp_path}/plan", plan_reads(order, range(len(valid))))
    dataset = binidx.PlannedDataset(f"{tmp_path}/plan", config)
    assert min(sample["loss_mask"].sum() for sample in map(valid.__getitem__, range(len(valid)))) < 7
    assert_same_samples(dataset, valid)


FORMS = ["plain", "checked", "compressed", "merged"]


def store(source: str, target: str, form: str) -> str:
    """Copy a dataset to a prefix in a form."""
    if form == "merged":
        parts = [f"{target}-{n}" for n in range(2)]
        for part in parts:
            convert_dataset(source, part)
        merge_virtually(parts, target)
        return target
    way = StorageFormat("zstd") if form == "compressed" else StorageFormat(checksums=form == "checked")
    convert_dataset(source, target, way=way)
    return target


@pytest.mark.parametrize("form", FORMS)
def test_no_index_is_read_whatever_the_form_of_the_tokens(
    form: str, s3: Bucket, prefixes: list[str], requests: Any
) -> None:
    bucket = s3.fresh()
    blend = {store(prefix, f"{bucket}/en{n}", form): 1.0 for n, prefix in enumerate(prefixes[:2])}
    run = load(blend, cache_small_indices=True, path_to_cache=f"{bucket}/cache")
    planned(run, f"{bucket}/plan")
    requests()
    dataset = binidx.PlannedDataset(f"{bucket}/plan", run.config)
    assert remote_places(dataset) == {Location(bucket).place}
    assert is_pure(dataset)
    assert requests().keys() == {"readplan.json"}
    first = dataset.__getitems__(range(4, 8))
    read = requests()
    assert "000000000000.rows" in read
    assert not [name for name in read if name.endswith((".idx", ".npy", ".bundle", ".parts.json"))]
    tokens = [name for name in read if re.search(r"\.bin(\.zst)?$", name)]
    assert len(tokens) == (4 if form == "merged" else 2)
    again = pickle.loads(pickle.dumps(dataset))
    assert not requests()
    for place, number in enumerate(range(4, 8)):
        assert_same_sample(first[place], run[number])
        assert_same_sample(again[number], run[number])
    assert_same_samples(dataset, run)


def test_tokens_that_are_pinned_are_opened_without_a_head(s3: Bucket, prefixes: list[str], requests: Any) -> None:
    bucket = s3.fresh()
    run = load(store(prefixes[0], f"{bucket}/en", "plain"))
    dataset = planned(run, f"{bucket}/plan")
    requests()
    dataset.__getitems__([0, 1])
    # Of the rows: size, table, chunk. Of the tokens: one chunk.
    assert requests() == {"000000000000.rows": 3, "en.bin": 1}
    dataset.__getitems__([2, 3])
    assert not requests()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["s3", "disk"])
def test_data_that_changed_is_an_error_that_names_it(
    place: str, form: str, s3: Bucket, prefixes: list[str], tmp_path: Path
) -> None:
    folder = s3.fresh() if place == "s3" else f"{tmp_path}/data"
    run = load(store(prefixes[0], f"{folder}/en", form))
    dataset = planned(run, f"{folder}/plan")
    name = "en-1" if form == "merged" else "en"
    other = write_source(tmp_path / "other", random.Random(99), True)
    convert_dataset(
        other, f"{folder}/{name}", way=StorageFormat("zstd") if form == "compressed" else None, overwrite=True
    )
    end = ".zst" if form == "compressed" else ""
    # Nobody wrote the checksums again.
    found = rf"{name}\.bin{end}: (found|changed)|en\.bin\.xxh3: no such object"
    with pytest.raises(
        (ObjectChangedError, ObjectNotFoundError), match=rf"({found}).*the read plan .*/plan is of .*write the plan"
    ) as raised:
        dataset.__getitems__(range(40))
    assert isinstance(raised.value, ObjectChangedError) or form == "checked"


def test_each_damaged_byte_of_the_rows_is_an_error(prefixes: list[str], tmp_path: Path) -> None:
    run = load({prefixes[0]: 1.0, prefixes[1]: 1.0}, 80)
    planned(run, f"{tmp_path}/plan")
    needed = [run[number]["tokens"].tolist() for number in range(80)]
    for file in sorted((tmp_path / "plan").glob("*.rows")):
        whole = file.read_bytes()
        first = int(file.stem)
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            served = []
            dataset = binidx.PlannedDataset(f"{tmp_path}/plan", run.config)
            for number in {first, min(first + 30, 79), min(first + 69, 79)}:  # of each block
                try:
                    served.append(dataset[number]["tokens"].tolist() == needed[number])
                except FormatError as error:
                    assert "delete this file and write it again with binidx prepare read-plan" in str(error)  # noqa: PT017
                    served.append(None)
            assert None in served
            assert False not in served
        for length in (0, 1, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(FormatError, match="are damaged or of another plan, read twice"):
                binidx.PlannedDataset(f"{tmp_path}/plan", run.config)[first]
        file.write_bytes(whole)


def test_rows_of_another_description_are_an_error(prefixes: list[str], tmp_path: Path) -> None:
    run = load({prefixes[0]: 1.0, prefixes[1]: 1.0}, 80)
    planned(run, f"{tmp_path}/plan")
    file = tmp_path / "plan/readplan.json"
    fields = json.loads(file.read_text())
    for changed in (
        {"stop": fields["stop"] - 1},
        {"masks_ends": True},
        {"sources": fields["sources"][::-1]},
        {"sources": [{**source, "dtype": "int16"} for source in fields["sources"]]},
    ):
        file.write_text(json.dumps({**fields, **changed}))
        with pytest.raises(FormatError, match="are damaged or of another plan"):
            binidx.PlannedDataset(f"{tmp_path}/plan", run.config)[0]
    file.write_text(json.dumps({**fields, "sources": [{**fields["sources"][0], "dtype": "text"}]}))
    with pytest.raises(FormatError, match=r"readplan\.json"):
        binidx.PlannedDataset(f"{tmp_path}/plan", run.config)


@pytest.mark.parametrize("seed", range(20))
def test_places_are_read_as_they_were_written(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    first, count, part_samples = int(rng.integers(9)), int(rng.integers(1, 400)), int(rng.integers(1, 200))
    numbers = rng.integers(0, [2, 5, 40][seed % 3], count)
    total = int(numbers.sum())
    written = TokenPlaces(
        rng.integers(0, 1 << 16, count), np.concatenate([[0], np.cumsum(numbers)]),
        rng.integers(0, 1 << 48, total), rng.integers(0, 1 << 32, total),
    )  # fmt: skip
    plan = ReadPlan("f", first, first + count, part_samples, 8, True, True, None, False, [])
    for part in plan.parts():
        bounds = written.bounds[part.start - first : part.stop - first + 1]
        rows = slice(int(bounds[0]), int(bounds[-1]))
        sources = written.sources[part.start - first : part.stop - first]
        own = TokenPlaces(sources, bounds - bounds[0], written.starts[rows], written.num_tokens[rows])
        blocks = [*format_blocks(own, part.start, "d")]
        table = seal(np.array([*map(len, blocks)], "<u4").tobytes(), part, "d")
        (tmp_path / f"{part.start:012d}.rows").write_bytes(b"".join([*blocks, table]))
    reader = PlannedRows(Location.of(tmp_path), plan, "d")
    for positions in (np.arange(count), rng.integers(0, count, 30), rng.permutation(count)[:1]):
        found = reader.read(positions + first)
        assert found.sources.tolist() == written.sources[positions].tolist()
        for place, number in enumerate(positions.tolist()):
            ours = slice(int(found.bounds[place]), int(found.bounds[place + 1]))
            theirs = slice(int(written.bounds[number]), int(written.bounds[number + 1]))
            assert found.starts[ours].tolist() == written.starts[theirs].tolist()
            assert found.num_tokens[ours].tolist() == written.num_tokens[theirs].tolist()


def test_the_rows_of_a_micro_batch_are_one_range(prefixes: list[str], tmp_path: Path) -> None:
    dataset = planned(load(prefixes[0]), f"{tmp_path}/plan")
    asked: list[Any] = []
    dataset.order.rows.read(np.array([60]))
    reader, ends = dataset.order.rows._opened[0]
    dataset.order.rows._opened[0] = _Watched(reader, asked), ends  # type: ignore[assignment]
    dataset.order.rows.read(np.arange(60, 68))
    assert [(0, int(ends[1])), (int(ends[1]), int(ends[2]))] == asked


class _Watched:
    def __init__(self, reader: Any, asked: list[Any]) -> None:
        self.reader, self.asked, self.uri, self.size = reader, asked, reader.uri, reader.size

    def read(self, ranges: Any) -> Any:
        self.asked += ranges
        return self.reader.read(ranges)


def test_machines_share_the_work_and_a_plan_goes_on(s3: Bucket, tmp_path: Path) -> None:
    run, where, told = random_run(tmp_path, 2), s3.fresh(), list[int]()
    order = order_of(run)
    plan = plan_reads(order, range(order.num_steps() or 0))
    count = len(plan.parts())
    assert count > 3
    assert write_read_plan(order, where, plan, workers=Workers(shard=Shard(1, 2))) == (count // 2, count - count // 2)
    with pytest.raises(ObjectNotFoundError, match=r"readplan\.json"):
        binidx.PlannedDataset(where, run.config)
    assert write_read_plan(order, where, plan, workers=Workers(shard=Shard(0, 2))) == (count - count // 2, 0)
    assert write_read_plan(order, where, plan, watch=told.append) == (0, 0)
    assert sum(told) == plan.stop
    assert_same_samples(binidx.PlannedDataset(where, run.config), run)


def test_a_killed_job_leaves_a_plan_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = random_run(tmp_path, 2)
    order = order_of(run)
    plan = plan_reads(order, range(order.num_steps() or 0))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("binidx.order.stored.planned_order.seal", stop)
        with pytest.raises(KeyboardInterrupt):
            write_read_plan(order, f"{tmp_path}/plan", plan, workers=Workers(count=1))
    assert not list((tmp_path / "plan").glob("*.rows"))
    with pytest.raises(ObjectNotFoundError):
        binidx.PlannedDataset(f"{tmp_path}/plan", run.config)
    write_read_plan(order, f"{tmp_path}/plan", plan)
    assert_same_samples(binidx.PlannedDataset(f"{tmp_path}/plan", run.config), run)


def test_states_of_the_run_and_of_its_plan_are_the_same(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = load(dict.fromkeys(prefixes, 1.0))
    dataset, other = planned(run, f"{tmp_path}/plan"), load(dict.fromkeys(prefixes[:2], 1.0))
    ours, theirs, others = (build_pretraining_data_loader(each, 0, 2) for each in (dataset, run, other))
    assert ours is not None
    assert theirs is not None
    assert others is not None
    next(iter(ours))
    state = json.loads(json.dumps(ours.state_dict()))
    theirs.load_state_dict(state)
    assert theirs.consumed_samples == 2
    next(iter(theirs))
    ours.load_state_dict(json.loads(json.dumps(theirs.state_dict())))
    assert ours.consumed_samples == 4
    assert_same_batches([next(iter(ours))], batches(run, 4, 0, 1, 2)[:1])
    assert not caplog.records
    with pytest.raises(ConfigError, match="resume: state is for fingerprint"):
        others.load_state_dict(state)
    cyclic = build_pretraining_data_loader(planned(run, f"{tmp_path}/cyclic", "cyclic", range(5)), 0, 2)
    assert cyclic is not None
    with pytest.raises(ConfigError, match="resume: state is for fingerprint"):
        cyclic.load_state_dict(state)


def test_ranks_compare_the_plans_that_they_read(prefixes: list[str], tmp_path: Path) -> None:
    run, other = (load(prefixes[0], random_seed=seed) for seed in (5, 6))
    one, again, another = (planned(each, f"{tmp_path}/{n}") for n, each in enumerate((run, run, other)))
    assert len(one) == len(another)
    assert identify(one) == identify(again) != identify(another)
    masked = binidx.PlannedDataset(f"{tmp_path}/0", replace(run.config, eod_mask_loss=not run.config.eod_mask_loss))
    assert identify_options([one]) == identify_options([run]) != identify_options([masked])


def test_a_plan_traces_nothing(prefixes: list[str], tmp_path: Path) -> None:
    dataset = planned(load(prefixes[0]), f"{tmp_path}/plan")
    way = (
        r"found a PlannedDataset, needs GPT datasets or a blend .* take Run.build\(planned=False\), or read_plan=False"
    )
    with pytest.raises(ConfigError, match=f"order: {way}"):
        RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 1, 2), len(dataset)))
    with pytest.raises(ConfigError, match=f"show: {way}"):
        binidx.show_sample(dataset, 0)


@pytest.mark.parametrize("options", [{}, {"add_extra_token_to_sequence": False}])
def test_a_stored_run_serves_tokens_alone(options: dict[str, Any], prefixes: list[str], tmp_path: Path) -> None:
    run = load({prefixes[0]: 0.3, prefixes[1]: 0.7}, **options)
    order = order_of(run)
    bake(order, f"{tmp_path}/baked", plan_bake(order, range(2, order.num_steps() or 0)))
    numbers = [11, 8, 9, 30]
    for dataset in (planned(run, f"{tmp_path}/plan"), binidx.BakedDataset(f"{tmp_path}/baked", run.config)):
        assert dataset.read_tokens(numbers).tolist() == run.read_tokens(numbers).tolist()
    for positions in ([7], [len(dataset)], [-1]):  # of the bake
        with pytest.raises(IndexError, match="not stored"):
            dataset.read_tokens(positions)


def test_a_plan_reads_no_data_that_the_config_does_not_name(prefixes: list[str], s3: Bucket, tmp_path: Path) -> None:
    bucket = s3.fresh()
    run = load(store(prefixes[0], f"{bucket}/en", "plain"))
    planned(run, f"{tmp_path}/plan")
    elsewhere = replace(run.config, blend=(["s3://elsewhere/en"], None))
    with pytest.raises(ConfigError, match=r"readplan\.json: names data elsewhere") as raised:
        binidx.PlannedDataset(f"{tmp_path}/plan", elsewhere)
    assert "parts_from" in str(raised.value)


def test_the_config_of_another_order_is_refused_by_what_differs(prefixes: list[str], tmp_path: Path) -> None:
    blend = dict.fromkeys(prefixes[:2], 1.0)
    run = load(blend, 80, mid_level_dataset_surplus=0.01)
    needed = [run[number]["tokens"].tolist() for number in range(80)]
    for kind in ("single", "cyclic"):
        planned(run, f"{tmp_path}/{kind}", kind, range(20))
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "random_seed": ({"random_seed": 9}, "random_seed (found 5, the config has 9)"),
        "blend": ({"blend": ([*blend], [0.5, 1.5])}, "weights (found 1.0, the config has 0.5)"),
        "data": ({"blend": ([prefixes[0], prefixes[2]], [1.0, 1.0])}, f"prefixes (found {prefixes[1]}, the config has"),
        "fewer": ({"blend": ([prefixes[0]], [1.0])}, "prefixes (found 2, the config has 1)"),
        "split": ({"split": "9,1,0"}, "bookends (found 1.0, the config has 0.9)"),
        "order": ({"order": "best_fit"}, "order (found None, the config has {'kind': 'best_fit'"),
        "surplus": ({"mid_level_dataset_surplus": 0.2}, "mid_level_dataset_surplus (found 0.01, the config has 0.2)"),
    }
    for name, (change, text) in changes.items():
        config = replace(run.config, **change)
        for kind in ("single", "cyclic"):
            with pytest.raises(ConfigError) as raised:
                binidx.PlannedDataset(f"{tmp_path}/{kind}", config)
            assert f"{tmp_path}/{kind}/readplan.json: is of another order: " in str(raised.value), name
            assert text in str(raised.value)
            assert "give the config of the run that was stored, or store this one" in str(raised.value)
    free = {"eod_mask_loss": True, "mmap_bin_files": False, "path_to_cache": f"{tmp_path}/c", "data_parallel_size": 2}
    dataset = binidx.PlannedDataset(f"{tmp_path}/single", replace(run.config, **free))
    assert [dataset[number]["tokens"].tolist() for number in range(80)] == needed


def test_a_disk_without_times_or_with_other_data_is_an_error(prefixes: list[str], tmp_path: Path) -> None:
    run = load(prefixes[0])
    dataset = planned(run, f"{tmp_path}/plan")
    for mmap in (True, False):
        again = binidx.PlannedDataset(f"{tmp_path}/plan", replace(run.config, mmap_bin_files=mmap))
        assert_same_sample(again[3], run[3])
    shutil.copyfile(f"{prefixes[0]}.bin", tmp_path / "copy")
    (tmp_path / "copy").replace(f"{prefixes[0]}.bin")
    with pytest.raises(ObjectChangedError, match="write the plan again with binidx prepare read-plan"):
        dataset[0]


def test_checksums_that_are_required_are_required_of_a_plan(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(prefixes[0], f"{tmp_path}/checked", "checked")
    monkeypatch.setenv("BINIDX_VERIFY", "1")
    run = load(f"{tmp_path}/checked")
    assert_same_samples(planned(run, f"{tmp_path}/plan"), run)
    monkeypatch.delenv("BINIDX_VERIFY")
    dataset = planned(load(prefixes[0]), f"{tmp_path}/unchecked")
    monkeypatch.setenv("BINIDX_VERIFY", "1")
    with pytest.raises(ObjectNotFoundError, match=r"\.bin\.xxh3: not there when the plan was written"):
        dataset[0]


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    run = random_run(tmp_path, 2)
    order, where = order_of(run), f"{tmp_path}/plan"
    write_read_plan(order, where, plan_reads(order, range(4)))
    with pytest.raises(ObjectExistsError, match="of another run, of other steps of it, or of data that changed"):
        write_read_plan(order, where, plan_reads(order, range(5)))
    with pytest.raises(ConfigError, match="need \\(99"):
        binidx.PlannedDataset(where, replace(run.config, sequence_length=99))
    with pytest.raises(IndexError, match="steps: found 0:9999"):
        plan_reads(order, range(9999))
    with pytest.raises(ConfigError, match="steps: found 3:3, need one to plan"):
        plan_reads(order, range(3, 3))
    Path(f"{where}/readplan.json").write_text("{}")
    with pytest.raises(
        FormatError, match=r"readplan.json: \$.binidx: expected 'readplan' \(found None\); needs a file"
    ):
        binidx.PlannedDataset(where, run.config)


def test_samples_that_are_more_than_their_tokens_are_refused(prefixes: list[str], tmp_path: Path) -> None:
    run = load(prefixes[0], inter_document_masking=True)
    (one,) = run.parts
    sources = one.dataset, one.dataset_path, one.indices, 100, one.index_split
    varlen = binidx.megatron.VarlenGPTDataset(*sources, run.config)
    with pytest.raises(ConfigError, match="order: found VarlenGPTDataset of 16 tokens, a read plan needs GPTDat"):
        plan_reads(order_of(varlen), range(4))
    windows = load(prefixes[0])
    staged = binidx.LengthStagedDataset(windows, [binidx.LengthStage(4, 40), binidx.LengthStage(16, 20)])
    with pytest.raises(
        ConfigError,
        match=r"order: found GPTDataset of 4 tokens, a read plan needs .* of 16",
    ):
        plan_reads(order_of(staged), range(4))
    tokens = dict.fromkeys(("prefix", "middle", "suffix", "pad", "eod"), "t")
    fields = {name: value for name, value in vars(windows.config).items() if name in _init_fields(windows.config)}
    fim = binidx.megatron.GPTFIMDatasetConfig(**fields, fim_rate=0.5, fim_spm_rate=0.5, fim_extra_tokens=tokens)
    planned(windows, f"{tmp_path}/plan")
    with pytest.raises(ConfigError, match="fim_rate: found fill in the middle"):
        binidx.PlannedDataset(f"{tmp_path}/plan", fim)
    order = order_of(windows)
    binidx.bake(order, f"{tmp_path}/baked", binidx.plan_bake(order, range(4)))
    with pytest.raises(ConfigError, match="fim_rate: found fill in the middle"):
        binidx.BakedDataset(f"{tmp_path}/baked", fim)


def _init_fields(config: Any) -> set[str]:
    return {name for name, option in type(config).__dataclass_fields__.items() if option.init}
