"""Calls of users' hooks, in order and with their arguments: Megatron's, recorded over both libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compat.users import library
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron

import binidx
from binidx import RunOrder
from binidx.compat.megatron import gpt_dataset
from binidx.dataset.config import Split
from binidx.dataset.split_requests import request_splits
from binidx.errors import ConfigError
from binidx.order.opener import Opener
from binidx.run import run_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    THEIRS = library(stand_ins=False)
    OURS = library(stand_ins=True)

Calls = list[tuple[str, list[Any]]]

OF_DATASETS = (
    "__init__",
    "__getitem__",
    "_build_document_sample_shuffle_indices",
    "_query_document_sample_shuffle_indices",
)
STATIC = ("build_low_level_dataset", "numel_low_level_dataset")
OF_BUILDERS = ("_build_blended_dataset_splits", "_build_megatron_dataset_splits")
"""Hooks that are recorded. Not `__len__` and `_key_config_attributes`, functions without effect, which each library
calls when it needs them; nor `__getitems__`, which Megatron lacks."""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rng, folder = np.random.default_rng(2), tmp_path_factory.mktemp("corpus")
    return [
        write_with_megatron(folder / name, rng.integers(1, 40, count).astype(np.int32), rng)
        for name, count in (("en", 50), ("code", 80))
    ]


def plain(value: Any) -> Any:
    """An argument in a form that both libraries have: opened data, datasets and configs by their kind."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, np.generic):
        return value.item()  # a number of a sample, which is an int in our blends
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Split | type(THEIRS.utils.Split.train)):
        return value.name
    return value if isinstance(value, int | float | str | None) else "object"


def record(name: str, kind: type, calls: Calls) -> Callable[..., Any]:
    """Method of a subclass of `kind` that records its call and calls the method of `kind`."""

    def method(self: Any, *arguments: Any) -> Any:
        calls.append((name, plain(arguments)))
        return getattr(super(kind, self), name)(*arguments)

    return method


def record_static(name: str, kind: type, calls: Calls) -> Any:
    def function(*arguments: Any) -> Any:
        calls.append((name, plain(arguments)))
        return getattr(kind, name)(*arguments)

    return staticmethod(function)


def recorded(kind: type, calls: Calls, methods: tuple[str, ...], static: tuple[str, ...] = ()) -> Any:
    """A subclass of a class that records the calls of its hooks."""
    own: Any = type(f"Recorded{kind.__name__}", (kind,), {})
    for name in methods:
        setattr(own, name, record(name, own, calls))
    for name in static:
        setattr(own, name, record_static(name, kind, calls))
    return own


def recorded_builder(kind: type, calls: Calls) -> Any:
    own = recorded(kind, calls, OF_BUILDERS)

    def build_generic_dataset(cls: Any, is_built: Any, synchronize_ranks: bool, *arguments: Any) -> Any:
        # Not `synchronize_ranks`: our ranks need not wait for rank 0 to build first.
        calls.append(("build_generic_dataset", [cls.__name__, *plain(arguments)]))
        return kind.build_generic_dataset(cls, is_built, synchronize_ranks, *arguments)  # type: ignore[attr-defined]

    own.build_generic_dataset = staticmethod(build_generic_dataset)
    return own


def configure(lib: SimpleNamespace, **options: Any) -> Any:
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return lib.gpt_dataset.GPTDatasetConfig(
        **{"random_seed": 3, "sequence_length": 16, "split": "7,2,1", "tokenizer": TOKENIZER, **resets, **options}
    )


@pytest.mark.parametrize("blend", ["one", "weighted", "unweighted", "mock"])
def test_hooks_are_called_in_megatrons_order_with_megatrons_arguments(
    blend: str, prefixes: list[str], tmp_path: Path
) -> None:
    blends = {"one": (prefixes[:1], None), "weighted": (prefixes, [0.3, 0.7]), "unweighted": (prefixes, None)}
    sizes = [None] * 3 if blend == "unweighted" else [40, 6, 2]
    made = []
    for lib in (OURS, THEIRS):
        calls: Calls = []
        name = "MockGPTDataset" if blend == "mock" else "GPTDataset"
        kind = recorded(getattr(lib.gpt_dataset, name), calls, OF_DATASETS, STATIC)
        builder = recorded_builder(lib.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder, calls)
        config = configure(lib, blend=blends.get(blend), path_to_cache=str(tmp_path / lib.gpt_dataset.__name__))
        built = builder(kind, sizes, lambda: True, config).build()
        samples = [dataset[number] for dataset in built for number in (0, len(dataset) - 1)]
        made.append((calls, samples))
    (ours, our_samples), (theirs, their_samples) = made
    assert {name for name, _ in theirs} == {*OF_DATASETS, *STATIC, *OF_BUILDERS, "build_generic_dataset"}
    # The three arguments that count; the fourth, `synchronize_ranks`, has its default.
    cut = [(name, values[:3] if name == "_build_megatron_dataset_splits" else values) for name, values in theirs]
    assert ours == cut
    for sample, expected in zip(our_samples, their_samples, strict=True):
        assert_same_sample(
            *({key: part for key, part in each.items() if part is not None} for each in (sample, expected))
        )


def hooked(name: str) -> Any:
    """A class with one hook of its own."""
    if name in STATIC:
        return recorded(gpt_dataset.GPTDataset, [], (), (name,))
    return recorded(gpt_dataset.GPTDataset, [], (name,))


@pytest.mark.parametrize("name", [*OF_DATASETS, *STATIC, "spans", "__len__"])
def test_a_request_of_a_class_with_own_hooks_is_opened_by_its_constructor_alone(
    name: str, prefixes: list[str], tmp_path: Path
) -> None:
    config = configure(OURS, blend=(prefixes[:1], None), split="1,0,0", path_to_cache=str(tmp_path))
    [request] = request_splits(kind := hooked(name), config, [40, 0, 0])[Split.train]
    train = OURS.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        kind, [40, 0, 0], lambda: True, config
    ).build()[0]
    assert request.sources[0].description_hash() == train.unique_description_hash
    if name == "__getitem__":  # makes samples, and no order
        assert len(Opener().open(request)) == len(train)
        return
    with pytest.raises(
        ConfigError, match=f"order: found RecordedGPTDataset with its own {name}, .*; build the dataset"
    ):
        Opener().open(request)


def test_an_order_is_not_opened_of_a_class_with_own_hooks(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=16, tokenizer=TOKENIZER, blend=(prefixes, [1.0, 2.0]), split="1,0,0",
        path_to_cache=str(tmp_path),
    )  # fmt: skip
    run = run_file.Run(config, [40, 0, 0], micro_batch_size=1)
    monkeypatch.setattr(run_file, "GPTDataset", recorded(binidx.GPTDataset, [], ("spans",)))
    with pytest.raises(ConfigError, match=r"RecordedGPTDataset with its own spans, .*; build the dataset"):
        RunOrder.open(run)
