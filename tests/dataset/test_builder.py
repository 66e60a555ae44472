"""Whole runs against Megatron Core's builder: blends, splits, sizes, and every sample's source."""

from __future__ import annotations

import contextlib
import functools
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.oracle import megatron

import binidx
from binidx.dataset import builder
from binidx.dataset.megatron.ordered_dataset import current_build
from binidx.errors import BlendError, ConfigError
from binidx.format.prefix_listing import MIN_LISTED_PREFIXES, ListedPair
from binidx.index.blend import samples_per_dataset
from binidx.index.cache.index_cache import BuildContext
from binidx.order import gpt_order
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

GPT = {
    "random_seed": 1234,
    "sequence_length": 16,
    "tokenizer": TOKENIZER,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "create_attention_mask": False,
}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    return [
        write_with_megatron(directory / f"source{i}", rng.integers(1, 40, 150 * (i + 1)).astype(np.int32), rng)
        for i in range(4)
    ]


def ours(sizes: list[int | None], **config: Any) -> list[Any]:
    configured = binidx.GPTDatasetConfig(**{**GPT, **config})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, configured).build()


def theirs(sizes: list[int | None], **config: Any) -> list[Any]:
    configured = megatron.gpt.GPTDatasetConfig(**{**GPT, **config})
    return megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.GPTDataset, sizes, lambda: True, configured
    ).build()


def assert_same_datasets(found: list[Any], needed: list[Any]) -> None:
    for ours_split, theirs_split in zip(found, needed, strict=True):
        assert (ours_split is None) == (theirs_split is None)
        if isinstance(theirs_split, list):
            assert_same_datasets(ours_split, theirs_split)
        elif theirs_split is not None:
            assert_same_dataset(ours_split, theirs_split)


def assert_same_dataset(found: Any, needed: Any) -> None:
    assert len(found) == len(needed)
    assert found.unique_description == needed.unique_description
    if isinstance(found, binidx.megatron.BlendedDataset):
        np.testing.assert_array_equal(found.dataset_index, needed.dataset_index)
        np.testing.assert_array_equal(found.dataset_sample_index, needed.dataset_sample_index)
        assert found.dataset_index.dtype == needed.dataset_index.dtype
    idxs = np.unique(np.linspace(0, len(found) - 1, 12).astype(int)).tolist() if len(found) else []
    for idx, sample in zip(idxs, found.__getitems__(idxs), strict=True):
        assert_same_sample(sample, needed[idx])


BLENDS = [
    ([0], None),
    ([0], [3.0]),
    ([0, 1], None),
    ([0, 1], [0.5, 0.5]),
    ([2, 0, 1], [1.0, 2.0, 3.0]),
    ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4]),
    ([0, 1, 2, 3], [1e-3, 1.0, 1e-3, 1.0]),
    ([0, 0, 0], [1 / 3, 1 / 3, 1 / 3]),
]


@pytest.mark.parametrize("blend", BLENDS, ids=str)
@pytest.mark.parametrize("sizes", [[200, 20, 10], [1, 1, 1], [1500, 100, 3]], ids=str)
@pytest.mark.parametrize("split", ["8,1,1", "1,0,0", "98, 1, 1"])
def test_one_distribution_is_megatrons(prefixes: list[str], blend: Any, sizes: list[int], split: str) -> None:
    sources, weights = blend
    config = {"blend": ([prefixes[i] for i in sources], weights), "split": split}
    assert_same_datasets(ours(sizes, **config), theirs(sizes, **config))


@pytest.mark.parametrize("blend", [blend for blend in BLENDS if blend[1] is None], ids=str)
def test_blends_without_sizes_are_exhaustive_as_in_megatron(prefixes: list[str], blend: Any) -> None:
    config = {"blend": ([prefixes[i] for i in blend[0]], None), "split": "6,2,2"}
    assert_same_datasets(ours([None, None, None], **config), theirs([None, None, None], **config))


