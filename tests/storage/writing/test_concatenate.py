"""Pieces of objects -> one object: S3's limits are kept, every way gives the same bytes, a failure leaves nothing."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers import toy_store
from helpers.conversion import names_beside, unfinished_uploads
from helpers.registering import registered_store
from hypothesis import given
from hypothesis import strategies as st
from servers.latency_proxy import latency_proxy

from binidx.errors import BinidxError, SlowCopyError
from binidx.storage.adapters import InMemory, JoinedReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored, read_whole
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.s3 import S3Store
from binidx.storage.writing import concatenate
from binidx.storage.writing.concatenate import Join, SourcePiece, open_join, plan_concatenation
from binidx.testing import MemoryObject

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=12))
def test_parts_are_the_pieces_and_keep_the_limits(shapes: list[tuple[int, int, bool]]) -> None:
    pieces, whole = [], b""
    for number, (before, size, literal) in enumerate(shapes):
        size = min(size, 7) if literal else size
        data = bytes((number * 50 + place) % 251 for place in range(before + size + 3))
        whole += data[before : before + size]
        if literal:
            pieces.append(in_memory(data[before : before + size]))
        else:
            stored = JoinedReader("stored", [MemoryObject(data)], [len(data)])
            pieces.append(SourcePiece(stored, before, before + size))
    parts = plan_concatenation(pieces, least=5, most=12, max_parts=10_000)

    def content(piece: SourcePiece) -> bytes:
        return bytes(piece.reader.read([(piece.start, piece.stop)])[0])

    bytes_of = [b"".join(map(content, part)) if isinstance(part, list) else content(part) for part in parts]
    assert b"".join(bytes_of) == whole
    assert all(5 <= len(each) <= 12 for each in bytes_of[:-1])
    assert all(0 < len(each) <= 12 for each in bytes_of)
    assert all(part.num_bytes >= 5 and part.is_stored for part in parts if isinstance(part, SourcePiece))


def in_memory(data: bytes) -> SourcePiece:
    return SourcePiece(InMemory("literal", data), 0, len(data))


class Large:
    """A reader of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.uri, self.size = "s3://b/k", size


@pytest.mark.parametrize("sizes", [[5 << 40], [1 << 20] * 300_000, [6 << 20] * 30_000, [128 << 20, 1] * 5000])
def test_there_are_never_more_parts_than_s3_takes(sizes: list[int]) -> None:
    pieces = [SourcePiece(Large(size), 0, size) for size in sizes]
    parts = plan_concatenation(pieces, S3Store.min_part, S3Store.copied_part, S3Store.max_parts)
    counts = [sum(piece.num_bytes for piece in part) if isinstance(part, list) else part.num_bytes for part in parts]
    assert sum(counts) == sum(sizes)
    assert len(parts) <= 10_000
    assert all(5 * MIB <= count <= 5 << 30 for count in counts[:-1])


def place(kind: str, s3: Bucket, tmp_path: Path) -> str:
    return {"s3": s3.fresh(), "gs": f"gs://test-bucket/{uuid.uuid4().hex}", "file": str(tmp_path)}.get(
        kind, f"memory://{uuid.uuid4().hex}"
    )


def stored(base: str, sizes: list[int]) -> tuple[list, list[bytes]]:
    contents = [np.random.default_rng(n).bytes(size) for n, size in enumerate(sizes)]
    for number, data in enumerate(contents):
        with fsspec.open(f"{base}/{number}", "wb") as file:
            file.write(data)
    return [open_stored(Location.of(f"{base}/{number}")) for number in range(len(sizes))], contents


def unite(uri: str, pieces: list[SourcePiece]) -> Join:
    made = open_join(Location.of(uri), pieces)
    made.fill(lambda _: None)
    made.publish(lambda: None)
    return made


