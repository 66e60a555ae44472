"""Parts of a new object: unseen until published, and found again by their token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from conftest import Bucket
from servers.latency_proxy import Proxy, latency_proxy

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import find_object, object_exists, object_identity
from binidx.storage.writing.multipart import LocalParts, MultipartWriter, PartUpload, open_parts, part_digest

MIB = 1 << 20
DATA = bytes(range(256)) * (11 * MIB // 256)
RANGES = dict(enumerate(cut((0, len(DATA)), 5 * MIB), 1))


@pytest.fixture(params=[LocalParts, PartUpload])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param is PartUpload:
        return f"{request.getfixturevalue('s3').fresh()}/x"
    return str(tmp_path / "new" / "x")


def send(parts: MultipartWriter, numbers: list[int]) -> dict[int, str]:
    return {part: parts.write(part, RANGES[part], DATA[slice(*RANGES[part])]) for part in numbers}


def kept(parts: MultipartWriter, tags: dict[int, str]) -> list[int]:
    digests = {part: part_digest(DATA[slice(*RANGES[part])]) for part in RANGES}
    return [part for part in RANGES if parts.has_part(part, RANGES[part], digests[part], tags.get(part, ""))]


def test_an_object_appears_whole_when_it_is_published(target: str) -> None:
    parts = open_parts(Location.of(target), len(DATA))
    tags = send(parts, [3, 1, 2])
    assert not object_exists(Location.of(target))
    if parts.staged is not None:
        assert bytes(read_whole(open_object(parts.staged))) == DATA
    parts.publish(tags)
    assert bytes(read_whole(open_object(target))) == DATA


def test_a_successor_finds_the_parts_that_are_there(target: str) -> None:
    first = open_parts(Location.of(target), len(DATA))
    tags = send(first, [1, 2])
    first.pause()
    second = open_parts(Location.of(target), len(DATA), first.token)
    assert kept(second, tags) == [1, 2]
    assert second.token == first.token
    tags |= send(second, [3])
    second.publish(tags)
    assert bytes(read_whole(open_object(target))) == DATA


def test_a_token_that_nothing_answers_to_begins_a_new_object(target: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--s3") == "ceph":
        pytest.skip("radosgw 16.2 says 500, as if it were down, of an upload ID that it cannot read")
    for token in ("", "0" * 32, "../../elsewhere", "x" * 500):
        parts = open_parts(Location.of(target), len(DATA), token)
        assert kept(parts, {}) == []
        parts.abandon()


def test_what_is_abandoned_leaves_nothing(target: str) -> None:
    parts = open_parts(Location.of(target), len(DATA))
    send(parts, [1])
    parts.abandon()
    parts.abandon()
    fs, path = fsspec.url_to_fs(target)
    fs.invalidate_cache()
    assert fs.glob(f"{path}*") == []


def test_more_parts_than_s3_lists_at_once_are_found(s3: Bucket) -> None:
    target = f"{s3.fresh()}/x"
    first = open_parts(Location.of(target), 1100)
    tags = {part: first.write(part, (part - 1, part), b"x") for part in range(1, 1101)}
    second = open_parts(Location.of(target), 1100, first.token)
    assert all(second.has_part(part, (part - 1, part), "", tag) for part, tag in tags.items())
    second.abandon()


def test_a_second_uploader_of_a_node_logs_who_uploads(s3: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    target = f"{s3.fresh()}/x"
    first = open_parts(Location.of(target), len(DATA))
    assert first is not None
    with caplog.at_level("WARNING", "binidx.storage.writing.multipart"):
        second = open_parts(Location.of(target), len(DATA))
    assert second is not None
    assert [record.getMessage() for record in caplog.records if record.name.endswith("multipart")] == [
        f"{target}: process {os.getpid()} of this node is uploading it, too (upload {first.token}); the object "
        "published last stays"
    ]
    first.abandon()
    second.abandon()


def test_pausing_after_a_failed_publish_closes_no_descriptor_of_another(tmp_path: Path) -> None:
    target = tmp_path / "x"
    parts = open_parts(Location.of(str(target)), 3)
    parts.write(1, (0, 3), b"abc")
    target.mkdir()
    with pytest.raises(StorageError, match=f"^{target}: is a folder, needed the name of a file"):
        parts.publish({})
    with open(os.devnull, "rb") as of_another:
        parts.pause()
        parts.abandon()
        os.fstat(of_another.fileno())
    assert list(tmp_path.iterdir()) == [target]


def test_a_size_that_no_disk_holds_leaves_nothing_behind(tmp_path: Path) -> None:
    before = os.listdir("/dev/fd")
    with pytest.raises(
        StorageError, match=f"^{tmp_path}/x: File too large: .*; make room, or name a place on another disk"
    ):
        open_parts(Location.of(str(tmp_path / "x")), (1 << 63) - 1)
    assert os.listdir("/dev/fd") == before
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def proxied(s3: Bucket) -> Iterator[tuple[Proxy, str]]:
    """A proxy before S3 that has nothing but good days yet, and a URI behind it."""
    with latency_proxy(s3.server.endpoint, delay_ms=0, only="all") as proxy, proxy.in_environment():
        yield proxy, f"{s3.fresh()}/x"


def test_an_object_whose_completion_was_answered_in_vain_is_found(proxied: tuple[Proxy, str]) -> None:
    proxy, uri = proxied
    parts = open_parts(Location.of(uri), len(DATA))
    assert parts is not None
    tags = send(parts, list(RANGES))
    # The first when the server has completed the upload; to the second request SeaweedFS answers 200, others 404.
    proxy.become(script=["reset", "no-upload"])
    assert parts.publish(tags) == object_identity(Location.of(uri))["etag"]
    assert proxy.counts().faults == {"reset": 1, "no-upload": 1}
    assert bytes(read_whole(open_object(uri))) == DATA


@pytest.mark.parametrize("other", [None, DATA[:100], DATA[::-1]])
def test_an_upload_that_is_gone_is_not_taken_for_another_object(s3: Bucket, other: bytes | None) -> None:
    uri = f"{s3.fresh()}/x"
    parts, twin = open_parts(Location.of(uri), len(DATA)), None
    assert parts is not None
    tags = send(parts, list(RANGES))
    open_parts(Location.of(uri), len(DATA), parts.token).abandon()
    if other is not None:
        twin = open_parts(Location.of(uri), len(other))
        numbered = enumerate(cut((0, len(other)), 5 * MIB), 1)
        twin.publish({part: twin.write(part, (low, high), other[low:high]) for part, (low, high) in numbered})
    found = '"[0-9a-f]{32}-[13]"' if twin else "none"
    message = rf"^{uri}: its upload was completed or aborted .*run it again \(its ETag would be .*, found {found}\)$"
    with pytest.raises(StorageError, match=message):
        parts.publish(tags)
    with pytest.raises(StorageError, match=f"^{uri}: its upload was completed or aborted meanwhile"):
        send(parts, [1])


def test_a_server_without_etags_of_parts_is_named(proxied: tuple[Proxy, str]) -> None:
    proxy, uri = proxied
    parts = open_parts(Location.of(uri), len(DATA))
    proxy.become(faults={"tagless": 1.0})
    with pytest.raises(
        StorageError, match=f"^{uri}: the response to a part has no ETag, needed one .*; let the server"
    ):
        send(parts, [1])


def test_an_upload_outlasts_an_outage_beyond_the_deadline(s3: Bucket) -> None:
    def outlasted(deadline: float) -> bool:
        uri = f"{s3.fresh()}/x"
        proxy.become()
        parts = open_parts(Location.of(uri, {"binidx": {"deadline_seconds": deadline}}), len(DATA))
        assert parts is not None
        proxy.become(faults={"503": 1.0})
        back = threading.Timer(1.5 * deadline, proxy.become)
        back.start()
        try:
            parts.publish(send(parts, list(RANGES)))
        except StorageError:
            return False
        finally:
            back.join()
        return bytes(read_whole(open_object(uri))) == DATA

    with latency_proxy(s3.server.endpoint, delay_ms=0, only="all") as proxy, proxy.in_environment():
        assert any(map(outlasted, (1.0, 10.0, 100.0))), "the later ones are for a slow machine"


def test_a_part_that_is_refused_while_the_store_answers_others_is_sent_again(s3: Bucket) -> None:
    def outlasted(patience: float) -> bool:
        uri, other = f"{s3.fresh()}/refused", s3.fresh()
        proxy.become()
        parts = open_parts(Location.of(uri, {"binidx": {"outage_seconds": patience}}), len(DATA))
        assert parts is not None
        proxy.become(places={"/refused": {"faults": {"503": 1.0}}})
        end = time.monotonic() + 2 * patience

        def ask_others() -> None:
            while time.monotonic() < end:
                find_object(Location.of(other))
            proxy.become()

        others = threading.Thread(target=ask_others)
        others.start()
        try:
            parts.publish(send(parts, list(RANGES)))
        except StorageError:
            return False
        finally:
            others.join()
        return bytes(read_whole(open_object(uri))) == DATA

    with latency_proxy(s3.server.endpoint, delay_ms=0, only="all") as proxy, proxy.in_environment():
        assert any(map(outlasted, (1.0, 10.0, 100.0))), "the later ones are for a slow machine"
