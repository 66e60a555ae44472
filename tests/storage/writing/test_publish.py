"""Nobody sees half an object: writers that fail, are killed, race; on disk, in memory and on S3."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import uuid
from pathlib import Path

import fsspec
import pytest
from conftest import Bucket
from helpers import put_only_store
from helpers.forked import Child
from helpers.registering import registered_store
from servers.http_objects import http_objects
from servers.latency_proxy import latency_proxy

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import object_exists, object_identity, read_small
from binidx.storage.stores.fsspec_store import DIRECT_CONCURRENCY, open_filesystem
from binidx.storage.stores.registry import join_uri
from binidx.storage.writing import publish
from binidx.storage.writing.publish import create_object, delete_object, put_if_absent

# Of aiohttp, about the bytes that gcsfs gives it.
GS = pytest.param("gs", marks=pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"))


@pytest.fixture(params=["local", "file", "memory", "s3", GS])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        s3: Bucket = request.getfixturevalue("s3")
        return s3.fresh()
    if request.param == "gs":
        return f"{request.getfixturevalue('gs')}/{uuid.uuid4().hex}"
    return {"local": "", "file": "file://", "memory": "memory://"}[request.param] + str(tmp_path)


def content(uri: str) -> bytes:
    reader = open_object(uri, cache=False)
    return bytes(reader.read([(0, reader.size)])[0])


def everything(base: str) -> list[str]:
    """Names of all that lies under a URI, unfinished uploads included."""
    if not base.startswith("s3://"):
        fs, path = fsspec.url_to_fs(base)
        return sorted(fs.find(path))
    fs, path = fsspec.url_to_fs(base, use_listings_cache=False)
    bucket, _, key = path.partition("/")
    unfinished = [each["Key"] for each in fs.list_multipart_uploads(bucket)]
    return sorted(fs.find(path)) + [each for each in unfinished if each.startswith(key)]


SIZES = [0, 1, 100_000, publish.ONE_PUT, publish.ONE_PUT + 1]


@pytest.mark.parametrize("size", SIZES)
def test_an_object_appears_whole_when_the_block_ends(base: str, size: int) -> None:
    uri, data = join_uri(base, "deep/er/en.bin"), bytes(range(251)) * (size // 251 + 1)
    with create_object(Location.of(uri)) as writer:
        for start in range(0, size, 5_000_000):
            part = data[start : min(start + 5_000_000, size)]
            assert writer.write(memoryview(part)) == len(part)
            assert not object_exists(Location.of(uri))
    assert content(uri) == data[:size]
    assert len(everything(base)) == 1


@pytest.mark.parametrize("size", SIZES)
def test_an_exception_leaves_nothing_behind_and_the_old_object_untouched(base: str, size: int) -> None:
    uri = join_uri(base, "en.bin")
    for old in (None, b"old"):
        if old is not None:
            with create_object(Location.of(uri)) as writer:
                writer.write(old)
        with contextlib.suppress(ZeroDivisionError), create_object(Location.of(uri)) as writer:
            writer.write(bytes(size))
            raise ZeroDivisionError
        assert len(everything(base)) == (old is not None)
        assert not object_exists(Location.of(uri)) if old is None else content(uri) == old


@pytest.mark.parametrize("size", [3, publish.ONE_PUT + 1])
@pytest.mark.parametrize("name", ["a[1]*?.bin", "[0-9]", "en::v2.bin", "a b#c%20&d+e", "ünï 文"])
def test_every_character_of_a_name_is_part_of_it(base: str, name: str, size: int) -> None:
    uri, neighbour = join_uri(base, name), join_uri(base, "a1bc.bin")
    put_if_absent(Location.of(neighbour), b"another")
    with create_object(Location.of(uri)) as writer:
        writer.write(b"x" * size)
    assert content(uri) == b"x" * size
    assert put_if_absent(Location.of(uri), b"y") is False
    delete_object(Location.of(uri))
    assert not object_exists(Location.of(uri))
    assert content(neighbour) == b"another"


def test_an_object_is_replaced_whole(base: str) -> None:
    uri = join_uri(base, "x")
    for data in (b"one", b"another", b""):
        with create_object(Location.of(uri)) as writer:
            writer.write(data)
        assert content(uri) == data
        assert object_identity(Location.of(uri))["size"] == len(data)


def test_a_second_put_if_absent_changes_nothing(base: str) -> None:
    uri = join_uri(base, "deep/marker.json")
    assert put_if_absent(Location.of(uri), b"one") is True
    assert put_if_absent(Location.of(uri), b"one") is True
    assert put_if_absent(Location.of(uri), b"two") is False
    assert content(uri) == b"one"
    assert len(everything(base)) == 1


def test_deleting_is_believed_at_once_and_twice_is_no_error(base: str) -> None:
    uri = join_uri(base, "x")
    delete_object(Location.of(uri))
    assert put_if_absent(Location.of(uri), b"") is True
    assert object_exists(Location.of(uri))
    delete_object(Location.of(uri))
    delete_object(Location.of(uri))
    assert not object_exists(Location.of(uri))
    with pytest.raises(ObjectNotFoundError):
        object_identity(Location.of(uri))


def test_a_directory_is_no_object(base: str) -> None:
    put_if_absent(Location.of(join_uri(base, "directory/x")), b"x")
    assert not object_exists(Location.of(join_uri(base, "directory")))


def test_identity_is_json_and_the_readers(base: str) -> None:
    uri = join_uri(base, "x")
    put_if_absent(Location.of(uri), b"abc")
    identity = object_identity(Location.of(uri))
    assert json.loads(json.dumps(identity)) == identity == open_object(uri).identity  # type: ignore[attr-defined]
    assert identity["size"] == 3
    assert identity.keys() & {"etag", "generation", "mtime"}


def test_existence_never_comes_from_a_stale_listing(s3: Bucket) -> None:
    base, caching = s3.fresh(), {"use_listings_cache": True}
    uri = join_uri(base, "x")
    put_if_absent(Location.of(join_uri(base, "neighbour")), b"")
    # The one that is asked: as it is opened to be read.
    fs, path = open_filesystem(base, caching, reading=DIRECT_CONCURRENCY)
    at = f"Location({uri!r})"
    for call in (f"put_if_absent({at}, b'x')", f"delete_object({at})", f"put_if_absent({at}, b'y')"):
        fs.invalidate_cache()
        fs.ls(path)
        subprocess.run([sys.executable, "-c", f"from binidx.storage.writing.publish import *; {call}"], check=True)
        assert fs.exists(f"{path}/x") is not call.startswith("put"), "the listing is not stale: this test shows nothing"
        assert object_exists(Location.of(uri, caching)) is call.startswith("put")


def test_too_large_a_marker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16777217 bytes, needed at most 16777216"):
        put_if_absent(Location.of(tmp_path / "x"), bytes(publish.ONE_PUT + 1))


def test_what_cannot_be_written_is_named(s3: Bucket, tmp_path: Path) -> None:
    with http_objects({}) as server, pytest.raises(StorageError, match=f"^{server.endpoint}/x: "):
        put_if_absent(Location.of(f"{server.endpoint}/x"), b"x")
    with (
        pytest.raises(ObjectNotFoundError, match=r"^s3://no-such-bucket: no such bucket"),
        create_object(Location.of("s3://no-such-bucket/x")),
    ):
        pass
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StorageError, match=f"^{tmp_path}/file: is a file, needed a folder"),
        create_object(Location.of(tmp_path / "file/x")),
    ):
        pass
    with pytest.raises(StorageError, match=f"^{tmp_path}: "), create_object(Location.of(tmp_path)) as writer:
        writer.write(b"x")
    assert everything(str(tmp_path)) == [f"{tmp_path}/file"]


def test_a_write_that_the_disk_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """The limit on a file's size stands for the full disk: write(2) fails in the same place."""
    code = f"""
import resource, signal
from binidx.storage.location import Location
from binidx.storage.writing.multipart import LocalParts
from binidx.storage.writing.publish import create_file, create_object, put_if_absent
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
for size in (100_000, 1_000, 5_000_001):
    try:
        with create_object(Location({str(tmp_path / "x")!r})) as writer:
            for _ in range(0, 5_000_001, size):
                writer.write(bytes(size))
    except OSError as error:
        print(type(error).__name__, error)
for write in (
    lambda path: put_if_absent(Location(path), bytes(6_000_000)),
    lambda path: create_file(path, 6_000_000).__enter__(),
    lambda path: LocalParts(path, 6_000_000, ""),
):
    try:
        write({str(tmp_path / "x")!r})
    except OSError as error:
        print(type(error).__name__, error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert len(lines) == 6
    assert all(line.startswith(f"StorageError {tmp_path}/x") and "File too large" in line for line in lines)
    assert all(re.search(r"\(found [\d,]+ bytes free, need [\d,]+ or more\); make room", line) for line in lines)
    assert everything(str(tmp_path)) == []


@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_writer_killed_in_the_middle_leaves_no_object(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue("s3").fresh() if where == "s3" else str(tmp_path)
    uri = join_uri(base, "en.bin")
    code = f"""
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object
with create_object(Location({uri!r})) as writer:
    for _ in range(60):
        writer.write(bytes(1 << 20))
    print("in the middle", flush=True)
    while True:
        writer.write(b"x")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in the middle\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not object_exists(Location.of(uri))
    assert put_if_absent(Location.of(uri), b"next") is True


