"""Manifests: their bytes, when they prove that an index is valid, and which objects are read for it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron
from helpers.pages import read_page
from hypothesis import given
from hypothesis import strategies as st

import binidx
from binidx.errors import FormatError
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import (
    Manifest,
    Origin,
    StoredArray,
    describe_documents,
    format_manifest,
    get_origin,
    list_differences,
    list_mismatches,
    parse_manifest,
)
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.stores.identity import same_object

ETAG = {"size": 100, "etag": '"abc"'}
MANIFEST = Manifest(
    library="0.1.0",
    fingerprint={"algorithm": 3, "random_seed": 7},
    content={"num_sequences": 10, "index_digest": "77"},
    data={"idx": ETAG, "bin": {"size": 1, "mtime": 2.5}},
    order={"num_epochs": 1, "separate_final_epoch": False},
    arrays={"a": StoredArray("<i4", (10, 2), 208, "ab", ETAG), "b": StoredArray("<i8", (3,), 152, "cd")},
)


def test_a_manifest_is_parsed_as_it_was_formatted() -> None:
    assert parse_manifest(format_manifest(MANIFEST), "m") == MANIFEST


def test_each_flipped_bit_is_noticed_or_means_nothing() -> None:
    whole = format_manifest(MANIFEST)
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(FormatError):
            assert parse_manifest(bytes(data), "m") == MANIFEST  # a space that became another one


@given(st.integers(0, len(format_manifest(MANIFEST)) - 1))
def test_a_truncated_manifest_is_a_format_error(size: int) -> None:
    with pytest.raises(FormatError, match=r"^m: "):
        parse_manifest(format_manifest(MANIFEST)[:size], "m")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"arrays": {}}', b"[" * 100_000, b"\xff\xfe"])
def test_other_bytes_are_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^m: "):
        parse_manifest(data, "m")


def test_differences_name_field_found_and_needed() -> None:
    assert list_differences({"a": 1, "more": 2}, {"a": 1}) == []
    assert list_differences({"a": 1}, {"a": 2, "b": (1, 2)}) == ["a: found 1, need 2", "b: found None, need [1, 2]"]


def content_of(digest: str, asked: list[int]) -> Any:
    def content() -> dict[str, Any]:
        asked.append(1)
        return {"num_sequences": 10, "index_digest": digest}

    return content


@pytest.mark.parametrize(
    ("identity", "is_read"),
    [
        (ETAG, False),
        ({"size": 100, "generation": "17"}, False),
        ({"size": 100, "mtime_ns": 1, "ctime_ns": 1, "inode": 5}, False),
        ({"size": 100, "mtime": 17.5}, True),
        ({"size": 100, "etag": 'W/"abc"'}, True),
        ({"size": 100}, True),
        ({}, True),
    ],
)
def test_the_idx_is_read_only_where_its_identity_proves_nothing(identity: dict[str, Any], is_read: bool) -> None:
    manifest, asked = replace(MANIFEST, data={"idx": identity}), list[int]()
    origin = Origin(lambda: {"idx": identity}, content_of("77", asked))
    assert list_mismatches(manifest, {"random_seed": 7}, origin) == []
    assert bool(asked) == is_read


def test_an_identity_may_have_more_or_fewer_fields_for_the_same_idx() -> None:
    assert same_object(ETAG, {**ETAG, "version": "3"})
    assert not same_object({**ETAG, "version": "2"}, {**ETAG, "version": "3"})
    assert not same_object(ETAG, {"size": 100, "generation": "3"})


@pytest.mark.parametrize("other", [{"size": 100, "etag": '"other"'}, {"size": 101, "etag": '"abc"'}, {}])
def test_another_idx_is_read_and_its_content_decides(other: dict[str, Any]) -> None:
    asked: list[int] = []
    assert list_mismatches(MANIFEST, {}, Origin(lambda: {"idx": other}, content_of("77", asked))) == []
    wrong = list_mismatches(MANIFEST, {}, Origin(lambda: {"idx": other}, content_of("78", asked)))
    assert wrong == ["index_digest: found '77', need '78'"]
    assert len(asked) == 2


@pytest.mark.parametrize("count", [0, 1, 5, 2**18 + 3])
def test_consecutive_documents_are_described_by_their_ends(count: int) -> None:
    run = range(7, 7 + count)
    array = np.arange(7, 7 + count, dtype=np.int32)
    if count:
        assert describe_documents(run) == describe_documents(array) == f"7:{7 + count}"
        assert describe_documents(array[::-1].copy()) != describe_documents(array) or count == 1


# With datasets


def train(prefix: str, cache: Any, size: int = 100, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "random_seed": 7, "sequence_length": 8, "split": "1,0,0", "tokenizer": TOKENIZER, "cache_small_indices": True,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    config = binidx.GPTDatasetConfig(blend=([prefix], None), path_to_cache=str(cache), **{**settings, **changes})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [size, 0, 0], lambda: True, config).build()[0]


def write(prefix: Path, seed: int = 0, tokens: int = 0) -> str:
    """A dataset of lengths drawn by one seed and tokens by another."""
    lengths = np.random.default_rng(seed).integers(1, 30, 100).astype(np.int32)
    return write_with_megatron(prefix, lengths, np.random.default_rng(tokens))


def put(prefix: str, uri: str) -> None:
    for end in ("bin", "idx"):
        fsspec.filesystem("s3").put_file(f"{prefix}.{end}", f"{uri}.{end}")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as unchanged at once."""
    monkeypatch.setattr("binidx.index.cache.manifest.SETTLED_SECONDS", 0)


