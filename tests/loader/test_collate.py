"""Batches that cross from a worker as a block are the batches of this process, bit for bit."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpt_data import TOKENIZER, write_with_megatron
from helpers.third_party import ThirdParty
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate

import binidx
from binidx.loader.collate import SharedBlocks, WorkerBatch, pack_batch, receive_block


def assert_same_batch(found: Any, needed: Any) -> None:
    assert list(found) == list(needed)
    for name in needed:
        assert found[name].dtype == needed[name].dtype
        assert found[name].shape == needed[name].shape
        assert found[name].numpy().tobytes() == needed[name].numpy().tobytes(), name


@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([7, 2**31 - 1]),
    st.booleans(),
)
def test_a_block_gives_the_batch_back(count: int, length: int, seed: int, resets: bool, most: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, most, (count, length + 1), endpoint=True)
    positions = rng.integers(0, length, (count, length)) if resets else np.tile(np.arange(length), (count, 1))
    arrays = {
        "dataset_id": rng.integers(0, 9, count).astype(np.int16), "tokens": text[:, :-1].copy(),
        "labels": text[:, 1:].copy(), "loss_mask": rng.integers(whole, 2, (count, length)).astype(np.float32),
        "position_ids": positions, "cu_seqlens": rng.integers(0, 9, (count, 3)).astype(np.int32),
    }  # fmt: skip
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = pack_batch(batch)
    assert isinstance(packed, WorkerBatch)
    assert packed.block.nbytes <= 4 * count * (length * (2 if resets else 1) + 2 + length // 32)
    assert_same_batch(packed.unpack(), batch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 2**31),
        ("tokens", -1),
        ("labels", 5),
        ("loss_mask", 0.5),
        ("loss_mask", -0.0),
        ("position_ids", -(2**40)),
    ],
)
def test_a_batch_that_a_block_would_change_crosses_as_it_is(name: str, value: float) -> None:
    text = torch.arange(9)[None]
    batch = {
        "tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone(), "loss_mask": torch.ones(1, 8),
        "position_ids": torch.arange(8)[None].clone(),
    }  # fmt: skip
    assert isinstance(pack_batch(batch), WorkerBatch)
    batch[name][0, 3] = value
    assert pack_batch(batch) is batch


@pytest.mark.parametrize(
    "flags", [[], ["reset_position_ids", "eod_mask_loss"], ["create_attention_mask"], ["inter_document_masking"]]
)
def test_workers_serve_the_batches_of_this_process(flags: list[str], tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, *flags)
    here, there = (
        binidx.build_pretraining_data_loader(dataset, 0, 4, num_workers=workers, persistent_workers=False)
        for workers in (0, 2)
    )
    batches = zip(islice(iter(there), 9), islice(iter(here), 9), strict=True)
    for found, needed in batches:
        assert_same_batch(found, needed)
    assert_same_batch(there[3], here[3])


KINDS = ["string", "list", "dict", "bfloat16", "number", "tensor", "large", "rows", "labels", "empty"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (1, "fork"), (2, "fork")])
def test_a_dataset_of_any_values_beside_gpts_is_served_as_by_torch(
    kind: str, num_workers: int, start: str | None
) -> None:
    check_third_party(kind, num_workers, start)


@pytest.mark.parametrize(("num_workers", "kind"), [(1, "string"), (2, "dict"), (1, "bfloat16"), (2, "list")])
def test_spawned_workers_serve_any_values_beside_gpts(num_workers: int, kind: str) -> None:
    check_third_party(kind, num_workers, "spawn")


def check_third_party(kind: str, num_workers: int, start: str | None) -> None:
    dataset = ThirdParty(kind)
    options = {"num_workers": num_workers, "persistent_workers": False, "multiprocessing_context": start}
    loader: Any = binidx.build_pretraining_data_loader(dataset, 0, 4, **options)
    needed = [default_collate([dataset[idx] for idx in range(first, first + 4)]) for first in range(0, 24, 4)]
    (found, found_tree), (leaves, tree) = tree_flatten([*loader]), tree_flatten(needed)
    assert found_tree == tree
    for one, other in zip(found, leaves, strict=True):
        assert (type(one), getattr(one, "dtype", "")) == (type(other), getattr(other, "dtype", ""))
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def build_dataset(tmp_path: Path, *flags: str) -> Any:
    rng = np.random.default_rng(3)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(0, 40, 200).astype(np.int32), rng, np.uint16)
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 24, "blend": ([prefix], None), "split": "1,0,0", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        **dict.fromkeys(flags, True),
    })  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [60, 0, 0], lambda: True, config).build()[0]


def test_a_slot_is_free_when_the_last_view_of_its_array_is_gone() -> None:
    blocks = SharedBlocks(num_workers=1, num_slots=2, slot_bytes=24)
    assert blocks.take((1, 7)) is None
    (slot, written), (other, _) = blocks.take((2, 3)), blocks.take((1, 6))
    assert (slot, other, blocks.take((1, 1))) == (0, 1, None)
    written[:] = [[1, 2, 3], [4, 5, 6]]
    view = receive_block(blocks.number, slot, (2, 3))[1:][:, ::2]
    if (child := os.fork()) == 0:
        del view
        os._exit(0)
    os.waitpid(child, 0)
    assert blocks.take((1, 1)) is None
    assert view.tolist() == [[4, 6]]
    del view
    assert blocks.take((1, 1)) is not None


def test_batches_that_nobody_takes_leave_their_slots_free(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path)
    loader: Any = binidx.build_pretraining_data_loader(dataset, 0, 4, num_workers=1)
    for _ in range(3):
        next(iter(loader))  # the worker persists
    *_, last = iter(loader)
    assert_same_batch(last, loader[len(loader) - 1])
    blocks = loader.collate_fn.blocks
    assert [blocks.take((1, 1)) is not None for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_spawned_workers_write_to_the_slots(start: str, tmp_path: Path) -> None:
    options = {"num_workers": 1, "persistent_workers": False, "multiprocessing_context": start}
    loader: Any = binidx.build_pretraining_data_loader(build_dataset(tmp_path), 0, 4, **options)
    assert_same_batch(next(batches := iter(loader)), loader[0])
    words = loader.collate_fn.blocks.memory[0, 1:].numpy()
    assert words.any()
    del batches
