"""An index is never opened with the tokens of another dataset, whoever overwrites it meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from servers.http_objects import http_objects

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format import pair
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.writing.publish import create_object, delete_object


@pytest.fixture(params=["mapped", "file", "memory", "s3"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        s3: Bucket = request.getfixturevalue("s3")
        return f"{s3.fresh()}/en"
    return f"memory://{uuid.uuid4().hex}/en" if request.param == "memory" else f"{tmp_path}/en"


@pytest.fixture
def mmap(request: pytest.FixtureRequest) -> bool:
    return "[file" not in request.node.name


def number(n: int, length: int = 1) -> list[Document]:
    """Dataset `n`: 20 + n sequences of tokens that are all n."""
    return [Document([n] * (20 + n) * length, [length] * (20 + n), [])]


def read_all(dataset: IndexedDataset) -> list[int]:
    return np.concatenate(dataset[:]).tolist()


@pytest.fixture
def when_opened(monkeypatch) -> Callable[..., None]:
    """`when_opened(end, acts)`: right before the n-th opening of an object whose name ends so, the n-th act."""

    def arrange(end: str, acts: list[Callable[[], object]]) -> None:
        name = "open_object" if end == ".idx" else "open_stored"
        really = getattr(pair, name)

        def meddled(uri: str, **options):
            if uri.endswith(end) and acts:
                acts.pop(0)()
            return really(uri, **options)

        monkeypatch.setattr(pair, name, meddled)

    return arrange


@pytest.mark.parametrize("end", [".idx", ".bin"])
@pytest.mark.parametrize(("new", "length"), [(3, 1), (0, 1), (2, 4)])  # a larger .idx, a smaller one, one as large
def test_a_dataset_replaced_while_it_is_opened_is_an_error_or_the_new_one(
    prefix, mmap, new, length, end, when_opened
) -> None:
    build_ours(prefix, number(2), np.uint16)
    when_opened(end, [lambda: build_ours(prefix, number(new, length), np.uint16)])
    if end == ".bin" or "://" not in prefix:
        with pytest.raises(ObjectChangedError, match=r"en.idx: replaced while it was opened; open it when its writer"):
            IndexedDataset(prefix, mmap=mmap)
    assert read_all(IndexedDataset(prefix, mmap=mmap)) == [new] * (20 + new) * length


def test_what_is_wrong_and_stays_so_is_told_at_once(prefix, mmap, when_opened) -> None:
    build_ours(prefix, number(2), np.uint16)
    with create_object(f"{prefix}.bin") as writer:
        writer.write(b"12")
    never: list[Callable[[], object]] = [lambda: None, lambda: pytest.fail("opened a second time")]
    when_opened(".idx", never)
    with pytest.raises(FormatError, match=r"en.bin: 2 bytes, its .idx needs 44"):
        IndexedDataset(prefix, mmap=mmap)
    assert len(never) == 1
    never.insert(0, lambda: delete_object(f"{prefix}.bin"))
    with pytest.raises(ObjectNotFoundError, match=r"en\.bin"):
        IndexedDataset(prefix, mmap=mmap)


def test_a_merge_takes_in_one_dataset_or_the_other(prefix, tmp_path: Path, when_opened) -> None:
    build_ours(prefix, number(2), np.uint16)
    when_opened(".bin", [lambda: build_ours(prefix, number(3), np.uint16)])
    with IndexedDatasetBuilder(tmp_path / "two.bin", np.uint16) as builder:
        with pytest.raises(ObjectChangedError, match="replaced while it was opened"):
            builder.add_index(prefix)
        builder.add_index(prefix)
        builder.finalize(tmp_path / "two.idx")
    assert read_all(IndexedDataset(tmp_path / "two")) == [3] * 23


def test_certainty_costs_one_head_and_what_may_lie_beside_two_requests_at_the_same_time(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "en", number(2), np.uint16)
    objects = {f"/bucket/en.{end}": Path(f"{prefix}.{end}").read_bytes() for end in ("idx", "bin")}
    with http_objects(objects) as server:
        assert read_all(IndexedDataset(f"{server.endpoint}/bucket/en")) == [2] * 22
    asked = [(method, path.rpartition("en.")[2]) for method, path, _ in server.requests]
    assert asked[0] == ("HEAD", "idx")
    beside = [("GET", "bin.zst"), ("HEAD", "bin"), ("HEAD", "bin.xxh3")]
    assert sorted(asked[1:-2]) == sorted([("GET", "idx"), *beside])
    assert asked[-2:] == [("HEAD", "idx"), ("GET", "bin")]
