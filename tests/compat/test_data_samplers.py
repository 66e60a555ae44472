"""Our loader where Megatron-LM's stood, which takes its arguments from globals."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
import signal
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from compat.running import HERE

from binidx.compat.megatron import data_samplers, serve
from binidx.compat.megatron.gpt_dataset import GPTDatasetConfig
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.compat.megatron.utils import Split
from binidx.dataset.megatron_releases import MAIN, NEWEST, Rule
from binidx.errors import ConfigError


class Numbers(MegatronDataset):
    """As many samples as asked, each its number."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(idx)}


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, 999
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def dataset(size: int, split: Split = Split.train, **options: Any) -> Numbers:
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    config = GPTDatasetConfig(1, 8, blend=(["en"], None), split="1,0,0", tokenizer=Tokenizer(), **resets, **options)
    return Numbers(None, "en", np.arange(size), None, split, config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def megatron_lm() -> Iterator[ModuleType]:
    """The re-enacted `megatron.training`, and a model-parallel world of one."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(HERE / "megatron_lm"))
        from megatron.core import parallel_state

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        yield importlib.import_module("megatron.training")
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture
def args(megatron_lm: ModuleType) -> Namespace:
    found: Namespace = megatron_lm.get_args()
    vars(found).clear()
    vars(found).update(
        dataloader_type="single", micro_batch_size=2, global_batch_size=6, num_workers=0, data_sharding=True,
        exit_signal_handler=False, full_validation=False,
    )  # fmt: skip
    return found


def numbers(loader: Any, batches: int = 1000) -> list[list[int]]:
    return [batch["number"].tolist() for _, batch in zip(range(batches), loader, strict=False)]


@pytest.mark.parametrize(
    ("asked", "version", "consumed", "differing"),
    [
        (None, "0.16", 4, "bert_sorted_ids"),
        (None, "0.19", 4, "none"),
        (None, "0.16", 0, None),
        ("0.16", "0.16", 4, None),
    ],
)
def test_a_run_that_resumes_with_the_installed_releases_samples_is_told_how_to_keep_others(
    args: Namespace, asked: str | None, version: str, consumed: int, differing: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Changed(Numbers):
        release_rules = frozenset({Rule.bert_sorted_ids})

    monkeypatch.setitem(serve.DEFAULTS, "megatron_samples", asked)
    given = dataset(20, megatron_samples=version)
    for kind in (Numbers, Changed):
        caplog.clear()
        made = kind(given.dataset, "en", given.indices, None, Split.train, given.config)
        data_samplers.build_pretraining_data_loader(made, consumed)
        told = f"with samples of Megatron {version}; .* needs --megatron-samples=RELEASE. .* main's: {differing}"
        assert bool(re.search(told, caplog.text)) == (differing is not None and kind is Changed)


@pytest.mark.parametrize("release", ["0.16", "0.19", MAIN, NEWEST])
def test_a_dataset_without_samples_has_no_loader_with_main_and_is_an_error_before(
    args: Namespace, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_samplers, "find_installed_release", lambda: release)
    if release in (MAIN, NEWEST):
        assert data_samplers.build_pretraining_data_loader(dataset(0), 0) is None
    else:
        with pytest.raises(ConfigError, match="the dataset is empty"):
            data_samplers.build_pretraining_data_loader(dataset(0), 0)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("consumed", [0, 4, 12])
def test_batches_are_those_of_megatrons_samplers(args: Namespace, kind: str, consumed: int) -> None:
    args.dataloader_type = kind
    theirs = importlib.import_module("megatron.training.datasets.data_samplers").build_pretraining_data_loader
    ours = data_samplers.build_pretraining_data_loader
    assert ours.__module__ != theirs.__module__
    found = []
    for build in (ours, theirs):
        torch.manual_seed(1)
        batches = numbers(build(dataset(15), consumed))
        found.append((batches, torch.get_rng_state().tolist()))
    assert found[0] == found[1]  # and as many draws from the generator that a checkpoint keeps


def test_what_is_no_dataset_of_ours_is_handed_through(args: Namespace) -> None:
    assert data_samplers.build_pretraining_data_loader(None, 0) is None
    args.dataloader_type = "external"
    loader = object()
    assert data_samplers.build_pretraining_data_loader(loader, 0) is loader


def test_evaluation_has_its_own_batch_size(args: Namespace) -> None:
    args.eval_micro_batch_size = 3
    build = data_samplers.build_pretraining_data_loader
    assert numbers(build(dataset(6, Split.valid), 0)) == [[0, 1, 2], [3, 4, 5]]
    assert numbers(build(dataset(6, Split.train), 0)) == [[0, 1], [2, 3], [4, 5]]
    args.eval_micro_batch_size = None
    assert numbers(build(dataset(4, Split.test), 0)) == [[0, 1], [2, 3]]


def test_full_validation_gives_every_sample_once_whatever_was_consumed(args: Namespace) -> None:
    valid = dataset(5, Split.valid, full_validation=True)
    assert numbers(data_samplers.build_pretraining_data_loader(valid, 3)) == [[0], [1], [2], [3], [4]]


def listed(loader: Any) -> list[list[int]]:
    batches = [*loader]
    assert all(isinstance(batch, list) for batch in batches)
    return [[int(sample["number"]) for sample in batch] for batch in batches]


def test_hybrid_context_parallelism_gets_a_step_at_a_time(args: Namespace) -> None:
    args.hybrid_context_parallel, args.sequence_packing_scheduler = True, None
    assert listed(data_samplers.build_pretraining_data_loader(dataset(15), 6)) == [[6, 7, 8, 9, 10, 11]]
    valid = dataset(3, Split.valid, full_validation=True)
    assert listed(data_samplers.build_pretraining_data_loader(valid, 0)) == [[0], [1], [2]]
    args.dataloader_type = "cyclic"
    assert len(listed(data_samplers.build_pretraining_data_loader(dataset(15), 0))) == 7


LISTED = [
    {"use_varlen_dataset": True, "varlen_sbhd_validation": False},
    {"dynamic_context_parallel": True},
    {"sequence_packing_scheduler": "dp_balanced"},
    {"hybrid_context_parallel": True, "sequence_packing_scheduler": "dp_balanced"},
]
STACKED: list[dict[str, Any]] = [
    {},
    {"use_varlen_dataset": True, "varlen_sbhd_validation": True},
    {"dynamic_context_parallel": False, "sequence_packing_scheduler": None},
]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("flags", LISTED, ids=str)
def test_packing_schedulers_get_micro_batches_as_lists(args: Namespace, flags: dict[str, Any], kind: str) -> None:
    args.dataloader_type = kind
    needed = numbers(data_samplers.build_pretraining_data_loader(dataset(15), 4))
    vars(args).update(flags)
    assert listed(data_samplers.build_pretraining_data_loader(dataset(15), 4)) == needed


@pytest.mark.parametrize("flags", STACKED, ids=str)
def test_other_runs_get_stacked_micro_batches(args: Namespace, flags: dict[str, Any]) -> None:
    vars(args).update(flags)
    assert numbers(data_samplers.build_pretraining_data_loader(dataset(5), 0)) == [[0, 1], [2, 3]]


def test_workers_begin_with_megatrons_handler_of_signals(args: Namespace) -> None:
    assert data_samplers.worker_init(args) is None
    args.exit_signal_handler, args.exit_signal, args.num_workers = True, signal.SIGTERM, 2
    begin = pickle.loads(pickle.dumps(data_samplers.worker_init(args)))  # as it goes to a spawned one
    begin(0)
    assert importlib.import_module("megatron.training.dist_signal_handler").ENTERED == [signal.SIGTERM]


def test_workers_close_the_files_of_gpus_that_they_inherit(args: Namespace, tmp_path: Path) -> None:
    args.num_workers = 2
    begin = data_samplers.worker_init(args, f"{tmp_path}/nvidia")
    with open(tmp_path / "nvidia0", "wb", buffering=0) as device, open(tmp_path / "other", "wb", buffering=0) as other:
        begin(0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(device.fileno())
        os.dup2(other.fileno(), device.fileno())  # the file closes it again
        assert other.write(b"still open") == 10


def test_subclasses_of_samplers_find_megatrons_attributes() -> None:
    class Backwards(data_samplers.MegatronPretrainingSampler):
        def __iter__(self) -> Any:
            batch: list[int] = []
            for idx in range(self.consumed_samples, self.total_samples):
                batch.append(idx)
                if len(batch) == self.micro_batch_times_data_parallel_size:
                    start, end = self.get_start_end_idx()
                    yield batch[start:end][::-1]
                    batch = []

    assert [*Backwards(13, 2, 2, 1, 2)] == [[5, 4], [9, 8]]
    drawn = data_samplers.MegatronPretrainingRandomSampler(dataset(15), 15, 0, 2, 0, 2, True)
    assert (drawn.last_batch_size, drawn.micro_batch_times_data_parallel_size) == (3, 4)
    assert isinstance(data_samplers.RandomSeedDataset(dataset(3), 1), torch.utils.data.Dataset)
