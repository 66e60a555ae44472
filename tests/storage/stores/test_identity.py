"""No response is taken for another: of another range, another length, another size or another version of an object."""

from __future__ import annotations

import contextlib
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.proxied_store import TRANSPORTS, Distant, distant_store
from helpers.random_datasets import Document, build_ours
from helpers.reader_stacks import summed
from helpers.zstd_segments import compressed
from servers.gcs import Store
from servers.http_objects import Server, http_objects, served_by_thread

import binidx
from binidx.errors import ObjectChangedError, ShortReadError
from binidx.format.bin_file import open_bin
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.identity import check_response, check_unchanged, object_info, parse_content_range

OLD, SAME_SIZE, LARGER, SMALLER = b"o" * 300, b"n" * 300, b"l" * 400, b"s" * 299
GOOD = {"content-range": "bytes 10-19/300", "content-length": "10", "etag": '"a"', "x-goog-generation": "7"}
SIZE, ETAG, WEAK = {"size": 300}, {"size": 300, "etag": '"a"'}, {"size": 300, "etag": 'W/"a"'}
GENERATION = {"size": 300, "etag": "its metadata's", "generation": "7"}


def check(identity: Mapping[str, Any], where: tuple[int, int] = (10, 20), status: int = 206, **changes: Any) -> None:
    """The check of a good response with some headers changed; None: not sent."""
    headers = GOOD | {name.replace("_", "-"): value for name, value in changes.items()}
    sent = {name: value for name, value in headers.items() if value is not None}
    check_response(ObjectInfo("s3://b/k", identity["size"], identity), where, status, sent)


@pytest.mark.parametrize("identity", [SIZE, ETAG, WEAK, GENERATION])
def test_a_good_response_passes(identity: Mapping[str, Any]) -> None:
    check(identity)
    check(identity, content_length=None)
    check(identity, status=200)  # rclone says so of a range
    check(identity, (0, 300), status=200, content_range=None, content_length="300")


