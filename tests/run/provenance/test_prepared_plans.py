"""Read plans beside the index caches: written by prepare read-plan or the first start, and found by later starts."""

import json
import random
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.gpt_data import Tokenizer, assert_same_sample
from helpers.traceable_runs import write_source

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.dataset.config import WrittenPaths
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.dataset.stored.planned import PlannedDataset
from binidx.errors import ConfigError, ObjectChangedError, ObjectNotFoundError
from binidx.run.stored.read_planning import prepare_read_plan
from binidx.tools import main


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "binidx-read-plan":
            thread.join()


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    for number in range(2):
        write_source(tmp_path / f"p{number}", random.Random(number), False)
    return [f"{tmp_path}/p{number}" for number in range(2)]


def load(prefixes: Any, cache: str, **options: Any) -> Any:
    options = {"num_samples": 90, "random_seed": 5, "tokenizer": Tokenizer(pad=-5, eod=-6), "split": "8,1,1", **options}
    return binidx.load_dataset(prefixes, 16, path_to_cache=cache, **options)


def test_the_second_start_reads_the_plan_of_the_first(s3: Bucket, prefixes: list[str], requests: Any) -> None:
    uris = [f"{s3.uri}/p{number}" for number in range(2)]
    for prefix, uri in zip(prefixes, uris, strict=True):
        convert_dataset(prefix, uri, verify="size")
    options = {"read_plan": True}
    blend = dict(zip(uris, [0.7, 0.3], strict=True))
    first = load(blend, f"{s3.uri}/cache", **options)
    join_writers()
    requests()
    second = load(blend, f"{s3.uri}/cache", **options)
    assert isinstance(second.wrapped, PlannedDataset)
    assert len(second) == len(first)
    for number in range(len(first)):
        assert_same_sample(second[number], first[number])
    read = requests().keys()
    assert "readplan.json" in read
    assert not [name for name in read if name.endswith((".idx", ".npy"))]
    assert second.loader(2).state_dict() == first.loader(2).state_dict()
    assert second.read_tokens([3, 1]).tolist() == first.read_tokens([3, 1]).tolist()


