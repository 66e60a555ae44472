"""The same run from a disk, memory:// and a real S3 server, in one process and in two."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron

import binidx

SIZES = [300, 20, 0]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("local")
    rng = np.random.default_rng(0)
    for name in ("en", "code"):
        write_with_megatron(directory / name, rng.integers(1, 60, 400).astype(np.int32), rng)
    return str(directory)


def upload(local: str, base: str) -> str:
    for name in ("en.bin", "en.idx", "code.bin", "code.idx"):
        with fsspec.open(f"{base}/{name}", "wb") as out:
            out.write(Path(local, name).read_bytes())
    return base


def config(base: str, **changes: Any) -> binidx.GPTDatasetConfig:
    return binidx.GPTDatasetConfig(**{
        "random_seed": 42, "sequence_length": 32, "blend": ([f"{base}/en", f"{base}/code"], [0.7, 0.3]),
        "split": "9,1,0", "tokenizer": TOKENIZER, "reset_position_ids": True, "reset_attention_mask": False,
        "eod_mask_loss": True, **changes,
    })  # fmt: skip


def build(base: str, is_built_on_rank: Any = lambda: True, **changes: Any) -> list[Any]:
    builder = binidx.BlendedMegatronDatasetBuilder
    return builder(binidx.GPTDataset, SIZES, is_built_on_rank, config(base, **changes)).build()


def every_batch(dataset: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    loader = binidx.build_pretraining_data_loader(dataset, 0, 8, **options)
    assert loader is not None
    return list(loader)


@pytest.mark.parametrize("store", ["memory", "s3", "unmapped"])
def test_every_sample_is_the_local_one(local: str, store: str, s3: Any) -> None:
    base = {"memory": "memory://everywhere", "s3": s3.fresh(), "unmapped": local}[store]
    if store != "unmapped":
        upload(local, base)
    for here, there in zip(build(local), build(base, mmap_bin_files=store != "unmapped"), strict=True):
        assert (here is None) == (there is None)
        for one, other in zip(every_batch(here), every_batch(there), strict=True) if here else []:
            assert_same_sample(other, one)


@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_a_resumed_run_goes_on_where_the_unbroken_one_is(local: str, s3: Any, context: str | None) -> None:
    base = upload(local, s3.fresh())
    train = build(base)[0]
    unbroken = every_batch(train)
    middle = len(unbroken) // 2
    # A new Python imports torch, twice a step: 3 s.
    for step in [middle] if context in ("spawn", "forkserver") else [1, middle, len(unbroken) - 1]:
        again = build(base)[0]
        workers = {"num_workers": 2, "multiprocessing_context": context} if context else {}
        loader = binidx.build_pretraining_data_loader(again, step * 8, 8, **workers)
        assert loader is not None
        for resumed, needed in zip(loader, unbroken[step:], strict=True):
            assert_same_sample(resumed, needed)


RANK = """
import hashlib, sys, torch.distributed, binidx
from dataset.test_everywhere import build
torch.distributed.init_process_group("gloo", init_method="file://{rendezvous}", rank={rank}, world_size=2)
train = build({base!r}, path_to_cache={cache!r})[0]
assert build({base!r}, is_built_on_rank=lambda: False) == [None] * 3
try:
    binidx.build_pretraining_data_loader(train, 0, 4)
    sys.exit("a rank that does not say which one it is was served")
except ValueError as error:
    assert "every rank would read the same samples" in str(error)