def test_an_index_of_data_in_a_bucket_is_valid_without_a_digest(tmp_path: Path, s3: Any) -> None:
    uri = f"{s3.fresh()}/en"
    put(write(tmp_path / "en"), uri)
    assert_loaded_without_a_digest(train(uri, tmp_path / "cache"), train(uri, tmp_path / "cache"))


def assert_loaded_without_a_digest(built: Any, loaded: Any) -> None:
    np.testing.assert_array_equal(loaded.shuffle_index, built.shuffle_index)
    assert ("identity" in vars(built.dataset), "identity" in vars(loaded.dataset)) == (True, False)


@pytest.mark.usefixtures("settled")
def test_an_index_of_unchanged_local_data_is_valid_without_a_digest(tmp_path: Path) -> None:
    prefix = write(tmp_path / "en")
    assert_loaded_without_a_digest(train(prefix, tmp_path / "cache"), train(prefix, tmp_path / "cache"))


def test_data_written_a_moment_ago_is_read(tmp_path: Path) -> None:
    dataset = binidx.IndexedDataset(write(tmp_path / "en"))
    assert "inode" not in get_origin(dataset).data()["idx"]


@pytest.mark.usefixtures("settled")
def test_data_that_was_replaced_under_the_same_size_and_time_is_noticed(
    tmp_path: Path, index_builds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write(tmp_path / "en")
    os.utime(f"{prefix}.idx", (1000, 1000))
    train(prefix, tmp_path / "cache")
    write(tmp_path / "en", seed=1)
    os.utime(f"{prefix}.idx", (1000, 1000))
    again = train(prefix, tmp_path / "cache")
    assert len(index_builds.options) == 2
    assert "stale, rebuilding: index_digest: found " in caplog.text
    np.testing.assert_array_equal(again.sample_index, train(prefix, tmp_path / "other").sample_index)


@pytest.mark.usefixtures("settled")
def test_data_that_is_replaced_under_the_same_size_and_time_while_its_index_is_built_is_noticed(
    tmp_path: Path, index_builds: Any
) -> None:
    """As by tar with fixed times. The index of the old data must not be called one of the new file."""
    prefix = write(tmp_path / "en")
    os.utime(f"{prefix}.idx", (1000, 1000))

    def replace() -> contextlib.AbstractContextManager[None]:
        os.utime(f"{write(tmp_path / 'other', seed=1)}.idx", (1000, 1000))
        for end in ("bin", "idx"):
            os.replace(tmp_path / f"other.{end}", f"{prefix}.{end}")
        return contextlib.nullcontext()

    index_builds.around = replace
    train(prefix, tmp_path / "cache")
    index_builds.around = contextlib.nullcontext
    found = train(prefix, tmp_path / "cache")
    np.testing.assert_array_equal(found.sample_index, train(prefix, tmp_path / "elsewhere").sample_index)


def test_the_same_data_written_again_needs_no_new_index(tmp_path: Path, index_builds: Any) -> None:
    for _ in range(2):
        train(write(tmp_path / "en"), tmp_path / "cache")
    assert len(index_builds.options) == 1


def test_other_tokens_of_the_same_lengths_keep_the_order_and_the_log_says_so(
    tmp_path: Path, index_builds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "binidx")
    train(write(tmp_path / "en"), tmp_path / "cache")
    again = train(write(tmp_path / "en", tokens=1), tmp_path / "cache")
    assert len(index_builds.options) == 1
    assert "the order is the same" in caplog.text
    fresh = train(f"{tmp_path}/en", tmp_path / "other")
    np.testing.assert_array_equal(again[3]["tokens"], fresh[3]["tokens"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"add_extra_token_to_sequence": False}, "add_extra_token_to_sequence: found True, need False"),
        ({"drop_last_partial_validation_sequence": False}, ""),  # no matter of the train split
    ],
)
def test_options_that_megatrons_hash_forgets_are_compared(
    change: dict[str, Any], field: str, tmp_path: Path, index_builds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write(tmp_path / "en")
    train(prefix, tmp_path / "cache")
    train(prefix, tmp_path / "cache", **change)
    assert len(index_builds.options) == (2 if field else 1)
    assert field in caplog.text


def test_an_index_of_an_older_algorithm_is_built_anew(tmp_path: Path, index_builds: Any) -> None:
    prefix = write(tmp_path / "en")
    train(prefix, tmp_path / "cache")
    [path] = (tmp_path / "cache").glob("*-train-binidx.json")
    path.write_text(json.dumps({"fingerprint": {"algorithm": 2}, "arrays": {}}))  # as it was before
    train(prefix, tmp_path / "cache")
    train(prefix, tmp_path / "cache")
    assert len(index_builds.options) == 2


def test_arrays_in_a_bucket_are_known_by_the_identity_the_store_gave_them(tmp_path: Path, s3: Any) -> None:
    uri = s3.fresh()
    dataset = train(write(tmp_path / "en"), uri)
    files = dataset._index_options.name.files
    manifest = files.read_manifest()
    assert manifest is not None
    for name, stored in manifest.arrays.items():
        assert stored.identity == object_identity(files.array_file(name))
        array = getattr(dataset, name)
        assert (stored.dtype, stored.shape) == (array.dtype.str, array.shape)
    assert manifest.order == {"num_epochs": 1, "separate_final_epoch": False}


# Staging files


def test_staging_files_of_a_killed_builder_are_removed_an_hour_later(tmp_path: Path) -> None:
    name, random = "0f" * 16, "ab" * 16
    old, new = (tmp_path / f"{name}-Kind-train-{each}.npy.{random}.tmp" for each in ("old", "new"))
    others = [tmp_path / f"users.npy.{random}.tmp", tmp_path / f"{name}-Kind-train-a.npy"]
    kinds = ("json", "json-claim", f"json-claim-after-{random}")
    linked = [tmp_path / f"{name}-Kind-train-binidx.{kind}.{random}.tmp.{random}.tmp" for kind in kinds]
    for path in (old, new, *others, *linked):
        path.write_bytes(b"left")
        if path != new:
            os.utime(path, (time.time() - 4000,) * 2)
    IndexCache(IndexFiles(Location.of(tmp_path), name)).load_or_build("described", {}, [], lambda writer: None)
    assert not any(path.exists() for path in (old, *linked))
    assert new.exists()
    assert all(path.exists() for path in others)


def test_the_page_names_each_file_of_a_cache(tmp_path: Path) -> None:
    train(write(tmp_path / "en"), tmp_path / "cache")
    page = read_page("explanation/index-caches")
    for path in (tmp_path / "cache").iterdir():
        ending = path.name.rpartition("-")[2]
        assert ending in page or f"`{ending.removesuffix('.npy')}`" in page