def test_prepare_read_plan_plans_each_split(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(prefixes, f"{tmp_path}/cache").config
    run = binidx.Run(config, [90, 10, 12], 2)
    run.save(f"{tmp_path}/run.json")
    assert main(["prepare", "read-plan", f"{tmp_path}/run.json", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 3
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*-read-plan/*")}
    assert main(["prepare-cache", f"{tmp_path}/run.json", "--read-plan", "--no-pin", "--threads", "1"]) == 0
    told = capsys.readouterr()
    assert told.out.endswith("".join(f"plan: {uri}\n" for uri in plans))
    assert "is binidx prepare index, then binidx prepare read-plan now" in told.err
    assert {path: path.stat().st_mtime_ns for path in written} == written
    built, planned = (
        binidx.BlendedMegatronDatasetBuilder(
            binidx.GPTDataset, run.sizes, lambda: True, replace(config, read_plan=read_plan)
        ).build()
        for read_plan in (False, True)
    )
    for whole, plan in zip(built, planned, strict=True):
        assert isinstance(plan, PlannedDataset)
        assert len(whole) == len(plan)
        for number in range(len(whole)):
            assert_same_sample(plan[number], whole[number])
    saved = binidx.Run.load(f"{tmp_path}/run.json")
    assert [type(each) for each in saved.build()] == [PlannedDataset] * 3
    assert isinstance(saved.build(planned=False)[0], binidx.megatron.BlendedDataset)
    assert saved.build() is saved.build(planned=False)  # built once is enough
    other = binidx.Run.load(f"{tmp_path}/run.json")
    needed = [idx for step in saved.samples_of_steps(range(3)) for idx in step]
    assert binidx.RunOrder.of(other).readings(range(3)).sample.tolist() == needed  # which knows the documents
    assert not isinstance(replace(other, sizes=[91, 10, 12]).build()[0], PlannedDataset)


def test_splits_without_samples_have_plans_so_that_a_start_reads_no_idx(prefixes: list[str], tmp_path: Path) -> None:
    config = load(dict(zip(prefixes, [0.7, 0.3], strict=True)), f"{tmp_path}/cache").config
    binidx.Run(config, [90, 0, 0], 2).save(f"{tmp_path}/run.json")
    assert main(["prepare", "read-plan", f"{tmp_path}/run.json"]) == 0
    for prefix in prefixes:
        Path(f"{prefix}.idx").unlink()
    saved, own = binidx.Run.load(f"{tmp_path}/run.json"), build(replace(config, read_plan=True), sizes=(90, 0, 0))
    for built in (saved.build(), own):
        assert [type(each) for each in built[:2]] == [PlannedDataset] * 2
        assert [len(each) for each in built] == [90, 0, 0][: len(built)]
        assert built[1][:] == [] == list(built[1].__getitems__([])) == list(built[0].__getitems__([]))


@pytest.mark.parametrize("change", [{"random_seed": 6}, {"num_samples": 91}, {"split": "7,2,1"}, {"order": "best_fit"}])
def test_a_plan_of_other_options_is_not_read(change: dict[str, Any], prefixes: list[str], tmp_path: Path) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    assert isinstance(load(prefixes[0], f"{tmp_path}/cache", read_plan=True).wrapped, PlannedDataset)
    assert not isinstance(load(prefixes[0], f"{tmp_path}/cache", read_plan=True, **change).wrapped, PlannedDataset)
    join_writers()


EOD, PAD = 2005, 1003
MOVING = {
    "random_seed": 6,
    "sequence_length": 8,
    "add_extra_token_to_sequence": False,
    "mid_level_dataset_surplus": 0.5,
}
ELSEWHERE: dict[str, Any] = {"num_dataset_builder_threads": 2, "mmap_bin_files": False, "cache_small_indices": True,
    "trust_cache": "megatron", "object_storage_cache_path": "elsewhere", "defer_npy_index_mmap": True,
    "fast_cache_load": False, "storage_options": {},
    "tokenizer": Tokenizer(pad=PAD, eod=EOD, name="other")}  # fmt: skip
WITHOUT_MOVE: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True,
    "create_attention_mask": True, "inter_document_masking": True, "data_parallel_size": 2, "context_parallel_size": 2,
    "sequence_parallel_size": 2, "hybrid_context_parallel": True, "sequences_per_dataset": {},
    "megatron_samples": "0.16.1", "allow_ambiguous_pad_tokens": True, "multiple_validation_sets": False,
    "full_validation": False, "varlen_sbhd_validation": True}  # fmt: skip
UNCHANGED = {
    "blend",
    "blend_per_split",
    "split",
    "path_to_cache",
    "order",
    "read_plan",
    "written_paths",
    *("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json", "drop_last_partial_validation_sequence"),
}
"""Fields of tests of their own, and those that must be None."""


def build(config: Any, kind: Any = binidx.GPTDataset, sizes: Any = (90, 12, 0)) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[:2]


def assert_same_batches(found: Any, needed: Any) -> None:
    assert len(found) == len(needed)
    for one, other in zip(found, needed, strict=True):
        assert_same_sample(one, other)


@pytest.mark.parametrize("kind", [binidx.GPTDataset, BestFitGPTDataset])
def test_a_plan_is_found_by_all_options_that_move_no_token(kind: Any, prefixes: list[str], tmp_path: Path) -> None:
    fixed = {"blend": (prefixes, [0.7, 0.3]), "split": "7,3,0", "path_to_cache": f"{tmp_path}/cache"}
    first = binidx.GPTDatasetConfig(5, 16, tokenizer=Tokenizer(pad=PAD, eod=EOD), read_plan=True, **fixed)
    for dataset, size in zip(build(first, kind), (90, 12), strict=True):
        prepare_read_plan(dataset, size)
    opened = [binidx.IndexedDataset(prefix) for prefix in prefixes]
    counts = {each.path_prefix: (each.index.sequence_count, each.index.document_count) for each in opened}
    changes = [{}, {"create_attention_mask": True, "reset_attention_mask": True}, {"sequences_per_dataset": counts}]
    changes += [{name: value} for name, value in (MOVING | ELSEWHERE | WITHOUT_MOVE).items()]
    known = {option.name for option in fields(binidx.GPTDatasetConfig) if option.init}
    assert known == {*MOVING, *ELSEWHERE, *WITHOUT_MOVE, *UNCHANGED}  # a new field needs a line above
    for change in changes:
        config = replace(first, **change)
        for found, needed in zip(build(config, kind), build(replace(config, read_plan=False), kind), strict=True):
            assert isinstance(found, PlannedDataset) == (not change.keys() & MOVING.keys()), change
            assert_same_batches(found, needed)


def test_the_last_partial_sample_is_part_of_the_name_of_a_validation_plan_alone(
    prefixes: list[str], tmp_path: Path
) -> None:
    fixed = {"blend": ([prefixes[0]], None), "split": "7,3,0", "path_to_cache": f"{tmp_path}/cache"}
    first = binidx.GPTDatasetConfig(5, 16, tokenizer=Tokenizer(pad=PAD, eod=EOD), read_plan=True, **fixed)
    for dataset in build(first, sizes=(None, None, 0)):
        prepare_read_plan(dataset, None)
    other = replace(first, drop_last_partial_validation_sequence=False)
    found = build(other, sizes=(None, None, 0))
    assert [isinstance(each, PlannedDataset) for each in found] == [True, False]
    for one, needed in zip(found, build(replace(other, read_plan=False), sizes=(None, None, 0)), strict=True):
        assert_same_batches(one, needed)


def test_a_validation_split_with_a_plan_is_read_whole(prefixes: list[str], tmp_path: Path) -> None:
    config = load(prefixes, f"{tmp_path}/cache", full_validation=True).config
    binidx.Run(config, [90, None, 0], 2).save(f"{tmp_path}/run.json")
    assert main(["prepare", "read-plan", f"{tmp_path}/run.json"]) == 0
    whole = build(config, sizes=(90, None, 0))
    found = build(replace(config, read_plan=True), sizes=(90, None, 0))
    for dataset, planned in zip(whole, found, strict=True):
        assert isinstance(planned, PlannedDataset)
        ours, needed = (binidx.build_pretraining_data_loader(each, 0, 2) for each in (planned, dataset))
        assert ours is not None
        assert needed is not None
        assert type(ours.batch_sampler) is type(needed.batch_sampler)
        assert [batch["tokens"].tolist() for batch in ours] == [batch["tokens"].tolist() for batch in needed]


def test_a_plan_with_its_early_name_is_found(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = WrittenPaths(opened={prefix: f"p{number}" for number, prefix in enumerate(prefixes)})
    fixed = {"blend": (prefixes, [0.7, 0.3]), "split": "7,3,0", "path_to_cache": f"{tmp_path}/cache"}
    options = {"written_paths": written, "eod_mask_loss": True, "data_parallel_size": 8, "read_plan": True}
    config = binidx.GPTDatasetConfig(5, 16, tokenizer=Tokenizer(pad=PAD, eod=EOD), **fixed, **options)  # type: ignore[arg-type]
    needed = build(replace(config, read_plan=False))
    assert not caplog.text
    build(config)
    assert caplog.text.count("no read plan, so each .idx is read; binidx prepare read-plan writes it") == 2
    assert f"{NAMES['train'][0]}-train-read-plan" in caplog.text
    for split, dataset, size in zip(NAMES, needed, (90, 12), strict=True):
        folder = Path(str(prepare_read_plan(dataset, size)))
        assert folder.name == f"{NAMES[split][0]}-{split}-read-plan"
        folder.rename(folder.with_name(f"{NAMES[split][1]}-{split}-read-plan"))
        assert Path(str(prepare_read_plan(dataset, size))).name == f"{NAMES[split][1]}-{split}-read-plan"
    caplog.clear()
    for found, whole in zip(build(config), needed, strict=True):
        assert isinstance(found, PlannedDataset)
        assert_same_batches(found, whole)
    assert not caplog.text
    found = build(replace(config, eod_mask_loss=False))  # whose early name was another one
    assert not any(isinstance(each, PlannedDataset) for each in found)


NAMES = {
    "train": ("f9c5e4e33ff9fe4262a251471f479b4b", "43dc4c80489c59f6e15fa2ea1481c2a1"),
    "valid": ("8dcdd96c256c66e47be03a40acb78631", "19114baa442adb18c318f32421333fa9"),
}
"""Of a plan of that config: now, and as the library at the commit 2e6bc1de named it."""


def test_a_plan_of_replaced_files_is_not_opened(prefixes: list[str], tmp_path: Path) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    write_source(tmp_path / "p0", random.Random(9), False)
    with pytest.raises(ObjectChangedError, match=r"the read plan .*-train-read-plan is of the data as it was"):
        load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    Path(f"{prefixes[0]}.bin").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"p0.bin.*; bring that back, or delete it and write the plan again"):
        load(prefixes[0], f"{tmp_path}/cache", read_plan=True)


def test_a_plan_that_cannot_be_written_is_logged(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    next(tmp_path.glob("cache/*-read-plan/readplan.json")).unlink()
    write_source(tmp_path / "p0", random.Random(9), False)
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    assert "or delete this one" in caplog.text


def test_a_plan_needs_a_place(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="read_plan: needs path_to_cache, found none"):
        binidx.load_dataset(prefixes[0], 16, read_plan=True)