@pytest.mark.parametrize("seed", range(25))
def test_random_distributions_per_split_are_megatrons(prefixes: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    blends: list[Any] = []
    sizes: list[int | None] = []
    for _ in range(3):
        chosen = [prefixes[i] for i in rng.choice(4, rng.integers(1, 5), replace=False)]
        weights = rng.random(len(chosen)).tolist() if rng.integers(2) else None
        blends.append(None if rng.random() < 0.2 else (chosen, weights))
        sizes.append(int(rng.integers(1, 900)) if weights or rng.integers(2) else None)
    if not any(blends):
        blends[0], sizes[0] = ([prefixes[0]], None), None
    config = {"blend_per_split": blends, "random_seed": int(rng.integers(2**32))}
    assert_same_datasets(ours(sizes, **config), theirs(sizes, **config))


def test_several_validation_sets_are_a_list(prefixes: list[str]) -> None:
    config: dict[str, Any] = {
        "blend_per_split": [(prefixes[:1], None), (prefixes, None), None],
        "multiple_validation_sets": True,
        "full_validation": True,
    }
    assert_same_datasets(ours([50, None, None], **config), theirs([50, None, None], **config))
    with pytest.raises(ConfigError, match="full_validation needs None"):
        ours([50, 5, None], **config)


def test_threads_build_what_one_thread_builds(prefixes: list[str]) -> None:
    config: dict[str, Any] = {"blend": (prefixes, [1.0, 2.0, 3.0, 4.0]), "split": "9,1,0"}
    one, four = (
        ours([300, 30, 0], **config, num_dataset_builder_threads=threads, path_to_cache=f"memory://threads/{threads}")
        for threads in (1, 4)
    )
    assert_same_datasets(four, one)
    assert [dataset.dataset_path for dataset in four[0].datasets] == prefixes


@pytest.mark.parametrize("cache", [None, "memory://threads/limit"])
@pytest.mark.parametrize(("threads", "share"), [(1, 1), (2, 1), (9, 2)])
def test_datasets_share_the_threads_and_no_more_are_computed_at_a_time(
    prefixes: list[str], cache: str | None, threads: int, share: int, tmp_path: Path, index_builds: Any
) -> None:
    free = threading.Semaphore(threads)

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        assert free.acquire(blocking=False)
        yield
        free.release()

    index_builds.around = counted
    ours(
        [300, 30, 0], blend=(prefixes, [1.0, 2.0, 3.0, 4.0]), split="9,1,0",
        num_dataset_builder_threads=threads, path_to_cache=f"{cache or tmp_path}/{threads}", cache_small_indices=True,
    )  # fmt: skip
    assert {options["threads"] for options in index_builds.options} == {share}


def test_small_indices_are_built_at_their_first_use(prefixes: list[str], index_builds: Any) -> None:
    config: dict[str, Any] = {"blend": (prefixes, [1.0, 2.0, 3.0, 4.0]), "split": "9,1,0"}
    built = ours([300, 30, 0], **config)[0]
    sizes, builds = [*map(len, built.datasets)], index_builds.options
    one, other = built.datasets[:2]
    assert builds == []
    given = one.shuffle_index[::-1].copy()
    assert sizes == [len(dataset.sample_index) - 1 for dataset in built.datasets]
    assert len(builds) == len(prefixes)
    other.shuffle_index = given
    fresh = ours([300, 30, 0], **config)[0].datasets[1]
    fresh.shuffle_index = given  # before the others are built
    for name in gpt_order.ARRAYS:
        np.testing.assert_array_equal(getattr(fresh, name), getattr(other, name))


@pytest.mark.parametrize("threads", [1, 3])
def test_local_blends_and_all_of_one_thread_are_built_in_order_by_the_calling_thread(
    prefixes: list[str], tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "SLACK_SECONDS", -1e9)  # every piece of work counts as slow
    built: list[tuple[str, int]] = []

    class Prefix(binidx.GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
            built.append((str(dataset_path), threading.get_ident()))
            return binidx.GPTDataset.build_low_level_dataset(dataset_path, config)

    class Blend(binidx.megatron.BlendedDataset):
        def __init__(self, datasets: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(datasets, *arguments, **options)
            built.append((datasets[0].index_split.name, threading.get_ident()))

    class Builder(binidx.BlendedMegatronDatasetBuilder):
        blended_class = Blend

    config = binidx.GPTDatasetConfig(
        **GPT, blend=(prefixes, [1.0, 2.0, 3.0, 4.0]), split="8,1,1",
        num_dataset_builder_threads=threads, path_to_cache=str(tmp_path),
    )  # fmt: skip
    Builder(Prefix, [300, 30, 10], lambda: True, config).build()
    here = threading.get_ident()
    assert built[4:] == [("train", here), ("valid", here), ("test", here)]
    if threads == 1:
        assert built[:4] == [(prefix, here) for prefix in prefixes]


def test_classes_of_users_with_megatrons_arguments_get_the_options_of_the_build(
    prefixes: list[str], s3: Bucket, tmp_path: Path
) -> None:
    base, outcomes, opened = s3.fresh(), list[Any](), list[Any]()
    remote = [f"{base}/{number}" for number in range(MIN_LISTED_PREFIXES)]
    for prefix in remote:
        for end in ("bin", "idx"):
            with create_object(Location.of(f"{prefix}.{end}")) as out:
                out.write(Path(f"{prefixes[0]}.{end}").read_bytes())

    class Own(binidx.GPTDataset):
        def __init__(self, dataset: Any, path: Any, indices: Any, num_samples: Any, split: Any, config: Any) -> None:
            super().__init__(dataset, path, indices, num_samples, split, config)

        @staticmethod
        def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
            opened.append(current_build().listed[dataset_path])
            binidx.GPTDataset.build_low_level_dataset(prefixes[1], config)  # another prefix, which is not listed
            return binidx.GPTDataset.build_low_level_dataset(dataset_path, config)

    config = binidx.GPTDatasetConfig(
        **GPT, blend=(remote, [1.0] * len(remote)), split="1,0,0", path_to_cache=str(tmp_path), cache_small_indices=True
    )
    built = binidx.BlendedMegatronDatasetBuilder(Own, [20, 0, 0], lambda: True, config).build(
        on_outcome=outcomes.append
    )
    train: Any = built[0]
    assert {*map(type, opened)} == {ListedPair}
    assert len(outcomes) == len(remote) + 1  # the index of each prefix, and that of the blend
    assert not any(part.build_context.listed for part in train.datasets)
    assert current_build() == BuildContext()


def test_a_blend_is_cached_where_path_to_cache_says(prefixes: list[str], tmp_path: Path) -> None:
    config: dict[str, Any] = {"blend": (prefixes, [1.0, 2.0, 3.0, 4.0]), "split": "1,0,0", "path_to_cache": tmp_path}
    first, second = (ours([300, 0, 0], **config)[0] for _ in range(2))
    name = f"{first.unique_description_hash}-BlendedDataset-train"
    suffixes = ("binidx.json", "description.txt", "dataset_index.npy", "dataset_sample_index.npy")
    assert {path.name for path in tmp_path.glob(f"{name}*")} == {f"{name}-{suffix}" for suffix in suffixes}
    np.testing.assert_array_equal(first.dataset_sample_index, second.dataset_sample_index)


def test_numpy_numbers_are_numbers(prefixes: list[str]) -> None:
    config: dict[str, Any] = {"blend": (prefixes[:1], None), "split": "1,0,0", "sequence_length": 16}
    sizes: Any = [np.int64(20), 0, 0]
    (dataset, *_) = ours(sizes, **{**config, "random_seed": np.int64(5), "sequence_length": np.int32(16)})
    (plain, *_) = ours([20, 0, 0], **config, random_seed=5)
    assert dataset.unique_description == plain.unique_description


def test_a_blend_that_oversamples_names_the_dataset_and_the_way_out(prefixes: list[str]) -> None:
    config: Any = binidx.GPTDatasetConfig(**GPT, blend=(prefixes[:1], None), split="1,0,0")
    (dataset, *_) = ours([None, None, None], blend=(prefixes[:1], None), split="1,0,0")
    with pytest.raises(BlendError, match=r"source0\): has \d+ samples, the blend needs .* mid_level_dataset_surplus"):
        binidx.megatron.BlendedDataset([dataset, dataset], [0.99, 0.01], len(dataset) * 2, config)
    with pytest.raises(IndexError):
        binidx.megatron.BlendedDataset([dataset, dataset], [0.99, 0.01], len(dataset) * 2, config)


def test_a_dataset_without_samples_cannot_be_blended(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="weight 0 in the valid blend"):
        ours([None, None, None], blend=(prefixes[:2], None), split="9999,0.5,0.5")


@pytest.mark.parametrize(
    ("changes", "sizes", "needed"),
    [
        ({"blend": None}, [1, 1, 1], "blend: found none"),
        ({"split": None}, [1, 1, 1], "split: found none"),
        ({"blend": ([], None)}, [1, 1, 1], "no prefix"),
        ({"blend": (["a", "b"], [1.0])}, [1, 1, 1], "one per prefix"),
        ({"blend": (["a", "b"], [1.0, 0.0])}, [1, 1, 1], "above 0"),
        ({"blend_per_split": [(["a"], None), None, None]}, [1, 1, 1], "excludes"),
        ({"blend": (["a"], [1.0])}, [None, 1, 1], "found None for train"),
        ({}, [1, 1], "found 2, needs 3"),
        ({"random_seed": 2**32}, [1, 1, 1], "random_seed"),
        ({"random_seed": -1}, [1, 1, 1], "random_seed"),
        ({"sequence_length": 0}, [1, 1, 1], "sequence_length"),
        ({"split": "1.2.3,1"}, [1, 1, 1], "plain numbers"),
        ({"blend": (["a", "b"], [1.0, float("inf")])}, [1, 1, 1], "above 0"),
        (
            {"blend": 3},
            [1, 1, 1],
            r"blend: found 3; needs \(\['s3://corpus/en', 's3://corpus/code'\], \[0.7, 0.3\]\) or \{",
        ),
        ({"blend": {"a": None}}, [1, 1, 1], "blend: found .*; needs"),
        ({"blend": [["a", "b"], ["c"]]}, [1, 1, 1], "blend: found .*; needs"),
        ({"blend": ["a", 0.7, "b", 0.3]}, [1, 1, 1], "blend: found .*; needs"),
        ({"blend": [1, 2]}, [1, 1, 1], "blend: found .*; needs"),
        ({"blend": []}, [1, 1, 1], "blend: found .*; needs"),
        ({"blend": None, "split": None, "blend_per_split": {"train": "a"}}, [1, 1, 1], "needs a list of 3 blends"),
        ({"sequence_length": "8"}, [1, 1, 1], "sequence_length: found '8', needs a whole number"),
        ({"split": 0.9}, [1, 1, 1], "split: found 0.9, need plain numbers"),
        (
            {"tokenizer": "tokenizer.json"},
            [1, 1, 1],
            "tokenizer: found 'tokenizer.json', needs binidx.describe_tokenizer",
        ),
        ({}, 1000, r"sizes: found 1000, needs numbers of train, valid and test, as \[1_000_000, 0, 0\]"),
        ({}, [1e6, 0, 0], "sizes: found .1000000.0, 0, 0., needs numbers"),
        ({"num_dataset_builder_threads": 0}, [1, 1, 1], "num_dataset_builder_threads"),
        ({"eod_mask_loss": None}, [1, 1, 1], "eod_mask_loss: must be given"),
        ({"tokenizer": None}, [1, 1, 1], "tokenizer: must be given"),
    ],
)
def test_contradicting_options_are_refused(changes: dict[str, Any], sizes: list[Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        ours(sizes, **{"blend": (["a"], None), "split": "1,0,0", **changes})


@pytest.mark.parametrize(
    "blend",
    [
        "{0}", Path("{0}"), ["{0}"], ("{0}", None), [Path("{0}")],
        ["{0}", "{1}"], ("{0}", "{1}"), [Path("{0}"), "{1}"], (["{0}", Path("{1}")], None),
        {"{0}": 0.7, "{1}": 0.3}, {Path("{0}"): 0.7, "{1}": 0.3}, [("{0}", 0.7), (Path("{1}"), 0.3)],
        [["{0}", 0.7], ["{1}", 0.3]], [0.7, "{0}", 0.3, "{1}"], ["0.7", "{0}", "0.3", "{1}"],
        (("{0}", "{1}"), np.array([0.7, 0.3])),
    ],
    ids=str,
)  # fmt: skip
def test_each_form_of_a_blend_is_the_config_that_it_stands_for(blend: Any) -> None:
    def named(given: Any) -> Any:
        if isinstance(given, str | Path):
            return type(given)(str(given).format("a", "b"))
        if isinstance(given, dict):
            return {named(prefix): weight for prefix, weight in given.items()}
        return type(given)(map(named, given)) if isinstance(given, list | tuple) else given

    for given in ({"blend": named(blend), "split": (9, 1, 0)}, {"blend_per_split": [named(blend), None, None]}):
        config = binidx.GPTDatasetConfig(random_seed=1, sequence_length=8, tokenizer=binidx.SpecialTokens(), **given)
        prefixes, weights = config.blend or config.blend_per_split[0]
        count = str(blend).count("{") - isinstance(blend, dict)
        assert prefixes == ["a", "b"][:count]
        assert weights is None or [*weights] == [0.7, 0.3]
        assert (weights is None) == ("0.7" not in str(blend))
        assert config.split in ("9,1,0", None)
        assert (config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss) == (False,) * 3


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (binidx.megatron.BERTMaskedWordPieceDataset, "classification_head"),
        (binidx.megatron.T5MaskedWordPieceDataset, "sequence_length_encoder, sequence_length_decoder"),
        (binidx.megatron.MultimodalDataset, "image_h, image_w"),
        (binidx.megatron.GPTFIMDataset, "fim_rate, "),
    ],
)
def test_a_config_of_another_kind_names_the_one_that_is_needed(kind: Any, missing: str) -> None:
    config = binidx.GPTDatasetConfig(**GPT, blend=(["a"], None), split="1,0,0")
    needed = f"found a GPTDatasetConfig, without {missing}.*; {kind.__name__} needs a {kind.__name__}Config"
    with pytest.raises(ConfigError, match=needed):
        binidx.BlendedMegatronDatasetBuilder(kind, [1, 0, 0], lambda: True, config)


def test_a_class_with_a_constructor_of_its_own_is_given_an_array(prefixes) -> None:
    class Own(binidx.GPTDataset):
        def __init__(self, dataset, path, indices, *rest) -> None:
            self.given = indices
            super().__init__(dataset, path, indices, *rest)

    class Same(Own):
        pass

    class Wrapped(binidx.GPTDataset):
        @functools.wraps(binidx.GPTDataset.__init__)
        def __init__(self, *arguments) -> None:
            self.given = arguments[2]
            super().__init__(*arguments)

    config = binidx.GPTDatasetConfig(**GPT, blend=([prefixes[0]], None), split="1,0,0")
    for kind in (Own, Same, Wrapped):
        train = binidx.BlendedMegatronDatasetBuilder(kind, [9, 0, 0], lambda: True, config).build()[0]
        assert isinstance(train.given, np.ndarray)


def test_the_samples_of_a_blend_are_counted_in_little_memory() -> None:
    index = np.random.default_rng(0).integers(0, 7, 5_000_000).astype(np.int16)
    tracemalloc.start()
    found = samples_per_dataset(index, 9)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == np.bincount(index, minlength=9).tolist()
    assert most < 12e6, "not eight bytes for each of five million"
