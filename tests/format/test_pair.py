"""An index is never opened with the tokens of another dataset, whoever overwrites it meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from servers.http_objects import Server, http_objects

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format import bin_file, pair
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
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
    """`when_opened(end, acts)`: right before the n-th opening of an object whose name ends so, the n-th act.

    In a store both are opened at the same time: the .bin waits for the act before the .idx, or its own for the .idx.
    """

    def arrange(end: str, acts: list[Callable[[], object]]) -> None:
        open_idx, open_tokens, is_its_turn = pair.open_object, bin_file.open_stored, threading.Event()

        def act(location: Location) -> None:
            if location.uri.endswith(end) and acts:
                acts.pop(0)()

        def meddled_idx(location: Location, **options):
            act(location)
            opened = open_idx(location, **options) if end == ".bin" else None
            is_its_turn.set()
            return opened or open_idx(location, **options)

        def meddled_tokens(location: Location, **options):
            if location.uri.endswith(".bin"):
                is_its_turn.wait(60)
                is_its_turn.clear()
            act(location)
            return open_tokens(location, **options)

        monkeypatch.setattr(pair, "open_object", meddled_idx)
        monkeypatch.setattr(bin_file, "open_stored", meddled_tokens)

    return arrange


@pytest.mark.parametrize("end", [".idx", ".bin"])
@pytest.mark.parametrize(("new", "length"), [(3, 1), (0, 1), (2, 4)])  # a larger .idx, a smaller one, one as large
def test_a_dataset_replaced_while_it_is_opened_is_an_error_or_the_new_one(
    prefix, mmap, new, length, end, when_opened
) -> None:
    build_ours(prefix, number(2), np.uint16)
    when_opened(end, [lambda: build_ours(prefix, number(new, length), np.uint16)])
    problem = r"en.(idx|bin): replaced while it was opened; open it when its writer"
    if end == ".bin" or "://" not in prefix:
        with pytest.raises(ObjectChangedError, match=problem):
            IndexedDataset(prefix, mmap=mmap)
    else:  # the .bin is looked up at the same time as the .idx
        with contextlib.suppress(ObjectChangedError):
            assert read_all(IndexedDataset(prefix, mmap=mmap)) == [new] * (20 + new) * length
    assert read_all(IndexedDataset(prefix, mmap=mmap)) == [new] * (20 + new) * length


def test_what_is_wrong_and_stays_so_is_told_at_once(prefix, mmap, when_opened) -> None:
    build_ours(prefix, number(2), np.uint16)
    with create_object(Location.of(f"{prefix}.bin")) as writer:
        writer.write(b"12")
    never: list[Callable[[], object]] = [lambda: None, lambda: pytest.fail("opened a second time")]
    when_opened(".idx", never)
    with pytest.raises(FormatError, match=r"en.bin: 2 bytes, its .idx needs 44"):
        IndexedDataset(prefix, mmap=mmap)
    assert len(never) == 1
    never.insert(0, lambda: delete_object(Location.of(f"{prefix}.bin")))
    with pytest.raises(ObjectNotFoundError, match=r"en\.bin"):
        IndexedDataset(prefix, mmap=mmap)


class DamagedOnce(dict[str, bytes]):
    """Objects of a server; the first response with bytes of an `.idx` has a flipped bit."""

    def __init__(self, server: Server, objects: dict[str, bytes], place: int, bit: int) -> None:
        super().__init__(objects)
        self.server, self.place, self.bit = server, place, bit

    def get(self, name: str, default: Any = None) -> Any:
        data = super().get(name, default)
        sent = [each for each in self.server.requests if each[:2] == ("GET", name)]
        if not name.endswith(".idx") or len(sent) != 1:
            return data
        return data[: self.place] + bytes([data[self.place] ^ self.bit]) + data[self.place + 1 :]


@pytest.mark.parametrize(
    ("place", "bit"),
    [(0, 1), (17, 2), (20, 1), (34, 1), (34 + 4 * 21, 4), (34 + 4 * 21, 8), (34 + 12 * 22 - 8, 1), (34 + 12 * 22, 1)],
    ids=["magic", "dtype", "count", "first length", "last length falls", "last length rises", "pointer", "bound"],
)
def test_a_bit_that_flips_on_the_way_is_fetched_again_and_stays_in_no_cache(
    place: int, bit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = build_ours(tmp_path / "en", number(2, 4), np.uint16)
    objects = {f"/en.{end}": Path(f"{prefix}.{end}").read_bytes() for end in ("idx", "bin")}
    with http_objects({}) as server:
        server.objects, server.etag = DamagedOnce(server, objects, place, bit), lambda data: f'"{len(data)}"'
        assert read_all(IndexedDataset(f"{server.endpoint}/en")) == [2] * 22 * 4
        assert "en.idx: damaged on its way or on the node, fetched again from its store: " in caplog.text
        server.requests.clear()
        assert read_all(IndexedDataset(f"{server.endpoint}/en")) == [2] * 22 * 4
        assert [each for each in server.requests if each[:2] == ("GET", "/en.idx")] == []


def test_a_stored_bit_that_would_take_tokens_away_is_an_error(prefix, mmap) -> None:
    build_ours(prefix, number(2, 5), np.uint16)
    data = bytearray(read_whole(open_object(f"{prefix}.idx", cache=False)))
    data[34 + 4 * 21] ^= 4
    with create_object(Location.of(f"{prefix}.idx")) as writer:
        writer.write(data)
    with pytest.raises(FormatError, match=r"en.bin: 220 bytes, its .idx needs 212 .*, as if a bit .* restore the .idx"):
        IndexedDataset(prefix, mmap=mmap)


@pytest.mark.parametrize(("spare", "accepted"), [(1, True), (6, True), (8, True), (2, False), (4, True), (16, False)])
def test_bytes_after_the_last_token_are_accepted_unless_a_bit_explains_them(
    spare: int, accepted: bool, tmp_path: Path
) -> None:
    """Its last length is 6, so bits 1 and 2 (4 and 8 bytes) are set."""
    prefix = build_ours(tmp_path / "en", number(2, 6), np.uint16)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(bytes(spare))
    if accepted:
        assert read_all(IndexedDataset(prefix)) == [2] * 22 * 6
    else:
        with pytest.raises(FormatError, match="as if a bit in the length of its last sequence had flipped"):
            IndexedDataset(prefix)


def test_a_merge_takes_in_one_dataset_or_the_other(prefix, tmp_path: Path, when_opened) -> None:
    build_ours(prefix, number(2), np.uint16)
    when_opened(".bin", [lambda: build_ours(prefix, number(3), np.uint16)])
    with IndexedDatasetBuilder(tmp_path / "two.bin", np.uint16) as builder:
        with pytest.raises(ObjectChangedError, match="replaced while it was opened"):
            builder.add_index(prefix)
        builder.add_index(prefix)
        builder.finalize(tmp_path / "two.idx")
    assert read_all(IndexedDataset(tmp_path / "two")) == [3] * 23


def test_certainty_costs_two_heads_and_what_may_lie_beside_two_requests_at_the_same_time(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "en", number(2), np.uint16)
    objects = {f"/bucket/en.{end}": Path(f"{prefix}.{end}").read_bytes() for end in ("idx", "bin")}
    with http_objects(objects) as server:
        assert read_all(IndexedDataset(f"{server.endpoint}/bucket/en")) == [2] * 22
    asked = [(method, path.rpartition("en.")[2]) for method, path, _ in server.requests]
    first = [("GET", "bin.zst"), ("HEAD", "bin"), ("HEAD", "bin.xxh3"), ("HEAD", "idx")]
    again = [("GET", "idx"), ("HEAD", "bin"), ("HEAD", "idx")]
    assert [sorted(asked[:4]), sorted(asked[4:7]), asked[7:]] == [first, again, [("GET", "bin")]]


def give_idx_of_smaller_corpus(prefix: str, tmp_path: Path) -> None:
    """Replace the `.idx` of 10,000 tokens by one of 2,900."""
    build_ours(prefix, [Document([1] * 10_000, [10] * 1_000, [])], np.uint16)
    other = build_ours(tmp_path / "other", [Document([1] * 2_900, [10] * 290, [])], np.uint16)
    with create_object(Location.of(f"{prefix}.idx")) as writer:
        writer.write(Path(f"{other}.idx").read_bytes())


def write_manifest(prefix: str, num_tokens: int) -> None:
    counts = {"documents": 1, "sequences": num_tokens // 10, "tokens": num_tokens}
    with create_object(Location.of(f"{prefix}.manifest.json")) as writer:
        writer.write(json.dumps({"binidx_manifest": 1, "dataset": counts}).encode())


SURPLUS = r"en\.bin: 20000 bytes, its \.idx needs 5800 \(2900 tokens of uint16\) and at most 4096 of padding; "


def test_an_index_of_a_smaller_corpus_is_a_warning_once(
    prefix: str, mmap: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    give_idx_of_smaller_corpus(prefix, tmp_path)
    for manifest in (None, b"{}", b"no json"):  # none of them proves anything
        if manifest is not None:
            with create_object(Location.of(f"{prefix}.manifest.json")) as writer:
                writer.write(manifest)
        assert len(IndexedDataset(prefix, mmap=mmap)) == 290
    [warning] = [record.getMessage() for record in caplog.records]
    assert re.search(SURPLUS, warning)


def test_an_index_that_the_manifest_contradicts_is_an_error_where_the_sizes_differ(
    prefix: str, mmap: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    give_idx_of_smaller_corpus(prefix, tmp_path)
    write_manifest(prefix, 10_000)
    with pytest.raises(FormatError, match=r"en\.manifest\.json: 1000 sequences, .*en\.idx has 290; one of the two"):
        IndexedDataset(prefix, mmap=mmap)
    assert caplog.text == ""
    write_manifest(prefix, 2_900)
    IndexedDataset(prefix, mmap=mmap)
    assert re.search(SURPLUS, caplog.text)


@pytest.mark.parametrize("surplus", [0, 1])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "manifest"])
def test_a_manifest_is_read_only_where_the_sizes_differ(surplus: int, beside: bool, tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "en", number(2), np.uint16)
    objects = {f"/bucket/en.{end}": Path(f"{prefix}.{end}").read_bytes() for end in ("idx", "bin")}
    objects["/bucket/en.bin"] += bytes(surplus)
    if beside:
        objects["/bucket/en.manifest.json"] = b"{}"
    with http_objects(objects) as server:
        IndexedDataset(f"{server.endpoint}/bucket/en")
    asked = [(method, path.rpartition("en.")[2]) for method, path, _ in server.requests]
    assert asked.count(("GET", "manifest.json")) == surplus
    assert len(asked) == 7 + surplus