loader = binidx.build_pretraining_data_loader(train, 0, 4, data_parallel_rank={rank}, data_parallel_size=2)
digests = [hashlib.sha256(batch["tokens"].numpy().tobytes()).hexdigest() for batch in loader]
gathered = [None, None]
torch.distributed.all_gather_object(gathered, (train.dataset_sample_index.tobytes(), len(digests)))
assert gathered[0] == gathered[1], "the ranks disagree"
print("\\n".join(digests))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("own_cache", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_build_from_one_bucket_and_see_one_order(
    local: str, s3: Any, tmp_path: Path, own_cache: bool
) -> None:
    base = upload(local, s3.fresh())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK.format(
                rendezvous=tmp_path / "store", rank=rank, base=base,
                cache=f"{base}/cache" if own_cache else None,
            )],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=1200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    served = [digest for step in zip(*(out.split() for out, _ in outputs), strict=True) for digest in step]
    needed = [
        hashlib.sha256(half.numpy().tobytes()).hexdigest()
        for batch in every_batch(build(local)[0])
        for half in batch["tokens"].split(4)
        if len(batch["tokens"]) == 8
    ]
    assert served == needed
    assert served


def test_the_second_start_finds_its_indices_in_the_bucket(local: str, s3: Any) -> None:
    class GPTDataset(binidx.GPTDataset):  # the class name is part of the cache's name
        def _build(self) -> Any:
            raise AssertionError("built again")

    base = upload(local, s3.fresh())
    cached = config(base, cache_small_indices=True)
    first, second = (
        binidx.BlendedMegatronDatasetBuilder(kind, SIZES, lambda: True, cached).build()[0]
        for kind in (binidx.GPTDataset, GPTDataset)
    )
    assert_same_sample(second[5], first[5])


def test_new_data_under_the_same_name_is_not_read_through_the_old_index(local: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for name in ("en", "code"):
        write_with_megatron(tmp_path / name, rng.integers(1, 60, 400).astype(np.int32), rng)
    build(str(tmp_path), cache_small_indices=True)
    for name in ("en", "code"):
        write_with_megatron(tmp_path / name, rng.integers(1, 60, 400).astype(np.int32), rng)
    again = build(str(tmp_path), cache_small_indices=True)[0]
    fresh = build(str(tmp_path), path_to_cache=str(tmp_path / "elsewhere"))[0]
    for one, other in zip(every_batch(again), every_batch(fresh), strict=True):
        assert_same_sample(one, other)


def test_storage_options_of_the_config_reach_data_and_caches(
    local: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = upload(local, s3.fresh())
    for name in s3.server.environment:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    options = s3.server.storage_options
    first, second = (build(base, storage_options=options, path_to_cache=f"{base}/cache")[0] for _ in range(2))
    assert fsspec.filesystem("s3", **options).glob(f"{base}/cache/*BlendedDataset*binidx.json")
    assert_same_sample(second[3], first[3])
    assert options["secret"] not in repr(first.config)


def test_a_rank_of_a_launcher_that_does_not_say_who_it_is_is_refused(
    local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="group of 4 processes"):
        binidx.build_pretraining_data_loader(build(local)[0], 0, 4)


def test_a_list_of_validation_sets_needs_a_loader_each(local: str) -> None:
    with pytest.raises(ValueError, match="a list of 2 datasets"):
        binidx.build_pretraining_data_loader(build(local)[:2], 0, 4)


def test_no_dataset_no_loader() -> None:
    assert binidx.build_pretraining_data_loader(None, 0, 4) is None


def test_an_unknown_dataloader_type_is_refused(local: str) -> None:
    with pytest.raises(ValueError, match="needs 'single' or 'cyclic'"):
        binidx.build_pretraining_data_loader(build(local)[0], 0, 4, dataloader_type="external")  # type: ignore[arg-type]


def test_cyclic_batches_are_one_epoch_in_another_order(local: str) -> None:
    train = build(local)[0]
    loader = binidx.build_pretraining_data_loader(train, 0, 5, dataloader_type="cyclic")
    assert loader is not None
    unsharded = binidx.build_pretraining_data_loader(train, 0, 5, 1, 2, dataloader_type="cyclic", data_sharding=False)
    rule = binidx.megatron.MegatronPretrainingRandomSampler(train, len(train), 0, 5, 1, 2, False)
    assert unsharded is not None
    assert list(unsharded.batch_sampler) == list(rule)  # type: ignore[call-overload]
    first, second = ([tuple(map(int, row)) for batch in loader for row in batch["tokens"]] for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
