"""The index cache: valid, or built again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from servers.latency_proxy import latency_proxy

import binidx
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import BuildContext, IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import format_manifest, parse_manifest
from binidx.index.cache.order_record import OrderKey
from binidx.storage.location import Location

NAMES = ("a", "b")
FINGERPRINT = {"bin": {"size": 10}, "option": True}


EXPECTED = {"a": np.arange(5, dtype=np.int32), "b": np.arange(6, dtype=np.int64).reshape(3, 2)}


class Counting:
    """Builds these arrays and remembers how often it was asked."""

    def __init__(self, expected: dict[str, np.ndarray] = EXPECTED) -> None:
        self.built, self.expected = 0, expected

    def __call__(self, writer: ArrayWriter) -> None:
        self.built += 1
        for name, array in self.expected.items():
            with writer.array(name, array.shape, array.dtype) as out:
                out[:] = array


def load_or_build(directory: str, build: Counting, fingerprint: dict[str, Any] = FINGERPRINT) -> dict[str, np.ndarray]:
    return IndexCache(IndexFiles(Location.of(directory), "0f-Kind-train")).load_or_build(
        "described", fingerprint, NAMES, build
    )


def test_the_second_start_loads_what_the_first_one_built(tmp_path: Path) -> None:
    build = Counting()
    first, second = (load_or_build(f"{tmp_path}/cache", build) for _ in range(2))
    assert build.built == 1
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name])
        assert first[name].dtype == second[name].dtype


def test_the_arrays_are_numpys_files_under_megatrons_names(tmp_path: Path) -> None:
    load_or_build(str(tmp_path), build := Counting())
    for name, array in build.expected.items():
        np.save(tmp_path / "expected.npy", array)
        assert (tmp_path / f"0f-Kind-train-{name}.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert (tmp_path / "0f-Kind-train-description.txt").read_text() == "described"


@pytest.mark.parametrize("uri", ["memory://index-cache-test"])
def test_any_store_caches(uri: str) -> None:
    build = Counting()
    for _ in range(3):
        load_or_build(uri, build)
    assert build.built == 1


def test_a_bucket_caches(s3: Any) -> None:
    build, uri = Counting(), s3.fresh()
    for _ in range(3):
        load_or_build(uri, build)
    assert build.built == 1


@pytest.mark.parametrize("changed", [{"bin": {"size": 11}}, {"option": False}, {"new": 1}])
def test_a_stale_cache_is_rebuilt_and_the_log_gives_the_reason(
    tmp_path: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    load_or_build(str(tmp_path), build := Counting())
    load_or_build(str(tmp_path), build, {**FINGERPRINT, **changed})
    assert build.built == 2
    [(name, value)] = changed.items()
    assert caplog.text.count(f"stale, rebuilding: {name}: found {FINGERPRINT.get(name)!r}, need {value!r}") == 1


def turn_the_bytes_round(directory: Path) -> None:
    path = directory / "0f-Kind-train-a.npy"
    path.write_bytes(path.read_bytes().replace(b"'<i4'", b"'>i4'"))


def spoil_the_header(directory: Path) -> None:
    path = directory / "0f-Kind-train-a.npy"
    path.write_bytes(path.read_bytes().replace(b"'shape': (", b"'shape': [("))


def nest_the_marker(directory: Path) -> None:
    (directory / "0f-Kind-train-binidx.json").write_text("[" * 100_000)


def damage_marker(directory: Path) -> None:
    (directory / "0f-Kind-train-binidx.json").write_text("{")


def empty_marker(directory: Path) -> None:
    (directory / "0f-Kind-train-binidx.json").write_text("[]")


def unmark_array(directory: Path) -> None:
    path = directory / "0f-Kind-train-binidx.json"
    marker = json.loads(path.read_text())
    del marker["arrays"]["b"]
    path.write_text(json.dumps(marker))


def remove_marker(directory: Path) -> None:
    (directory / "0f-Kind-train-binidx.json").unlink()


def remove_array(directory: Path) -> None:
    (directory / "0f-Kind-train-a.npy").unlink()


def truncate_array(directory: Path) -> None:
    path = directory / "0f-Kind-train-b.npy"
    path.write_bytes(path.read_bytes()[:-3])


def empty_array(directory: Path) -> None:
    (directory / "0f-Kind-train-b.npy").write_bytes(b"")


def flip_a_bit(directory: Path) -> None:
    path = directory / "0f-Kind-train-a.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_dtype(directory: Path) -> None:
    np.save(directory / "0f-Kind-train-a.npy", np.arange(5, dtype=np.int64))


HARMS = [damage_marker, empty_marker, unmark_array, remove_marker]
HARMS += [remove_array, truncate_array, empty_array, flip_a_bit, another_dtype]
HARMS += [turn_the_bytes_round, spoil_the_header, nest_the_marker]


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_cache_is_never_served(tmp_path: Path, harm: Any) -> None:
    good = load_or_build(str(tmp_path), build := Counting())
    harm(tmp_path)
    again = load_or_build(str(tmp_path), build)
    assert build.built == 2
    assert load_or_build(str(tmp_path), build).keys() == again.keys()
    assert build.built == 2  # and it is whole again
    for name in NAMES:
        np.testing.assert_array_equal(good[name], again[name])


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "binidx.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_a_damaged_cache_in_a_bucket_is_built_anew(
    s3: Any, name: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")  # else this node has them all
    uri = s3.fresh()
    good = load_or_build(uri, build := Counting())
    fs, path = fsspec.filesystem("s3"), f"{uri}/0f-Kind-train-{name}"
    content = bytearray(fs.cat_file(path))
    content[-4] ^= 1
    fs.rm_file(path) if harm == "remove" else fs.pipe_file(path, bytes(content[:-3] if harm == "cut" else content))
    for _ in range(2):
        again = load_or_build(uri, build)
        assert build.built == 2
    for each in NAMES:
        np.testing.assert_array_equal(good[each], again[each])


def test_a_cache_copied_to_another_bucket_is_read_though_its_etags_differ(s3: Any) -> None:
    uri, other = s3.fresh(), s3.fresh()
    good = load_or_build(uri, build := Counting())
    fs = fsspec.filesystem("s3")
    fs.copy(f"{uri}/", f"{other}/", recursive=True)
    marker = f"{other}/0f-Kind-train-binidx.json"
    manifest = parse_manifest(fs.cat_file(marker), marker)
    moved = {
        name: replace(each, identity={"size": each.bytes, "etag": '"ab-2"'}) for name, each in manifest.arrays.items()
    }
    fs.pipe_file(marker, format_manifest(replace(manifest, arrays=moved)))
    again = load_or_build(other, build)
    assert build.built == 1
    np.testing.assert_array_equal(good["a"], again["a"])


def test_a_start_requests_the_manifest_and_each_array_once(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    with latency_proxy(s3.server.endpoint) as proxy:
        cache = IndexCache(IndexFiles(Location.of(s3.fresh(), {"endpoint_url": proxy.endpoint}), "0f-Kind-train"))
        cache.load_or_build("described", FINGERPRINT, NAMES, build := Counting())
        proxy.reset()
        cache.load_or_build("described", FINGERPRINT, NAMES, build)
        assert build.built == 1
        assert [request.method for request in proxy.log()] == ["GET"] * 3


def test_a_store_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    arrays = load_or_build(f"{tmp_path}/file/cache", Counting())
    assert len(arrays["a"]) == 5
    assert "index not kept" in caplog.text


@pytest.mark.parametrize("harm", [damage_marker, flip_a_bit])
def test_a_cache_that_breaks_while_the_lock_is_awaited_is_named_in_one_warning(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    load_or_build(str(tmp_path), build := Counting())
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("0f-*")}
    remove_marker(tmp_path)

    def publish_and_harm(_: bool) -> None:
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data)
        harm(tmp_path)

    cache = IndexCache(
        IndexFiles(Location.of(str(tmp_path)), "0f-Kind-train"), context=BuildContext((publish_and_harm,))
    )
    cache.load_or_build("described", FINGERPRINT, NAMES, build)
    assert build.built == 2
    assert caplog.text.count("unusable, rebuilding") == 1


def test_a_manifest_names_the_version_of_a_library_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    load_or_build(str(tmp_path), Counting())
    marker = tmp_path / "0f-Kind-train-binidx.json"
    assert parse_manifest(marker.read_bytes(), str(marker)).library == binidx.__version__


def test_an_index_that_is_not_published_is_not_recorded_but_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(name: str, order: OrderKey) -> bytes:
        cache = IndexCache(IndexFiles(Location.of(str(tmp_path)), f"{name}-Kind-train"), order=lambda: order)
        cache.load_or_build("described", FINGERPRINT, NAMES, Counting())
        [record] = tmp_path.glob("*-binidx-orders.json")
        return record.read_bytes()

    first = build("a", OrderKey(1, False, 0, 10))
    (tmp_path / "b-Kind-train-binidx.json").mkdir()
    assert build("b", OrderKey(2, False, 11, 20)) == first
    assert "index not kept" in caplog.text
    assert "this run reads 2 epochs" in caplog.text
