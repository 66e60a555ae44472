"""Users' subclasses of Megatron's classes: the same source over Megatron Core and over ours, the same samples."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compat.users import library
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron

import binidx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    THEIRS = library(stand_ins=False)
    OURS = library(stand_ins=True)

KINDS = ("Marked", "Queried", "Copied", "Backwards", "Built", "OfSquares", "OfShifted", "FromStore")


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(2)
    return write_with_megatron(tmp_path_factory.mktemp("corpus") / "en", rng.integers(0, 40, 50).astype(np.int32), rng)


def config(lib: SimpleNamespace, kind: Any = None, **options: Any) -> Any:
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return (kind or lib.gpt_dataset.GPTDatasetConfig)(
        **{"random_seed": 3, "sequence_length": 16, "split": "7,2,1", "tokenizer": TOKENIZER, **resets, **options}
    )


def build(lib: SimpleNamespace, kind: Any, sizes: Any, config: Any) -> Any:
    return lib.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def tensors(sample: Any) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if value is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resets", [False, True])
def test_samples_are_those_of_the_same_class_over_megatron(
    kind: str, resets: bool, prefix: str, tmp_path: Path
) -> None:
    options = {"reset_position_ids": resets, "reset_attention_mask": resets, "eod_mask_loss": resets}
    blend = {"blend": ([prefix, prefix], [0.3, 0.7])}
    for lib in (OURS, THEIRS):
        lib.built = build(
            lib,
            getattr(lib.users, kind),
            [40, 6, 0],
            config(lib, path_to_cache=str(tmp_path / lib.gpt_dataset.__name__), **blend, **options),
        )
    for ours, theirs in zip(OURS.built[:2], THEIRS.built[:2], strict=True):
        assert len(ours) == len(theirs)
        together = ours.__getitems__([*range(len(ours))])
        for number in range(len(theirs)):
            expected = tensors(theirs[number])
            assert_same_sample(tensors(ours[number]), expected)
            assert_same_sample(tensors(together[number]), expected)
        assert type(ours.datasets[0]).__mro__[1].__name__ == type(theirs.datasets[0]).__mro__[1].__name__


@pytest.mark.parametrize("kind", ["Marked", "Queried", "OfSquares"])
def test_the_padding_sample_is_megatrons(kind: str, prefix: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"blend": ([prefix], None), "path_to_cache": str(tmp_path)}
    made = [build(lib, getattr(lib.users, kind), [9, 3, 0], config(lib, **options)) for lib in (OURS, THEIRS)]
    ours, theirs = (each[0][None] for each in made)
    assert_same_sample(ours, theirs)
    assert not ours["loss_mask"].any()


def test_an_array_of_a_users_own_is_split_and_blended_as_megatron_does(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{size}.npy") for size in (40, 10, 25)]
    for path, size in zip(paths, (40, 10, 25), strict=True):
        np.save(path, np.arange(size * 2).reshape(size, 2))
    blends: list[tuple[dict[str, Any], list[int | None]]] = [
        ({"blend": (paths, None), "split": "50,50,0"}, [30, 0, None]),
        ({"blend": (paths, None), "split": "50,50,0"}, [None, None, None]),
        ({"blend": (paths, [1.0, 2.0, 3.0]), "split": "60,20,20"}, [500, 20, 1]),
        ({"blend": (paths[:1], None), "split": "100,0,0"}, [70, 0, 0]),
        ({"blend_per_split": [(paths, [1.0, 2.0, 3.0]), None, None]}, [100, None, None]),
        ({"blend_per_split": [(paths, None), (paths[:2], None), (paths[2:], None)]}, [None, 20, 9]),
    ]
    for options, sizes in blends:
        made = []
        for lib in (OURS, THEIRS):
            asked = lib.blended_megatron_dataset_config.BlendedMegatronDatasetConfig(3, 8, **options)
            made.append(build(lib, lib.users.ArrayDataset, sizes, asked))
        for ours, theirs in zip(*made, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is None:
                continue
            assert len(ours) == len(theirs)
            assert all((ours[i]["text"] == theirs[i]["text"]).all() for i in range(len(theirs)))
            if hasattr(theirs, "dataset_index"):
                assert (ours.dataset_index == theirs.dataset_index).all()
                assert ours.weights == theirs.weights


def test_a_blend_with_indices_of_a_users_own_serves_what_megatrons_does(prefix: str) -> None:
    made = []
    for lib in (OURS, THEIRS):
        asked = config(lib, blend=([prefix], None))
        parts = [build(lib, lib.gpt_dataset.GPTDataset, [size, 0, 0], asked)[0] for size in (9, 14)]
        made.append(lib.users.Mirrored(parts, [0.25, 0.75], 12, asked))
    ours, theirs = made
    assert ours.unique_description == theirs.unique_description
    together = ours.__getitems__([*range(12)])
    for number in range(12):
        assert_same_sample(ours[number], theirs[number])
        assert_same_sample(together[number], theirs[number])


def test_a_config_of_a_users_own_names_caches_as_megatron_does(prefix: str) -> None:
    made = []
    for lib in (OURS, THEIRS):
        asked = config(lib, lib.users.DialConfig, dial=2, blend=([prefix], None))
        made.append(build(lib, lib.users.Dialled, [None, None, None], asked)[0])
    ours, theirs = made
    assert (ours.unique_description, ours.unique_description_hash) == (
        theirs.unique_description,
        theirs.unique_description_hash,
    )
    assert len(ours) == len(theirs)


def test_a_users_dataset_reads_a_prefix_in_s3_with_nothing_said_but_its_path(s3: Bucket, prefix: str) -> None:
    remote = f"{s3.fresh()}/en"
    with binidx.IndexedDatasetBuilder(remote + ".bin", dtype=np.uint16) as builder:
        builder.add_index(prefix)
        builder.finalize(remote + ".idx")
    [ours, *_] = build(OURS, OURS.users.FromStore, [20, 0, 0], config(OURS, blend=([remote], None)))
    [theirs, *_] = build(THEIRS, THEIRS.users.FromStore, [20, 0, 0], config(THEIRS, blend=([prefix], None)))
    for number in range(20):
        assert_same_sample(ours[number], theirs[number])
    assert OURS.indexed_dataset.IndexedDataset.exists(remote)
    assert not OURS.indexed_dataset.IndexedDataset.exists(remote + "-not")


def test_samples_made_by_a_users_method_are_not_read_ahead_in_threads(s3: Bucket, prefix: str) -> None:
    from binidx.loader.dataset_protocols import is_pure

    asked = config(OURS, blend=([prefix], None))
    plain = build(OURS, OURS.gpt_dataset.GPTDataset, [9, 0, 0], asked)[0]
    assert is_pure(plain)
    weighted = config(OURS, blend=([prefix, prefix], [1.0, 2.0]))
    blend = build(OURS, OURS.gpt_dataset.GPTDataset, [9, 0, 0], weighted)[0]
    assert isinstance(blend, OURS.blended_dataset.BlendedDataset)
    assert is_pure(blend)
    for kind in ("Marked", "Queried", "Copied"):
        assert not is_pure(build(OURS, getattr(OURS.users, kind), [9, 0, 0], asked)[0])


def test_datasets_and_configs_pickle_with_what_megatrons_keep(prefix: str) -> None:
    storage = OURS.object_storage_utils.ObjectStorageConfig("/unused")
    opened = OURS.indexed_dataset.IndexedDataset(prefix, mmap=False, object_storage_config=storage, dtype_code=8)
    again = pickle.loads(pickle.dumps(opened))
    assert (again.object_storage_config, again.dtype_code, again.mmap) == (storage, 8, False)
    assert (again.fast_cache_load, again.sequences_per_dataset) == (False, None)
    assert again.index[3] == opened.index[3] == THEIRS.indexed_dataset.IndexedDataset(prefix).index[3]
    dataset = build(OURS, OURS.gpt_dataset.GPTDataset, [20, 0, 0], config(OURS, blend=([prefix], None)))[0]
    assert_same_sample(pickle.loads(pickle.dumps(dataset))[7], dataset[7])
    assert isinstance(dataset, torch.utils.data.Dataset)
    assert isinstance(opened, torch.utils.data.Dataset)


class Ladder:
    """A low-level dataset of a user's."""

    sequence_lengths = np.array([3, 9, 27], np.int32)
    name, bounds = "ladder", (0, 40)

    def compute(self) -> str:
        return "its own"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, idx: int) -> Any:
        return np.arange(self.sequence_lengths[idx]) + 2**40

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        return self[idx][offset : None if length is None else offset + length]


def test_a_low_level_dataset_of_a_users_own_keeps_its_ways_and_pickles(tmp_path: Path) -> None:
    asked, train = (
        config(OURS, split="1,0,0", blend=(["unread"], None), path_to_cache=str(tmp_path)),
        binidx.Split.train,
    )
    dataset = OURS.gpt_dataset.GPTDataset(Ladder(), "ladder", np.arange(3, dtype=np.int32), 6, train, asked)
    assert dataset.dataset.name == "ladder"
    assert (dataset.dataset.bounds, dataset.dataset.compute()) == ((0, 40), "its own")
    assert (len(dataset.dataset), dataset.dataset[1][0]) == (3, 2**40)
    again = pickle.loads(pickle.dumps(dataset))
    for number in range(6):
        assert_same_sample(again[number], dataset[number])
    assert all(token >= 2**40 for token in dataset[5]["tokens"].tolist())
