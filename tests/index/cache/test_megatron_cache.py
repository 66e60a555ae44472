"""Caches shared by two programs: Megatron Core's opened by binidx as it is, ours opened by Megatron Core."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.oracle import megatron
from helpers.pages import python_blocks, read_page

import binidx
from binidx.errors import ConfigError, FormatError
from binidx.index.blend import check_blend_index

ARRAYS = ("document_index", "sample_index", "shuffle_index")
SETTINGS: dict[str, Any] = {
    "random_seed": 7, "sequence_length": 8, "split": "3,1,1", "tokenizer": TOKENIZER, "create_attention_mask": False,
    "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
}  # fmt: skip
SIZES = [300, 20, 20]


def write(prefix: Path, seed: int = 0, count: int = 100) -> str:
    rng = np.random.default_rng(seed)
    return write_with_megatron(prefix, rng.integers(1, 30, count).astype(np.int32), rng)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "en", 1), write(tmp_path / "de", 2)]


def ours(prefixes: list[str], cache: Any, sizes: Any = SIZES, **changes: Any) -> Any:
    blend = (prefixes, None if len(prefixes) == 1 else [0.7, 0.3])
    config = binidx.GPTDatasetConfig(blend=blend, path_to_cache=str(cache), **{**SETTINGS, **changes})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()


def theirs(prefixes: list[str], cache: Any, sizes: Any = SIZES, **changes: Any) -> Any:
    """Without torch.distributed Megatron cannot save the index of a blend; it reads one."""
    blend = (prefixes, None if len(prefixes) == 1 else [0.7, 0.3])
    config = megatron.gpt.GPTDatasetConfig(blend=blend, path_to_cache=str(cache), **{**SETTINGS, **changes})
    return megatron.builder.BlendedMegatronDatasetBuilder(megatron.gpt.GPTDataset, sizes, lambda: True, config).build()


def assert_same(one: Any, other: Any) -> None:
    for mine, yours in zip(one, other, strict=True):
        assert len(mine) == len(yours)
        for idx in (0, 1, len(yours) // 2, len(yours) - 1):
            assert_same_sample(mine[idx], yours[idx])


@pytest.fixture
def no_builds(monkeypatch: pytest.MonkeyPatch, index_builds: Any) -> Any:
    """From its call on, neither program builds an index."""

    def forbid() -> None:
        index_builds.around = None
        monkeypatch.setattr("binidx.order.requests.build_blend_arrays", None)
        monkeypatch.setattr(megatron.gpt, "_build_document_index", None)
        monkeypatch.setattr(megatron.helpers, "build_blending_indices", None)

    return forbid


def test_megatrons_cache_is_used_as_it_is_on_request(
    prefixes: list[str], tmp_path: Path, no_builds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built = theirs(prefixes[:1], tmp_path / "cache")
    no_builds()
    opened = ours(prefixes[:1], tmp_path / "cache", trust_cache="megatron")
    assert_same(opened, built)
    assert "taken as it is (trust_cache)" in caplog.text
    assert not list((tmp_path / "cache").glob("*-binidx.json"))


def test_the_example_of_the_page_uses_megatrons_cache(prefixes: list[str], tmp_path: Path, no_builds: Any) -> None:
    built = theirs(prefixes[:1], tmp_path / "cache")
    no_builds()
    (example,) = python_blocks(read_page("explanation/index-caches"))
    names = {"binidx": binidx, "options": {**SETTINGS, "blend": (prefixes[:1], None)}}
    exec(example.replace("s3://corpus/megatron-cache", f"{tmp_path}/cache"), names)
    found = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, SIZES, lambda: True, names["config"]).build()
    assert_same(found, built)


def test_megatrons_cache_of_an_empty_split_is_used_too(tmp_path: Path, no_builds: Any) -> None:
    prefix, sizes = write(tmp_path / "en", 1, 3), [None, None, None]
    built = theirs([prefix], tmp_path / "cache", sizes, split="98,1,1")
    no_builds()
    opened = ours([prefix], tmp_path / "cache", sizes, split="98,1,1", trust_cache="megatron")
    assert [len(each) for each in opened] == [len(each) for each in built]
    assert len(built[0]) > 0 == len(built[1]) == len(built[2])
    assert_same(opened[:1], built[:1])
    for path in (tmp_path / "cache").glob("*-valid-shuffle_index.npy"):
        np.save(path, np.zeros(1, np.uint32))
    for path in (tmp_path / "cache").glob("*-valid-sample_index.npy"):
        np.save(path, np.zeros((2, 2), np.int32))
    with pytest.raises(FormatError, match=r"-valid-\*\.npy: trust_cache finds shuffle_index: found 1 samples of an "):
        ours([prefix], tmp_path / "cache", sizes, split="98,1,1", trust_cache="megatron")


def test_megatrons_cache_in_a_bucket_is_used_too(prefixes: list[str], tmp_path: Path, s3: Any, no_builds: Any) -> None:
    built, uri = theirs(prefixes[:1], tmp_path / "cache"), s3.fresh()
    fsspec.filesystem("s3").put(f"{tmp_path}/cache/", f"{uri}/", recursive=True)
    no_builds()
    assert_same(ours(prefixes[:1], uri, trust_cache="megatron"), built)


def test_megatron_reads_the_cache_we_write(prefixes: list[str], tmp_path: Path, no_builds: Any) -> None:
    built = ours(prefixes, tmp_path / "cache", cache_small_indices=True)
    no_builds()
    assert_same(theirs(prefixes, tmp_path / "cache"), built)
    assert_same(ours(prefixes, tmp_path / "cache", cache_small_indices=True), built)


def test_megatrons_cache_of_a_blend_is_used_too(prefixes: list[str], tmp_path: Path, no_builds: Any) -> None:
    built = ours(prefixes, tmp_path / "cache", cache_small_indices=True)
    for ours_alone in (tmp_path / "cache").glob("*binidx*"):
        ours_alone.unlink()
    no_builds()
    assert_same(ours(prefixes, tmp_path / "cache", trust_cache="megatron"), built)


def test_missing_samples_are_found_in_one_pass_over_a_blend() -> None:
    """A pass for each of a thousand datasets would take minutes."""
    which = np.random.default_rng(0).integers(0, 1000, 3_000_000).astype(np.int16)
    samples = np.full(len(which), 4, np.int64)
    arrays = {"dataset_index": which, "dataset_sample_index": samples}
    began = time.process_time()
    check_blend_index(arrays, [5] * 1000, len(which))
    assert time.process_time() - began < 60
    for wrong in (5, -1):
        samples[-7] = wrong
        with pytest.raises(ValueError, match=f"dataset {which[-7]}: found sample {wrong}, need 0 to 4"):
            check_blend_index(arrays, [5] * 1000, len(which))
    with pytest.raises(ValueError, match="dataset_index: found 0 to 999, need 0 to 998"):
        check_blend_index(arrays, [5] * 999, len(which))


def test_without_trust_the_index_is_built_anew_with_a_warning(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs(prefixes[:1], tmp_path / "cache")
    for end in ("bin", "idx"):
        Path(f"{prefixes[0]}.{end}").unlink()
    write(Path(prefixes[0]), 3)  # other data in the same place: what Megatron would read through the old index
    opened = ours(prefixes[:1], tmp_path / "cache", cache_small_indices=True)
    assert (
        "built anew and replaced, since no manifest names the data that they were built of; trust_cache" in caplog.text
    )
    assert_same(opened, ours(prefixes[:1], tmp_path / "other", cache_small_indices=True))


def test_a_missing_index_is_built_with_trust_too(prefixes: list[str], tmp_path: Path) -> None:
    assert_same(
        ours(prefixes, tmp_path / "cache", trust_cache="megatron", cache_small_indices=True),
        ours(prefixes, tmp_path / "other"),
    )


def test_our_stale_cache_is_rebuilt_even_with_trust(prefixes: list[str], tmp_path: Path) -> None:
    built = ours(prefixes[:1], tmp_path / "cache", cache_small_indices=True, add_extra_token_to_sequence=False)
    again = ours(prefixes[:1], tmp_path / "cache", cache_small_indices=True, trust_cache="megatron")
    assert len(built[0]) != len(again[0]) or not np.array_equal(built[0].sample_index, again[0].sample_index)
    assert_same(again, ours(prefixes[:1], tmp_path / "other"))


def fewer_documents(prefix: str, _: dict[str, Path]) -> None:
    write(Path(prefix), 3, 50)


def other_documents(prefix: str, _: dict[str, Path]) -> None:
    write(Path(prefix), 3)


def replaced(name: str, change: Any) -> Any:
    def harm(_: str, paths: dict[str, Path]) -> None:
        array = np.load(paths[name])
        np.save(paths[name], change(array))

    harm.__name__ = f"{name} {change.__name__}"
    return harm


def as_float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def shorter(array: np.ndarray) -> np.ndarray:
    return array[:-1]


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


def beyond(array: np.ndarray) -> np.ndarray:
    array[3] = 10**6
    return array


def backwards(array: np.ndarray) -> np.ndarray:
    return array[::-1].copy()


def empty_file(_: str, paths: dict[str, Path]) -> None:
    paths["sample_index"].write_bytes(b"")


HARMS = [fewer_documents, other_documents, empty_file]
HARMS += [replaced(name, change) for name in ARRAYS for change in (as_float, shorter, beyond)]
HARMS += [replaced("sample_index", change) for change in (flat, backwards)]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_arrays_that_are_no_index_of_this_data_are_not_trusted(harm: Any, prefixes: list[str], tmp_path: Path) -> None:
    theirs(prefixes[:1], tmp_path / "cache")
    [shuffled] = (tmp_path / "cache").glob("*-train-shuffle_index.npy")
    harm(prefixes[0], {name: Path(str(shuffled).replace("shuffle_index", name)) for name in ARRAYS})
    with pytest.raises(FormatError, match=r"-GPTDataset-\w+-\*\.npy: trust_cache finds .*; remove the files, or leave"):
        ours(prefixes[:1], tmp_path / "cache", trust_cache="megatron")


def test_trust_of_another_name_is_an_error(prefixes: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust_cache: found 'nemo', need 'megatron' or None"):
        ours(prefixes, tmp_path, trust_cache="nemo")


def test_small_indices_are_cached_only_on_request(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ours(prefixes[:1], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
