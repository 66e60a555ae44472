"""Text is read where it lies: the same documents from every store, ahead of who uses them, and from one content."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from helpers.proxied_store import TRANSPORTS, counts_in_flight, distant_store
from helpers.reader_stacks import STORES, Shelf
from helpers.text_oracle import read_all, read_file

from binidx.errors import ObjectChangedError
from binidx.prepare.text import parquet_reader
from binidx.prepare.text import read as reading
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import plan_slices
from binidx.storage.location import Location

RNG = random.Random(0)
TEXTS = [RNG.randbytes(RNG.randrange(400)).hex() for _ in range(800)]
LINES = b"".join(json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(TEXTS))


def as_parquet() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), out, row_group_size=300)
    return out.getvalue()


STORED = {
    "jsonl": LINES,
    "jsonl.gz": gzip.compress(LINES),
    "jsonl.zst": zstandard.compress(LINES[:70_000]) + zstandard.compress(LINES[70_000:]),
    "parquet": as_parquet(),
}


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`small_requests(size)`: fetch so many bytes by a request, and 1,000 for the end of the last line."""

    def arrange(size: int) -> None:
        monkeypatch.setattr(reading, "REQUEST_BYTES", size)
        monkeypatch.setattr(parquet_reader, "FETCH_BYTES", size)
        monkeypatch.setattr(reading, "LINE_BYTES", 1000)

    return arrange


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("suffix", STORED)
def test_every_store_gives_the_same_documents(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, suffix: str, small_requests: Callable[[int], None]
) -> None:
    small_requests(10_000)
    shelf = Shelf(STORES[store], request, tmp_path)
    uri = shelf.put(STORED[suffix], f"a.{suffix}")
    options = shelf.store.options
    found = read_file(uri, part_bytes=30_000, id_key="id", batch_bytes=20_000, storage_options=options)
    assert found.texts == [[text] for text in TEXTS]
    assert found.ids == list(map(str, range(len(TEXTS))))
    assert not found.problems


@pytest.mark.parametrize("transport", [each for each in TRANSPORTS if each.endswith("fast")])
@pytest.mark.parametrize("suffix", STORED)
def test_an_object_that_changed_is_not_read(
    request: pytest.FixtureRequest, tmp_path: Path, transport: str, suffix: str
) -> None:
    shelf = Shelf(STORES[transport], request, tmp_path)
    uri = shelf.put(STORED[suffix], f"a.{suffix}")
    plan = plan_slices(find_inputs(uri, storage_options=shelf.store.options), 1 << 30)
    if shelf.web is None:
        from binidx.storage.writing.publish import delete_object

        delete_object(Location.of(uri))
    shelf.put(STORED[suffix][:-1] + b"\n\n", f"a.{suffix}")
    with pytest.raises(ObjectChangedError, match=f"a.{suffix}: changed since it was planned"):
        read_all(plan, storage_options=shelf.store.options)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_slice_is_fetched_by_many_requests_at_once_and_once(
    request: pytest.FixtureRequest, tmp_path: Path, suffix: str, small_requests: Callable[[int], None]
) -> None:
    small_requests(20_000)
    data = STORED[suffix]
    found: list[Any] = []
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri, options = far.put(f"a.{suffix}", data), far.options(hedge=False)
        plan = plan_slices(find_inputs(uri, storage_options=options), 1 << 30)
        enough = reading.BLOCKS_IN_FLIGHT - 1
        moved = counts_in_flight(far.proxy, enough, lambda: found.append(read_all(plan, storage_options=options)))
    assert len(found[-1].texts) == len(TEXTS)
    assert moved.most_at_once >= enough
    # Beside the column: its footer. Blocks end where row groups do.
    assert moved.bytes <= len(data) * 1.05 + (66_000 if suffix == "parquet" else 0)
    assert moved.requests <= len(data) / 20_000 + 7


def test_only_the_columns_that_are_wanted_are_fetched(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    rng, out = random.Random(1), io.BytesIO()
    table: dict[str, Any] = {name: [rng.randbytes(500).hex() for _ in range(2000)] for name in ("a", "text", "z")}
    parquet.write_table(pa.table(table), out, compression="none", use_dictionary=False)
    with distant_store("s3 fast", request, tmp_path, delay_ms=5) as far:
        uri, options = far.put("a.parquet", out.getvalue()), far.options(hedge=False)
        before = far.proxy.counts()
        assert len(read_file(uri, storage_options=options).texts) == 2000
        moved = far.proxy.counts() - before
    assert moved.bytes < len(out.getvalue()) * 0.4 + 200_000


def test_a_slice_moves_its_own_bytes_and_the_end_of_its_last_line(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=5) as far:
        uri, options = far.put("a.jsonl", LINES), far.options(hedge=False)
        plan = plan_slices(find_inputs(uri, storage_options=options), 100_000)
        before = far.proxy.counts()
        read_all(plan[1:2], storage_options=options)
        moved = far.proxy.counts() - before
    assert moved.bytes <= 100_000 + reading.LINE_BYTES + 2000
    assert moved.requests == 1  # the plan knows the object


def test_inputs_are_found_by_one_question_each_and_many_at_once(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found: list[Any] = []
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uris, options = [far.put(f"{number}.jsonl", b"{}") for number in range(20)], far.options(hedge=False)
        moved = counts_in_flight(far.proxy, 8, lambda: found.append(find_inputs(uris, storage_options=options)))
    assert [each.uri for each in found[-1]] == uris
    assert moved.requests == 20
    assert moved.most_at_once >= 8


@pytest.mark.parametrize("suffix", STORED)
def test_a_store_that_fails_now_and_then_gives_the_same_documents(
    request: pytest.FixtureRequest, tmp_path: Path, suffix: str, small_requests: Callable[[int], None]
) -> None:
    small_requests(20_000)
    with distant_store("s3 fast", request, tmp_path, delay_ms=1) as far:
        uri, options = far.put(f"a.{suffix}", STORED[suffix]), far.options(hedge=False)
        plan = plan_slices(find_inputs(uri, storage_options=options), 50_000)
        far.proxy.become(each=["503", "reset"])
        found = read_all(plan, storage_options=options)
    assert found.texts == [[text] for text in TEXTS]
