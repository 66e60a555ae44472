"""Methods of users' classes, as the library recognises them: by the module that defines the function."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron

import binidx
from binidx.compat.megatron import gpt_dataset
from binidx.dataset.megatron.ordered_dataset import own_methods
from binidx.loader.dataset_protocols import is_pure

METHODS = ("__init__", "__len__", "spans", "assemble", "__getitem__", "__getitems__", "numel_low_level_dataset")


class Counted(binidx.GPTDataset):
    numel_low_level_dataset = staticmethod(len)

    def __len__(self) -> int:
        return super().__len__()


class Marked(Counted):
    @functools.wraps(binidx.GPTDataset.__getitem__)
    def __getitem__(self, idx: Any) -> Any:
        return {**super().__getitem__(idx), "number": torch.tensor(idx)}


class Doubled(Marked):
    """Samples of its own over batches of its own."""

    def __getitems__(self, idxs: Any) -> Any:
        return [self[idx] for idx in idxs]


class Tripled(Doubled):
    def __getitem__(self, idx: Any) -> Any:
        return {**super().__getitem__(idx), "tripled": torch.tensor(True)}


class OfMegatrons(gpt_dataset.GPTDataset):
    pass


def test_methods_of_this_library_are_not_the_users_whatever_class_has_them() -> None:
    for kind in (binidx.GPTDataset, binidx.megatron.MockGPTDataset, gpt_dataset.GPTDataset, OfMegatrons):
        assert own_methods(kind, *METHODS, "_query_document_sample_shuffle_indices", "no_such_method") == ()
    assert own_methods(Counted, *METHODS) == ("__len__", "numel_low_level_dataset")
    assert own_methods(Marked, *METHODS) == ("__len__", "__getitem__", "numel_low_level_dataset")
    assert not own_methods(Marked, "spans", "assemble")
    made: dict[str, Any] = {"GPTDataset": binidx.GPTDataset}
    exec("class Made(GPTDataset):\n    def __len__(self):\n        return 1", made)  # its module has no name
    assert own_methods(made["Made"], *METHODS) == ("__len__",)


@pytest.mark.parametrize("kind", [Marked, Doubled, Tripled])
def test_batches_and_blends_have_the_samples_of_a_users_method_though_it_has_the_name_of_ours(
    kind: Any, tmp_path: Path
) -> None:
    assert kind.__getitem__.__module__.startswith("binidx.") or kind is Tripled
    rng = np.random.default_rng(1)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(1, 40, 60).astype(np.int32), rng)
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([prefix, prefix], [1.0, 2.0]), split="1,0,0", tokenizer=TOKENIZER,
    )  # fmt: skip
    [blend, *_] = binidx.BlendedMegatronDatasetBuilder(kind, [12, 0, 0], lambda: True, config).build()
    assert isinstance(blend, binidx.megatron.BlendedDataset)
    assert not is_pure(blend)
    for number, sample in enumerate(blend.__getitems__(range(12))):
        assert sample["number"] == blend.dataset_sample_index[number]
        assert ("tripled" in sample) == (kind is Tripled)
        assert_same_sample(sample, blend[number])


class MarkedBlend(binidx.megatron.BlendedDataset):
    def __getitem__(self, idx: Any) -> Any:
        return {**super().__getitem__(idx), "number": idx}


def test_a_blend_with_a_method_of_its_own_serves_a_view_sample_by_sample(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(1, 40, 60).astype(np.int32), rng)
    (tmp_path / "drop.txt").write_text(f"{prefix}\t0\n")
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([prefix, prefix], [1.0, 2.0]), split="1,0,0", tokenizer=TOKENIZER,
        order=binidx.View(str(tmp_path / "drop.txt")),
    )  # fmt: skip
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [12, 0, 0], lambda: True, config)
    [plain, *_] = builder.build()
    builder.blended_class = MarkedBlend
    [marked, *_] = builder.build()
    assert isinstance(marked, MarkedBlend)
    for number, sample in enumerate(marked.__getitems__(range(4))):
        assert sample["number"] == marked[number]["number"] == number
        assert (sample["tokens"] == plain[number]["tokens"]).all()  # type: ignore[index]
