"""Small `.idx` of many prefixes come out of one object, as long as it holds the very bytes that lie in the store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

from binidx.errors import FormatError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.prefix_listing import (
    BUNDLE_BYTES,
    LARGEST_BYTES,
    MIN_LISTED_PREFIXES,
    IdxBundle,
    format_bundle,
    list_pairs_with_bundle,
    parse_bundle,
)
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_identity, read_small
from binidx.storage.writing.publish import create_object


def number(n: int) -> list[Document]:
    """Dataset `n`: 20 + n sequences of one token, n."""
    return [Document([n] * (20 + n), [1] * (20 + n), [])]


@pytest.fixture(params=["s3", "gs"])
def folder(request: pytest.FixtureRequest) -> str:
    store = request.getfixturevalue(request.param)
    return store.fresh() if request.param == "s3" else f"{store}/bundled-{uuid.uuid4().hex}"


@pytest.fixture
def prefixes(folder: str) -> list[str]:
    return [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]


@pytest.fixture
def bundle(folder: str) -> IdxBundle:
    return IdxBundle(Location.of(f"{folder}/cache"))


def open_all(prefixes: Sequence[str], bundle: IdxBundle) -> list[IndexedDataset]:
    found = list_pairs_with_bundle([Location.of(prefix) for prefix in prefixes], bundle)
    return [IndexedDataset(prefix, listed=found.get(prefix)) for prefix in prefixes]


def check_all(prefixes: Sequence[str], bundle: IdxBundle, numbers: Sequence[int] = range(MIN_LISTED_PREFIXES)) -> None:
    for dataset, n in zip(open_all(prefixes, bundle), numbers, strict=True):
        assert np.concatenate(dataset[:]).tolist() == [n] * (20 + n)


def bundled(prefixes: Sequence[str], bundle: IdxBundle) -> list[str]:
    """The prefixes whose `.idx` would come out of the bundle now."""
    found = bundle.read(prefixes)
    marks = {prefix: object_identity(Location.of(f"{prefix}.idx")) for prefix in prefixes}
    return [prefix for prefix in prefixes if found and found.find(prefix, marks[prefix]) is not None]


def object_and_bytes(prefix: str) -> tuple[dict[str, object], memoryview]:
    location = Location.of(f"{prefix}.idx")
    return object_identity(location), memoryview(read_small(location) or b"")


def replace_bundle(prefixes: Sequence[str], bundle: IdxBundle, data: bytes) -> None:
    with create_object(bundle.file(prefixes)) as out:
        out.write(data)


def test_the_second_start_reads_one_object_and_no_idx(s3: Bucket, tmp_path, monkeypatch) -> None:
    folder = s3.fresh()
    prefixes = [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    bundle = IdxBundle(Location.of(f"{folder}/cache"))
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        for start, asked in enumerate([MIN_LISTED_PREFIXES, 0, 0]):
            monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path / str(start)))
            proxy.reset()
            datasets = open_all(prefixes, bundle)
            assert sum(each.path.endswith(".idx") for each in proxy.log()) == asked
            assert [len(each) for each in datasets] == [20 + n for n in range(MIN_LISTED_PREFIXES)]


def test_a_first_start_keeps_the_small_idx_files_of_a_node_as_one_object(prefixes, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path))
    locations = [Location.of(prefix) for prefix in prefixes]
    for numbers in (range(MIN_LISTED_PREFIXES), [12, *range(1, MIN_LISTED_PREFIXES)]):
        for _ in range(2):
            found = list_pairs_with_bundle(locations, None)
            datasets = [IndexedDataset(prefix, listed=found[prefix]) for prefix in prefixes]
            assert [len(each) for each in datasets] == [20 + n for n in numbers]
        assert len(list(tmp_path.glob("objects/*"))) == (1 if numbers[0] == 0 else 2)
        build_ours(prefixes[0], number(12), np.uint16)


def test_all_bytes_are_right_and_both_objects_identified_as_without(prefixes, bundle) -> None:
    plain = [IndexedDataset(prefix).opened["bin"] for prefix in prefixes]
    check_all(prefixes, bundle)
    assert bundled(prefixes, bundle) == prefixes
    check_all(prefixes, bundle)
    assert [each.opened["bin"]["size"] for each in open_all(prefixes, bundle)] == [each["size"] for each in plain]


def test_an_idx_that_changed_is_read_anew_and_bundled_anew(prefixes, bundle) -> None:
    open_all(prefixes, bundle)
    build_ours(prefixes[3], number(12), np.uint16)
    assert bundled(prefixes, bundle) == [*prefixes[:3], *prefixes[4:]]
    for _ in range(2):
        check_all(prefixes, bundle, [0, 1, 2, 12, *range(4, MIN_LISTED_PREFIXES)])
        assert bundled(prefixes, bundle) == prefixes


@pytest.mark.parametrize("bit", [3, 100, 8 * 60])  # the magic, the table's size, the table
def test_a_damaged_bundle_is_not_used_and_is_written_anew(prefixes, bundle, bit, caplog) -> None:
    open_all(prefixes, bundle)
    whole = bytearray(read_small(bundle.file(prefixes)) or b"")
    whole[bit // 8] ^= 1 << bit % 8
    replace_bundle(prefixes, bundle, bytes(whole))
    check_all(prefixes, bundle)
    assert "unusable" in caplog.text
    assert bundled(prefixes, bundle) == prefixes


def test_of_a_bundle_with_a_damaged_file_the_others_are_used(prefixes, bundle) -> None:
    open_all(prefixes, bundle)
    whole = bytearray(read_small(bundle.file(prefixes)) or b"")
    whole[-1] ^= 1
    replace_bundle(prefixes, bundle, bytes(whole))
    assert bundled(prefixes, bundle) == prefixes[:-1]
    check_all(prefixes, bundle)
    replace_bundle(prefixes, bundle, bytes(whole[:-100]))
    check_all(prefixes, bundle)


def test_a_bundle_of_other_prefixes_is_another_object_and_of_no_use(prefixes, bundle) -> None:
    open_all(prefixes, bundle)
    more = [*prefixes, build_ours(f"{prefixes[0]}-more", number(9), np.uint16)]
    assert bundle.file(more) != bundle.file(prefixes) == bundle.file([*reversed(prefixes), prefixes[2]])
    check_all(more, bundle, [*range(MIN_LISTED_PREFIXES), 9])
    # Even where it lies under the name of theirs.
    replace_bundle(more, bundle, read_small(bundle.file(prefixes)) or b"")
    swapped = build_ours(more[-1], number(15), np.uint16)
    check_all([*prefixes, swapped], bundle, [*range(MIN_LISTED_PREFIXES), 15])


def test_a_store_that_cannot_be_written_to_costs_a_line_in_the_log(s3: Bucket, tmp_path: Path, caplog) -> None:
    folder = s3.fresh()
    prefixes = [build_ours(f"{folder}/p{n}", number(n), np.uint16) for n in range(MIN_LISTED_PREFIXES)]
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        check_all(prefixes, IdxBundle(Location.of(f"{tmp_path}/file/cache")))
    assert "not written" in caplog.text


def test_bytes_that_were_damaged_on_the_way_stay_out_of_the_bundle(prefixes, bundle) -> None:
    files = {prefix: object_and_bytes(prefix) for prefix in prefixes}
    flipped = bytearray(files[prefixes[3]][1])
    flipped[40] ^= 1  # a length, which no longer fits the pointers
    damaged = {**files, prefixes[3]: (files[prefixes[3]][0], memoryview(flipped))}
    bundle.update(prefixes, damaged, prefixes)
    assert bundled(prefixes, bundle) == [*prefixes[:3], *prefixes[4:]]
    check_all(prefixes, bundle)
    assert bundled(prefixes, bundle) == prefixes


def test_only_who_may_writes_it(prefixes, bundle) -> None:
    open_all(prefixes, IdxBundle(bundle.directory, writable=False))
    assert bundle.read(prefixes) is None


def test_writers_race_without_harm(prefixes, bundle) -> None:
    with ThreadPoolExecutor(4) as threads:
        for datasets in threads.map(lambda _: open_all(prefixes, bundle), range(4)):
            assert [len(each) for each in datasets] == [20 + n for n in range(MIN_LISTED_PREFIXES)]
    assert bundled(prefixes, bundle) == prefixes


# The format


def files(sizes: Sequence[int]) -> dict[str, tuple[dict[str, object], memoryview]]:
    return {
        f"s3://b/p{n}": ({"size": size, "etag": f'"{n}"'}, memoryview(bytes([n] * size)))
        for n, size in enumerate(sizes)
    }


def test_a_bundle_gives_what_it_was_made_of() -> None:
    given = files([0, 5, 3])
    made = parse_bundle(memoryview(b"".join(format_bundle(given, [*given]))), "s3://b/x")
    for prefix, (identity, data) in given.items():
        assert made.find(prefix, identity) == data
        assert made.find(prefix, {**identity, "etag": '"other"'}) is None
        assert made.find(prefix, {"size": identity["size"]}) is None
        assert made.find(prefix, {**identity, "version": "2"}) == data
    assert made.find("s3://b/else", given["s3://b/p0"][0]) is None


@pytest.mark.parametrize("data", [b"", b"BINIDXB1", b"BINIDXB1" + bytes(16), b"BINIDXB1" + b"\xff" * 40])
def test_what_is_no_bundle_is_an_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="x: "):
        parse_bundle(memoryview(data), "x")


def test_a_bundle_takes_the_smallest_that_are_proved_and_no_more_than_it_may() -> None:
    sizes = [LARGEST_BYTES + 1, *[LARGEST_BYTES] * (BUNDLE_BYTES // LARGEST_BYTES), 30, 20]
    marks = {f"s3://b/p{number:02}": {"size": size, "etag": "x"} for number, size in enumerate(sizes)}
    assert IdxBundle.select(marks) == [name for name in marks if name not in ("s3://b/p00", "s3://b/p64")]
    weak = {"a": {"size": 1, "etag": 'W/"1"'}, "b": {"size": 1, "mtime": 5.0}, "c": {"size": 1, "generation": "7"}}
    assert IdxBundle.select(weak) == ["c"]