@pytest.mark.parametrize(
    ("source", "target"),
    [*((same, same) for same in ("s3", "gs", "file", "memory")), ("s3", "gs"), ("gs", "file"), ("file", "s3")],
)
def test_every_way_gives_the_same_bytes(source: str, target: str, s3: Bucket, gs: str, tmp_path: Path) -> None:
    unit = MIB if source == target == "s3" else MIB // 32  # small: gcsfs warns of bodies over 1 MiB
    readers, contents = stored(place(source, s3, tmp_path), [6 * unit, 100, 0, 2 * unit, 7 * unit])
    whole = [SourcePiece(reader, 0, reader.size) for reader in readers]
    cut = [
        SourcePiece(readers[4], 17, 6 * unit),
        in_memory(b"between"),
        SourcePiece(readers[0], 5, 6 * unit),
    ]
    expected = {
        "whole": b"".join(contents),
        "cut": contents[4][17 : 6 * unit] + b"between" + contents[0][5:],
        "none": b"",
    }
    for name, pieces in {"whole": whole, "cut": cut, "none": []}.items():
        uri = f"{place(target, s3, tmp_path)}/{name}"
        made = unite(uri, pieces)
        assert bytes(read_whole(open_stored(Location.of(uri)))) == expected[name]
        server = {("s3", "s3"): "server", ("gs", "gs"): "server" if name == "whole" else "stream"}
        if pieces:
            assert made.how == {**server, ("file", "file"): "copy_file_range"}.get((source, target), "stream")


def test_compose_takes_more_than_32_in_rounds_and_leaves_no_trace(gs: str) -> None:
    base = f"{gs}/{uuid.uuid4().hex}"
    readers, contents = stored(base, [7] * 70)
    made = unite(f"{base}/all", [SourcePiece(reader, 0, 7) for reader in readers])
    assert (made.how, made.moved_bytes) == ("server", 0)
    assert bytes(read_whole(open_stored(Location.of(f"{base}/all")))) == b"".join(contents)
    assert len(names_beside(f"{base}/")) == 71


def test_from_s3_to_s3_only_small_pieces_pass_through(s3: Bucket) -> None:
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        readers, contents = stored(s3.fresh(), [6 * MIB, 8 * MIB])
        before = proxy.counts()
        uri = f"{s3.fresh()}/all"
        assert unite(uri, [SourcePiece(reader, 0, reader.size) for reader in readers]).moved_bytes == 0
        assert (proxy.counts() - before).bytes < 20_000
    assert bytes(read_whole(open_stored(Location.of(uri)))) == b"".join(contents)


@pytest.mark.parametrize("kind", ["s3", "gs", "file", "memory"])
def test_what_is_abandoned_leaves_nothing(kind: str, s3: Bucket, gs: str, tmp_path: Path) -> None:
    readers, _ = stored(place(kind, s3, tmp_path), [1] * 40 if kind == "gs" else [6 * MIB, 6 * MIB])
    uri = f"{place(kind, s3, tmp_path)}/new/all"
    made = open_join(Location.of(uri), [SourcePiece(reader, 0, reader.size) for reader in readers])
    made.fill(lambda _: None)
    made.abandon()
    made.abandon()
    assert names_beside(uri) == []
    if kind == "s3":
        assert unfinished_uploads(uri) == []


