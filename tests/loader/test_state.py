"""A loader's state: saved after any batch and loaded into a new loader, the rest is what the unbroken one serves."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_samples import config
from helpers.random_datasets import Document, build_ours
from helpers.readahead_loaders import Numbers, loader, no_thread_is_left, values
from helpers.traceable_runs import random_run, write_source
from servers.http_objects import Server

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.errors import ConfigError
from binidx.loader.samplers import DataloaderType, MegatronPretrainingSampler, build_sampler
from binidx.loader.torch_loader import PretrainingLoader
from binidx.packed.packed_files import PackedDataset, PackedFiles
from binidx.packed.packed_order import PackedRun, PackedSet
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # torchdata's own, of torch
    from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["no_thread_is_left"]

KINDS: list[DataloaderType] = ["single", "cyclic"]


def served(batches: Any, count: int) -> list[list[int]]:
    return values(itertools.islice(batches, count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ahead", [0, 8])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_follows_a_state_is_the_rest(kind: str, num_ahead: int, num_workers: int, persistent: bool) -> None:
    if persistent and not num_workers:
        pytest.skip("no workers to persist")
    options = {"kind": kind, "num_workers": num_workers, "persistent_workers": persistent}
    unbroken = values(loader(Numbers(60), num_ahead, **options))
    other = loader(Numbers(60), num_ahead, **options)
    for stop in (1, 4, 9, 2):
        first = loader(Numbers(60), num_ahead, **options)
        assert served(first, stop) == unbroken[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        assert state["consumed_samples"] == first.consumed_samples == 4 * stop
        for _ in range(2 if kind == "single" else 1):
            other.load_state_dict(state)
            assert values(other) == unbroken[stop:]


def test_a_cyclic_loader_that_was_left_goes_on_from_what_was_served_and_not_from_what_workers_hold() -> None:
    options = {"kind": "cyclic", "num_workers": 2}
    epochs = [batch for _ in range(2) for batch in loader(Numbers(60), 0, kind="cyclic")]
    left = loader(Numbers(60), 0, **options)
    assert served(left, 3) + values(left) == values(loader(Numbers(60), 0, kind="cyclic"))
    assert left.consumed_samples == 60
    assert len(epochs) == 30


def test_a_state_is_good_for_any_number_of_ranks() -> None:
    def samples(consumed: int, m: int, size: int) -> list[int]:
        ranks = [list(MegatronPretrainingSampler(96, consumed, m, rank, size)) for rank in range(size)]
        return [idx for step in zip(*ranks, strict=True) for batch in step for idx in batch]

    first = binidx.build_pretraining_data_loader(Numbers(96), 0, 4, 0, 3)
    assert first is not None
    served(first, 2)
    state = first.state_dict()
    for m, size in [(4, 3), (2, 6), (12, 1), (6, 2), (1, 8)]:
        loaders = [binidx.build_pretraining_data_loader(Numbers(96), 0, m, rank, size) for rank in range(size)]
        for each in loaders:
            assert each is not None
            each.load_state_dict(state)
        steps = zip(*(values(each) for each in loaders), strict=True)
        assert [idx for step in steps for batch in step for idx in batch] == [3 * idx for idx in samples(24, m, size)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_begins_at_the_consumed_samples_it_is_given(kind: str) -> None:
    unbroken, moved = values(loader(Numbers(60), 8, kind=kind)), loader(Numbers(60), 8, kind=kind)
    for step in (5, 2, 14, 0):
        moved.consumed_samples = 4 * step
        assert served(moved, 2) == unbroken[step : step + 2]


@pytest.mark.parametrize(
    "state",
    [
        {}, {"consumed_samples": 8}, {"fingerprint": ""}, [1], None, {"epoch": 1},
        {"consumed_samples": 8, "fingerprint": "", "tokens": [1]},
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="needs what state_dict"):
        loader(Numbers(60), 0).load_state_dict(state)


def packed(folder: Path, **_: Any) -> Any:
    """A loader of 60 blocks of packed files."""
    builder = binidx.packed.PackedDatasetBuilder(str(folder), "packed", 48, 0, np.uint16)
    builder.add_array(np.arange(5 * 48) % 900)
    builder.write_reminder()
    files = PackedFiles(builder.filenames[:5], 4)
    run = PackedRun([PackedSet(5, files.num_blocks, 1, 7)], None, 0, 0, 1, 0, 4)
    return loader(PackedDataset(run, [files]), 0)


LOADERS: dict[str, Callable[[Path], PretrainingLoader]] = {
    "single": lambda _: loader(Numbers(60), 0),
    "cyclic": lambda _: loader(Numbers(60), 0, kind="cyclic"),
    "packed": packed,
}


def positions(made: PretrainingLoader, value: Any) -> Iterator[Callable[[], object]]:
    """Every way to give a position to what a loader is made of, but for the constructor."""
    yield lambda: setattr(made, "consumed_samples", value)
    yield lambda: made.load_state_dict({**made.state_dict(), "consumed_samples": value})
    yield lambda: iter(made.batch_sampler).load_state_dict({"consumed_samples": value})


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("value", [-4, np.int64(-4), 8.5, 8.0, "8", True, np.True_, None, float("inf"), [8]])
def test_what_is_no_whole_number_from_0_is_no_position(kind: str, value: Any, tmp_path: Path) -> None:
    made = LOADERS[kind](tmp_path)
    for give in positions(made, value):
        with pytest.raises(ConfigError, match=r"consumed_samples: found .* needs a whole number"):
            give()
    for kind_of_sampler in KINDS:
        with pytest.raises(ConfigError, match=r"consumed_samples: found .* needs a whole number"):
            build_sampler(kind_of_sampler, range(60), value, 4, 0, 1)
    assert made.consumed_samples == 0
    assert len([*made]) == 15


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_ends_where_the_samples_end_and_a_cyclic_one_nowhere(kind: str, tmp_path: Path) -> None:
    made = LOADERS[kind](tmp_path)
    for value in (60, np.int32(60)):
        for give in positions(made, value):
            give()
            assert type(made.consumed_samples) is int
            assert len([*made]) == (15 if kind == "cyclic" else 0)
    for value in (61, 10**9):
        for give in positions(made, value):
            if kind == "cyclic":
                give()
                continue
            with pytest.raises(
                ConfigError, match=f"consumed_samples: found {value}, needs a whole number from 0 to 60"
            ):
                give()
    assert build_sampler("cyclic", range(60), 60, 4, 0, 1).consumed_samples == 60
    with pytest.raises(ConfigError, match="consumed_samples: found 60, needs a whole number from 0 to 59"):
        build_sampler("single", range(60), 60, 4, 0, 1)


def test_a_state_after_a_last_step_that_is_short_is_a_state() -> None:
    for rank in range(2):
        sampler = MegatronPretrainingSampler(31, 1, 2, rank, 2, drop_last=False)
        finished = PretrainingLoader(Numbers(31), batch_sampler=sampler, collate_fn=list)
        assert len([*finished]) == 8
        finished.load_state_dict(finished.state_dict())
        assert [*finished] == []


def test_a_loader_without_a_batch_warns_and_one_without_a_sample_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    assert list(binidx.build_pretraining_data_loader(Numbers(3), 0, 4)) == []
    assert "serves no batch: 3 samples of the dataset fill no step of" in caplog.text
    with pytest.raises(ConfigError, match="found 0, needs at least 1; the dataset is empty"):
        binidx.build_pretraining_data_loader(Numbers(0), 0, 4)


def test_a_state_of_another_order_is_refused() -> None:
    cyclic = loader(Numbers(60), 0, kind="cyclic").state_dict()
    for other in (loader(Numbers(60), 0), loader(Numbers(60), 0, kind="cyclic", m=2), loader(Numbers(61), 0)):
        size = f"of {len(other.dataset)} samples"
        with pytest.raises(
            ConfigError, match=f"resume: state is for fingerprint .* of 60 samples, .* {size}; they differ in"
        ):
            other.load_state_dict(cyclic)
        with pytest.raises(
            ConfigError, match=f"resume: state is for fingerprint [0-9a-f]*, this loader .* {size}; check"
        ):
            other.load_state_dict({name: cyclic[name] for name in ("consumed_samples", "fingerprint")})


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"random_seed": 2}, r"random_seed \(7 in the state, 2 here\)\."),
    ({"sequence_length": 16}, r"sequence_length \(8 in the state, 16 here\)"),
    ({"split": "3,1,0"}, "documents"),
    ({"add_extra_token_to_sequence": False}, "add_extra_token_to_sequence"),
    ({"blend": [0.5, 0.5]}, r"weights \(\[0.25, 0.75\] in the state, \[0.5, 0.5\] here\)"),
    ({"cyclic": True}, r"dataloader_type \(single in the state, cyclic here\)"),
]


@pytest.mark.parametrize(("changes", "named"), DIFFERENT)
def test_a_refused_state_names_what_differs_old_and_new_and_not_what_is_equal(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    for name in "ab":
        write_source(tmp_path / name, random.Random(name), False)

    def made(*, cyclic: bool = False, blend: Sequence[float] = (0.25, 0.75), **options: Any) -> Any:
        prefixes = [f"{tmp_path}/a", f"{tmp_path}/b"]
        dataset = run_of("", blend=(prefixes, [*blend]), random_seed=options.pop("random_seed", 7), **options)
        kind: DataloaderType = "cyclic" if cyclic else "single"
        return binidx.build_pretraining_data_loader(dataset, 0, 4, dataloader_type=kind)

    state = json.loads(json.dumps(made().state_dict()))
    other = made(**changes)
    with pytest.raises(ConfigError, match=f"they differ in .*{named}") as caught:
        other.load_state_dict(state)
    changed = {"weights" if name == "blend" else name for name in changes}
    for name in {"random_seed", "sequence_length", "weights"} - changed:
        assert f"{name} (" not in str(caught.value)
    del state["facts"]  # a state of 0.1.0
    with pytest.raises(ConfigError, match="check data, split, weights, seed and sequence length"):
        other.load_state_dict(state)
    made().load_state_dict(state)


def test_the_facts_of_a_state_stay_small_however_many_sources_a_blend_has(tmp_path: Path) -> None:
    prefixes = [f"{tmp_path}/{number}" for number in range(40)]
    for number, prefix in enumerate(prefixes):
        write_source(Path(prefix), random.Random(number), False)
    weights = [1 + number / 7 for number in range(40)]
    made = binidx.build_pretraining_data_loader(run_of("", blend=(prefixes, weights)), 0, 4)
    assert made is not None
    first, second = made.state_dict()["facts"], made.state_dict()["facts"]
    assert len(json.dumps(first)) < 1_000
    assert first == second is not first
    assert all(second[name] is value for name, value in first.items())  # computed once


def run_of(prefix: str, kind: Any = binidx.GPTDataset, **options: Any) -> Any:
    sizes = options.pop("sizes", [20, 0, 0])
    made = config(options.pop("blend", ([prefix], None)), **{"split": "1,0,0", **options})
    return binidx.BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, made).build()[0]


def state_of(dataset: Any) -> dict[str, Any]:
    made = binidx.build_pretraining_data_loader(dataset, 0, 4)
    assert made is not None
    return made.state_dict()


def test_fingerprints_know_the_order_and_not_the_place(tmp_path: Path) -> None:
    a, copy, other = (tmp_path / name for name in ("a", "copy", "other"))
    write_source(a, random.Random(1), False)
    write_source(copy, random.Random(1), False)
    write_source(other, random.Random(2), False)
    state = state_of(run_of(str(a)))
    assert state_of(run_of(str(copy))) == state
    assert state_of(run_of(str(a), sizes=[19, 0, 0])) == state
    for changed in (
        run_of(str(other)),
        run_of(str(a), random_seed=2),
        run_of(str(a), sequence_length=9),
        run_of(str(a), split="9,1,0"),
        run_of(str(a), add_extra_token_to_sequence=False),
        run_of(str(a), sizes=[5000, 0, 0]),
    ):
        assert state_of(changed) != state


def tell_by_a_manifest(prefix: str, target: str, plan: int) -> None:
    convert_dataset(prefix, target, overwrite=True)
    with create_object(Location.of(f"{target}.manifest.json")) as out:
        out.write(json.dumps({"binidx_manifest": 1, "plan": str(plan)}).encode())


TELLING: dict[str, Any] = {
    "raw": lambda prefix, target, _: convert_dataset(prefix, target, way=StorageFormat(checksums=True), overwrite=True),
    "zstd": lambda prefix, target, _: convert_dataset(prefix, target, way=StorageFormat(codec="zstd"), overwrite=True),
    "manifest": tell_by_a_manifest,
}


@pytest.mark.parametrize("kind", TELLING)
@pytest.mark.parametrize("remote", [False, True])
def test_other_tokens_of_equal_lengths_are_refused_where_something_tells_of_them(
    kind: str, remote: bool, tmp_path: Path, s3: Bucket
) -> None:
    old, new = (
        build_ours(tmp_path / name, [Document(tokens, [300], [])], np.uint16)
        for name, tokens in (("old", np.arange(300)), ("new", np.arange(300) % 7))
    )
    target, copy = (f"{s3.fresh() if remote else tmp_path}/{name}" for name in ("en", "copy"))
    for prefix in (target, copy):
        TELLING[kind](old, prefix, 1)
    state = state_of(run_of(target))
    assert [*state["tokens"][0]] == [kind]
    assert state_of(run_of(copy)) == state
    plain = state_of(run_of(old))
    assert plain == {name: value for name, value in state.items() if name != "tokens"}

    TELLING[kind](new, target, 2)
    loader_of_new = binidx.build_pretraining_data_loader(run_of(target), 0, 4)
    assert loader_of_new is not None
    with pytest.raises(ConfigError, match=rf"dataset 0 of this loader has other tokens .*\({kind} digest\); bring"):
        loader_of_new.load_state_dict(json.loads(json.dumps(state)))
    loader_of_new.load_state_dict(plain)  # of an earlier release, or of data of which nothing told


def test_a_store_that_fails_costs_the_digests_of_a_state_and_not_the_state(
    web: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = build_ours(tmp_path / "en", [Document(np.arange(300), [300], [])], np.uint16)
    TELLING["raw"](prefix, prefix, 1)
    for end in ("idx", "bin", "bin.xxh3"):
        web.objects[f"/state/en.{end}"] = Path(f"{prefix}.{end}").read_bytes()
    dataset = run_of(f"{web.endpoint}/state/en")
    web.behaviour = "forbidden"
    try:
        assert "tokens" not in state_of(dataset)
    finally:
        web.behaviour = "good"
    assert "the state of the loader does not cover its tokens: " in caplog.text
    assert [*state_of(dataset)["tokens"][0]] == ["raw"]


def test_weights_are_part_of_the_order(tmp_path: Path) -> None:
    prefixes = [write_source(tmp_path / name, random.Random(1), False) for name in "ab"]
    states = [state_of(run_of("", blend=(prefixes, weights))) for weights in ([1.0, 1.0], [2.0, 2.0], [1.0, 2.0])]
    assert states[0] == states[1] != states[2]


def test_a_staged_run_is_known_by_its_stages_and_not_by_its_place(tmp_path: Path) -> None:
    def staged(name: str, weights: list[float]) -> Any:
        prefixes = [write_source(tmp_path / f"{name}{number}", random.Random(number), False) for number in range(2)]
        stages = [binidx.Stage((prefixes, [1.0, 1.0]), 10), binidx.Stage((prefixes, weights), 10)]
        return binidx.StagedBlendedDataset(binidx.GPTDataset, stages, config())

    assert state_of(staged("a", [1.0, 2.0])) == state_of(staged("b", [1.0, 2.0])) != state_of(staged("a", [2.0, 1.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_by_its_number_is_the_batch_that_was_served(tmp_path: Path, kind: DataloaderType) -> None:
    dataset = random_run(tmp_path, 5)
    for rank in range(2):
        made = binidx.build_pretraining_data_loader(dataset, 0, 3, rank, 2, dataloader_type=kind)
        assert made is not None
        for step, batch in enumerate(made):
            again = made[step]
            assert again.keys() == batch.keys()
            assert all((again[key] == batch[key]).all() for key in batch)
        resumed = binidx.build_pretraining_data_loader(dataset, 12, 3, rank, 2, dataloader_type=kind)
        assert resumed is not None
        assert (next(iter(resumed))["tokens"] == made[2]["tokens"]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdatas_loader_over_our_samplers_resumes_at_every_batch(kind: DataloaderType, num_workers: int) -> None:
    def made() -> Any:
        return StatefulDataLoader(
            Numbers(40), batch_sampler=build_sampler(kind, range(40), 0, 3, 1, 2), num_workers=num_workers
        )

    unbroken = values(made())
    for stop in range(1, len(unbroken)):
        first, second = made(), made()
        assert served(first, stop) == unbroken[:stop]
        second.load_state_dict(first.state_dict())
        assert values(second) == unbroken[stop:]
