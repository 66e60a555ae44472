"""Requests of the splits of a config, made before anything is opened, against what the builder builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx.dataset.split_requests import request_splits
from binidx.order.requests import find_blend


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("survey")
    rng = np.random.default_rng(3)
    return [
        write_with_megatron(directory / name, rng.integers(1, 50, count).astype(np.int32), rng)
        for name, count in (("en", 80), ("code", 50), ("math", 70))
    ]


BLENDS: dict[str, dict[str, Any]] = {
    "alone": {"blend": ([0], None), "split": "8,1,1"},
    "one with a weight": {"blend": ([0], [2.0]), "split": "8,1,1"},
    "weighted": {"blend": ([0, 1, 2], [1.0, 2.0, 4.0]), "split": "8,0,2"},
    "whole": {"blend": ([0, 1], None), "split": "9,1"},
    "per split": {"blend_per_split": [([0, 1], [0.2, 0.8]), ([2], [3.0]), None]},
    "validation sets": {
        "blend_per_split": [([0, 1], [0.2, 0.8]), ([1, 2], None), ([0, 2], None)], "multiple_validation_sets": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("sizes", [[300, 20, 10], [None, None, None]], ids=["sizes", "epochs"])
@pytest.mark.parametrize("name", BLENDS)
def test_names_and_order_are_those_of_what_is_built(
    name: str, sizes: list[Any], prefixes: list[str], tmp_path: Path
) -> None:
    def named(blend: Any) -> Any:
        return blend and ([prefixes[number] for number in blend[0]], blend[1])

    fields = dict(BLENDS[name])
    weighted = [blend for blend in [fields.get("blend"), *fields.get("blend_per_split", ())] if blend and blend[1]]
    if sizes[0] is None and weighted:
        pytest.skip("weights need numbers")
    if "blend" in fields:
        fields["blend"] = named(fields["blend"])
    else:
        fields["blend_per_split"] = [named(blend) for blend in fields["blend_per_split"]]
    config = binidx.GPTDatasetConfig(
        random_seed=4, sequence_length=16, tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, path_to_cache=str(tmp_path), cache_small_indices=True, **fields,
    )  # fmt: skip
    heard: list[Any] = []
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config)
    built = builder.build(on_outcome=heard.append)

    wanted = request_splits(binidx.GPTDataset, config, sizes)
    lengths: dict[str, int] = {}
    for each in built:
        for dataset in each if isinstance(each, list) else getattr(each, "datasets", [each]):
            if dataset is not None:
                lengths[f"{dataset.index_split.name} {dataset.dataset_path}"] = len(dataset)
    sources = [source for requests in wanted.values() for request in requests for source in request.sources]
    assert [f"{source.split} {source.prefix}" for source in sources] == [*lengths]
    names = {source.index_name().files.name for source in sources}
    for split, requests in wanted.items():
        for blend in filter(None, map(find_blend, requests)):
            of_parts = [lengths[f"{source.split} {source.prefix}"] for source in blend.sources]
            named = blend.measured(of_parts).index_name()
            assert named is not None
            names.add(named.files.name)
            dataset: Any = built[split.value]
            assert blend.count(of_parts) == len(dataset)
            assert blend.measured(of_parts).description_hash() == dataset.unique_description_hash
    assert names == {outcome.files.name for outcome in heard}
    assert all((tmp_path / f"{name}-binidx.json").exists() for name in names)


def test_without_path_to_cache_each_lies_beside_its_data(prefixes: list[str]) -> None:
    config = binidx.GPTDatasetConfig(
        random_seed=4, sequence_length=16, tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, blend=(prefixes, None), split="1,0,0",
    )  # fmt: skip
    [train] = request_splits(binidx.GPTDataset, config, [100, 0, 0])[binidx.Split.train]
    assert [source.index_name().files.directory.uri for source in train.sources] == [
        f"{prefix}/cache/GPTDataset_indices" for prefix in prefixes
    ]
    blend = find_blend(train)
    assert blend is not None
    assert blend.measured([1, 2, 3]).index_name() is None