@pytest.mark.parametrize("kind", ["gs", "file"])
def test_a_source_that_changed_is_an_error_and_leaves_nothing(kind: str, gs: str, s3: Bucket, tmp_path: Path) -> None:
    base = place(kind, s3, tmp_path)
    readers, _ = stored(base, [MIB // 2])
    with fsspec.open(f"{base}/0", "wb") as file:
        file.write(b"short")
    made = open_join(Location.of(f"{base}/all"), [SourcePiece(readers[0], 0, MIB // 2)])
    with pytest.raises(BinidxError):
        unite_or_abandon(made)
    assert names_beside(f"{base}/all") == []


def unite_or_abandon(made: Join) -> None:
    try:
        made.fill(lambda _: None)
        made.publish(lambda: None)
    finally:
        made.abandon()


def test_where_the_kernel_cannot_copy_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concatenate, "copy_in_kernel", lambda *arguments: -1)
    readers, contents = stored(str(tmp_path), [9 * MIB, 3])
    made = unite(f"{tmp_path}/all", [SourcePiece(readers[0], 1, 9 * MIB), SourcePiece(readers[1], 0, 3)])
    assert (tmp_path / "all").read_bytes() == contents[0][1:] + contents[1]
    assert (made.how, made.moved_bytes) == ("stream", 9 * MIB + 2)


Copy = Callable[[int, Callable[[], str]], str]
"""Number of a part, and what copies it -> its tag."""


@pytest.fixture
def toy_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Copy], tuple[str, bytes, Join]]]:
    """Begin an object of so many parts, which the toy store copies as a function says."""

    def begin(num_parts: int, copy: Copy) -> tuple[str, bytes, Join]:
        copy_part = toy_store.ToyUpload.copy

        def scripted(upload: toy_store.ToyUpload, part: int, source: ObjectInfo, where: tuple[int, int]) -> str:
            return copy(part, lambda: copy_part(upload, part, source, where))

        base, data = f"toy://{uuid.uuid4().hex}", np.random.default_rng(0).bytes(num_parts << 10)
        toy_store.OBJECTS[f"{base}/0"] = 1, data
        monkeypatch.setattr(toy_store.ToyStore, "copied_part", 1 << 10)
        monkeypatch.setattr(toy_store.ToyUpload, "copy", scripted)
        return (
            base,
            data,
            open_join(Location.of(f"{base}/all"), [SourcePiece(open_stored(Location.of(f"{base}/0")), 0, len(data))]),
        )

    with registered_store("toy", toy_store.ToyStore):
        yield begin


def finish(made: Join, uri: str) -> bytes:
    made.fill(lambda _: None)
    made.publish(lambda: None)
    return bytes(read_whole(open_stored(Location.of(f"{uri}/all"))))


def test_a_copy_that_arrived_after_its_time_is_not_sent_again(toy_copies) -> None:
    sent = Counter[int]()

    def copy(part: int, send: Callable[[], str]) -> str:
        sent[part] += 1
        tag = send()
        if part == 2:
            raise SlowCopyError("slow")
        return tag

    base, data, made = toy_copies(3, copy)
    assert finish(made, base) == data
    assert sent == {1: 1, 2: 1, 3: 1}


def test_a_store_that_never_copies_in_time_is_an_error_with_the_way_out(toy_copies) -> None:
    def copy(part: int, send: Callable[[], str]) -> str:
        raise SlowCopyError("toy://0: not copied in 61 s; OPTION allows more")

    before = {*toy_store.UPLOADS}
    _, _, made = toy_copies(1, copy)
    with pytest.raises(SlowCopyError, match=r"^toy://0: .*; OPTION allows more \(5 tries\)"):
        made.fill(lambda _: None)
    assert {*toy_store.UPLOADS} == before


def test_progress_counts_a_part_when_it_is_copied_and_waits_for_no_other(toy_copies) -> None:
    moved = threading.Event()

    def copy(part: int, send: Callable[[], str]) -> str:
        assert part != 1 or moved.wait(100)
        return send()

    _, _, made = toy_copies(3, copy)
    counts: list[int] = []
    made.fill(lambda count: (counts.append(count), moved.set()))
    made.publish(lambda: None)
    assert counts == [1 << 10] * 3


def test_a_copy_without_an_answer_is_ended_on_s3(s3: Bucket) -> None:
    with latency_proxy(s3.server.endpoint, delay_ms=0, only="all") as proxy, proxy.in_environment():
        readers, contents = stored(s3.fresh(), [6 * MIB, 6 * MIB])
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers]
        target = Location.of(uri := f"{s3.fresh()}/all")
        target.store.copy_seconds, target.store.copied_bytes_per_second = 1.0, 1 << 50
        made = open_join(target, pieces)
        proxy.become(script=["hang"])
        made.fill(lambda _: None)
        made.publish(lambda: None)
        assert bytes(read_whole(open_stored(Location.of(uri)))) == b"".join(contents)
        made = open_join(target, pieces[:1])
        assert isinstance(made, concatenate._CopiedParts)
        made.copy_tries = 1
        proxy.become(script=["hang"])
        option = r"a read_timeout in storage_options\['config_kwargs'\] above that allows more"
        with pytest.raises(SlowCopyError, match=rf"/0: bytes 0 to {6 * MIB} were not copied in 1 s; {option}"):
            unite_or_abandon(made)
    assert unfinished_uploads(uri) == []


def test_an_interrupt_ends_the_copies_in_flight(s3: Bucket) -> None:
    with latency_proxy(s3.server.endpoint, delay_ms=0, only="all") as proxy, proxy.in_environment():
        readers, _ = stored(s3.fresh(), [6 * MIB, 6 * MIB])
        target = Location.of(uri := f"{s3.fresh()}/all")
        target.store.copy_seconds = 100_000.0
        made = open_join(target, [SourcePiece(reader, 0, reader.size) for reader in readers])
        proxy.become(script=["hang"])

        def interrupted(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made.fill(interrupted)
    assert unfinished_uploads(uri) == []