RACE = """
import os, sys, time
from binidx.storage.location import Location
from binidx.storage.writing.publish import put_if_absent
base, start = sys.argv[1], float(sys.argv[2])
me = str(os.getpid())
time.sleep(max(0, start - time.time()))
for key in range(20):
    data = (me * 5000).encode() if key % 2 else b"the same" * 5000
    print(key, me, int(put_if_absent(Location(f"{base}/{key}"), data)), flush=True)
"""


@pytest.mark.parametrize("where", ["local", "s3"])
def test_of_eight_racing_writers_one_wins_or_all_are_equal(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue("s3").fresh() if where == "s3" else str(tmp_path)
    start = str(time.time() + 2.5)
    racers = [Child(RACE, base, start) for _ in range(8)]
    lines = [line.split() for racer in racers for line in racer.communicate()[0].splitlines()]
    assert [racer.returncode for racer in racers] == [0] * 8
    assert len(lines) == 8 * 20
    for key in range(20):
        winners = [pid for found, pid, won in lines if int(found) == key and won == "1"]
        if key % 2:
            assert len(winners) == 1
            assert content(f"{base}/{key}") == (winners[0] * 5000).encode()
        else:
            assert len(winners) == 8
            assert content(f"{base}/{key}") == b"the same" * 5000
    assert len(everything(base)) == 20


def test_a_reader_of_a_file_that_is_being_replaced_sees_only_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "x"
    code = f"""
import itertools
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object
for number in itertools.count():
    with create_object(Location({str(path)!r})) as writer:
        for _ in range(10):
            writer.write(bytes([number % 256]) * 1000)
    if not number:
        print("first", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = [content(str(path)) for _ in range(200)]
        process.kill()
    assert all(len(each) == 10_000 and len(set(each)) == 1 for each in seen)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("s3://bucket", "a"), "s3://bucket/a"),
        (("s3://bucket/a/", "/b/c.npy/"), "s3://bucket/a/b/c.npy"),
        (("memory://", "a"), "memory://a"),
        (("/", "a/b"), "/a/b"),
        (("relative", "a"), "relative/a"),
    ],
)
def test_join_uri_by_hand(parts: tuple[str, ...], joined: str) -> None:
    assert join_uri(*parts) == joined


def test_a_bare_name_is_a_file_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with create_object(Location.of("here")) as writer:
        writer.write(b"x")
    assert put_if_absent(Location.of("there"), b"y") is True
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "there"]
    assert object_exists(Location.of("here"))


def test_a_small_object_is_read_by_one_request_whether_it_is_there_or_not(s3: Bucket, gs: str) -> None:
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        base = s3.fresh()
        for content in (b"small", b""):
            with create_object(Location.of(f"{base}/there")) as out:
                out.write(content)
            before = proxy.counts()
            assert read_small(Location.of(f"{base}/there")) == content
            assert read_small(Location.of(f"{base}/not-there")) is None
            assert (proxy.counts() - before).requests == 2
    with create_object(Location.of(f"{gs}/small")) as out:
        out.write(b"")
    assert read_small(Location.of(f"{gs}/small")) == b""
    assert read_small(Location.of(f"{gs}/not-there")) is None


def test_a_large_object_for_a_store_with_only_put_is_not_held_in_memory() -> None:
    piece, expected = bytes(range(256)) * 4096, hashlib.sha256()
    tracemalloc.start()
    try:
        with (
            registered_store("puts", put_only_store.PutOnlyStore),
            create_object(Location.of("puts://bucket/large")) as out,
        ):
            for _ in range(64):
                out.write(piece)
                expected.update(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {"puts://bucket/large": expected.hexdigest()} == put_only_store.DIGESTS
    assert peak < 2 * publish.ONE_PUT < 64 * len(piece)