@pytest.mark.parametrize("identity", [SIZE, ETAG, WEAK, GENERATION])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content_length": "11"}, "11 bytes for range 10-20, needed 10"),
        (
            {"content_range": "bytes 11-20/300"},
            r"found status 206, Content-Range bytes 11-20/300; need 206, bytes 10-19",
        ),
        ({"content_range": "bytes 10-20/300"}, "wrong response"),
        ({"content_range": "bytes 10-19/*"}, "wrong response"),
        ({"content_range": "10-19/300"}, "wrong response"),
        ({"content_range": None}, "Content-Range None"),
        ({"status": 204}, "found status 204"),
        ({"status": 200, "content_range": None}, "all bytes for range 10-20"),
        ({"status": 200, "content_range": None, "content_length": "300"}, "300 bytes for range 10-20"),
    ],
)
def test_a_wrong_response_is_a_short_read(identity: Mapping[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(ShortReadError, match=f"^s3://b/k: .*{message}.*; the store or a proxy before it"):
        check(identity, **changes)


@pytest.mark.parametrize(
    ("identity", "changes", "now"),
    [
        (ETAG, {"etag": '"b"'}, 'size 300, etag "b"'),
        (ETAG, {"etag": '"b"', "content_range": "bytes 10-19/301"}, 'size 301, etag "b"'),
        (ETAG, {"etag": '"b"', "content_range": None}, 'etag "b"'),
        (WEAK, {"etag": 'W/"b"'}, 'size 300, etag W/"b"'),
        (GENERATION, {"x_goog_generation": "8"}, "size 300, generation 8"),
        (SIZE, {"content_range": "bytes 10-19/301"}, "size 301"),
        ({"size": 300, "version": "v1"}, {"x_amz_version_id": "v2"}, "size 300, version v2"),
    ],
)
def test_another_version_is_a_changed_object(identity: Mapping[str, Any], changes: Any, now: str) -> None:
    with pytest.raises(
        ObjectChangedError, match=rf"^s3://b/k: changed since .*, now {re.escape(now)}\); open it again$"
    ):
        check(identity, **changes)


@pytest.mark.parametrize("identity", [ETAG, GENERATION])
def test_another_size_of_the_same_version_is_a_wrong_response(identity: Mapping[str, Any]) -> None:
    with pytest.raises(ShortReadError, match="wrong response"):
        check(identity, content_range="bytes 10-19/301")


@pytest.mark.parametrize(("identity", "header"), [(ETAG, "etag"), (GENERATION, "x_goog_generation")])
def test_a_response_tells_the_version_that_is_pinned(identity: Mapping[str, Any], header: str) -> None:
    with pytest.raises(ShortReadError, match=f"without a version .need {header.replace('_', '-')}"):
        check(identity, **{header: None})
    check(WEAK, etag=None)


def test_a_head_request_may_tell_more_of_an_object_than_the_list_it_was_opened_from() -> None:
    opened = ObjectInfo("s3://b/k", 300, ETAG)
    check_unchanged(opened, object_info("s3://b/k", {**ETAG, "VersionId": "v1"}))
    for now in ({**ETAG, "etag": '"b"', "VersionId": "v1"}, {"size": 300, "mtime": 7.0}, {**ETAG, "size": 301}):
        with pytest.raises(ObjectChangedError):
            check_unchanged(opened, object_info("s3://b/k", now))


@pytest.mark.parametrize("etag", ["a", '"a"', 'W/"a"'])
def test_quotes_and_weakness_make_no_other_version(etag: str) -> None:
    check(ETAG, etag=etag)
    check(WEAK, etag=etag)


@pytest.mark.parametrize(("start", "stop", "total"), [(0, 1, 1), (10, 20, 300), (5 << 40, 6 << 40, 7 << 40)])
def test_a_content_range_is_read_as_it_is_written(start: int, stop: int, total: int) -> None:
    assert parse_content_range(f"bytes {start}-{stop - 1}/{total}") == ((start, stop), total)


@pytest.mark.parametrize("text", [None, "", "bytes */300", "bytes 1-2", "bytes 1-2/*", "bytes -1-2/3", "lines 1-2/3"])
def test_what_is_no_content_range_is_none(text: str | None) -> None:
    assert parse_content_range(text) is None


@pytest.fixture(scope="module", params=TRANSPORTS)
def distant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Distant]:
    with distant_store(request.param, request, tmp_path_factory.mktemp("shelf"), delay_ms=0) as found:
        yield found


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("fault", ["replaced", "outgrown"])
def test_bytes_of_another_version_are_an_error_and_are_not_kept(
    distant: Distant, fault: str, kept: bool, tmp_path: Path
) -> None:
    distant.proxy.become()
    data = bytes(range(250)) * 4000
    uri = distant.put("data", data)
    options = distant.options(**({"cache_dir": str(tmp_path)} if kept else {}))
    reader = open_object(uri, storage_options=options, cache=None if kept else False)
    distant.proxy.become(faults={fault: 1.0})
    with pytest.raises(ObjectChangedError, match=f"^{uri}: changed since it was opened"):
        reader.read([(100, 200), (900_000, 900_100)])
    distant.proxy.become()
    assert [bytes(view) for view in reader.read([(100, 200)])] == [data[100:200]]


@dataclass
class Heedless:
    """A bucket of a server that ignores If-Match and generation."""

    uri: str
    options: dict[str, Any]
    put: Callable[[str, bytes], object]


@pytest.fixture(scope="module")
def heedless_web() -> Iterator[Server]:
    with http_objects({}) as server:
        server.behaviour = "heedless"
        yield server


@pytest.fixture(scope="module")
def heedless_gcs() -> Iterator[Store]:
    with Store() as store:
        store.heedless = True
        with served_by_thread(store):
            yield store


@pytest.fixture(scope="module", params=TRANSPORTS)
def heedless(request: pytest.FixtureRequest, heedless_web: Server, heedless_gcs: Store) -> Heedless:
    kind, _, fast = request.param.partition(" ")
    ours = {"binidx": {"fast": bool(fast), "max_gap": 0, "cache_chunk_bytes": CHUNK}}
    if kind == "gs":
        endpoint = f"http://127.0.0.1:{heedless_gcs.server_port}"
        options = {"endpoint_url": endpoint, "token": "anon", "project": "p", **ours}
        return Heedless("gs://b", options, lambda name, data: heedless_gcs.put(f"b/{name}", data, None))
    endpoint = heedless_web.endpoint
    uri, options = {
        "s3": ("s3://b", {"endpoint_url": endpoint, "key": "k", "secret": "s", **ours}),
        "http": (f"{endpoint}/b", ours),
    }[kind]
    return Heedless(uri, options, lambda name, data: heedless_web.objects.update({f"/b/{name}": data}))


CHUNK = 64 << 10
"""Bytes that a cache in memory fetches together; here one on disk does, too."""
PLACES = [(start, start + 100) for start in range(50, 4 * CHUNK, CHUNK // 2)]
VERSIONS = [random.Random(seed).randbytes(size) for seed, size in enumerate((4 * CHUNK, 4 * CHUNK, 5 * CHUNK))]
FORMS: dict[str, Callable[[bytes], dict[str, bytes]]] = {
    "plain": lambda data: {".bin": data},
    "checksums": lambda data: {".bin": data, ".bin.xxh3": summed(data)},
    "zstd": lambda data: {".bin.zst": compressed(data, CHUNK)},
}
"""What is stored of some tokens."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache", ["no cache", "memory", "disk"])
def test_no_byte_of_a_replaced_object_is_served_where_the_server_ignores_conditions(
    heedless: Heedless, cache: str, form: str, tmp_path: Path
) -> None:
    """Half of the places are read before: a cache may go on serving these, of the version that was opened."""
    on_disk = {"cache_dir": str(tmp_path)} if cache == "disk" else {}
    options = {**heedless.options, "binidx": {**heedless.options["binidx"], **on_disk}}
    name, before = uuid.uuid4().hex, PLACES[: len(PLACES) // 2]

    def write(data: bytes) -> RangeReader:
        for suffix, stored in FORMS[form](data).items():
            heedless.put(name + suffix, stored)
        return open_bin(Location.of(f"{heedless.uri}/{name}", options), cache=cache != "no cache")

    def assert_reads(reader: RangeReader, places: list[tuple[int, int]], data: bytes) -> None:
        assert [bytes(view) for view in reader.read(places)] == [data[start:stop] for start, stop in places]

    reader = write(VERSIONS[0])
    for old, new in pairwise(VERSIONS):
        assert_reads(reader, before, old)
        newer, served = write(new), []
        for start, stop in PLACES:
            with contextlib.suppress(ObjectChangedError):
                assert_reads(reader, [(start, stop)], old)
                served.append((start, stop))
        assert served == ([] if cache == "no cache" else before)
        reader = newer
    assert_reads(reader, PLACES, VERSIONS[-1])


@pytest.mark.parametrize("new", [SAME_SIZE, LARGER, SMALLER], ids=["same size", "larger", "smaller"])
def test_a_replaced_object_is_named_with_both_versions(heedless: Heedless, new: bytes) -> None:
    heedless.put("named", OLD)
    reader = open_object(f"{heedless.uri}/named", storage_options=heedless.options, cache=False)
    heedless.put("named", new)
    with pytest.raises(ObjectChangedError, match=r": changed since it was opened .*, now .*; open it again$"):
        reader.read([(10, 20), (100, 250)])


def batches(prefix: str, indices: Path, options: dict[str, Any] | None) -> list[Any]:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=64, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(indices),
        storage_options=options,
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [400, 0, 0], lambda: True, config).build()[0]
    found = binidx.build_pretraining_data_loader(train, 0, 8)
    assert found is not None
    return list(found)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, 999, 300, np.uint16), [300], []) for _ in range(100)]
    return build_ours(tmp_path_factory.mktemp("local") / "en", documents, np.uint16)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("fault", ["elsewhere", "resized", "placeless", "whole", "replaced"])
def test_an_epoch_has_the_right_samples_or_an_error(
    distant: Distant, local: str, fault: str, kept: bool, tmp_path: Path
) -> None:
    """Each range of tokens meets the fault when it is asked for the first time."""
    distant.proxy.become(places={f"{fault}.bin": {"each": [fault]}})
    for end in ("bin", "idx"):
        uri = distant.put(f"{fault}.{end}", Path(f"{local}.{end}").read_bytes())
    before = distant.proxy.counts()
    options = distant.options(max_gap=0, **({"cache_dir": str(tmp_path / "cache")} if kept else {}))
    with pytest.raises(ObjectChangedError) if fault == "replaced" else contextlib.nullcontext():
        found = batches(uri.removesuffix(".idx"), tmp_path / "remote", options)
        for one, other in zip(found, batches(local, tmp_path / "local", None), strict=True):
            assert_same_sample(one, other)
    assert (distant.proxy.counts() - before).faults[fault] > 0
