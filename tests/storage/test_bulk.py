"""Large ranges by threads: the reader's bytes, whatever the weather, and the reader's errors."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.proxied_store import distant_store

from binidx.errors import ObjectChangedError
from binidx.storage import bulk
from binidx.storage.backends import open_stored
from binidx.storage.bulk import BulkReader
from binidx.storage.ranges import cut
from binidx.testing import ended_well, forked

DATA = random.Random(0).randbytes(700_001)
RANGES = cut((0, len(DATA)), 100_000)
FAULTS = [
    "429",
    "500",
    "503",
    "404",
    "reset",
    "close",
    "hang",
    "reset-late",
    "truncate",
    "stall",
    "short",
    "long",
    "whole",
]


@pytest.mark.parametrize("transport", ["s3 fast", "s3", "gs fast", "http fast"])
def test_ranges_are_the_readers_in_one_request_each(
    request: pytest.FixtureRequest, tmp_path: Path, transport: str
) -> None:
    with distant_store(transport, request, tmp_path, delay_ms=5) as far:
        reader = open_stored(far.put("a", DATA), storage_options=far.options(hedge=False))
        before, asked = far.proxy.counts(), reader.stats.requests
        with ThreadPoolExecutor(4) as threads:
            assert b"".join(threads.map(BulkReader(reader).read, RANGES)) == DATA
        assert (far.proxy.counts() - before).requests == len(RANGES) == reader.stats.requests - asked
        assert reader.stats.bytes_moved == len(DATA)


@pytest.mark.parametrize("transport", ["s3 fast", "gs fast"])
def test_what_comes_wrong_is_asked_for_again_by_the_reader(
    request: pytest.FixtureRequest, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "STALL_SECONDS", 1)
    with distant_store(transport, request, tmp_path, delay_ms=0) as far:
        options = far.options(hedge=False)
        uri = far.put("a", DATA)
        for fault in FAULTS:
            far.proxy.become(each=[fault])
            found = BulkReader(open_stored(uri, storage_options=options))
            assert bytes(found.read((100_000, 300_000))) == DATA[100_000:300_000], fault
            assert far.proxy.counts().faults[fault] >= 1


def test_an_object_that_fails_again_and_again_is_left_to_its_reader(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0, each=["503"]) as far:
        found = BulkReader(open_stored(far.put("a", DATA), storage_options=far.options(hedge=False)))
        far.proxy.reset()
        assert b"".join(map(found.read, RANGES)) == DATA
        first = [each.status for each in far.proxy.log()]
    # Three are asked for here, then by the reader; at the others the reader meets the fault, and asks again.
    assert first.count(503) == len(RANGES)


def test_an_object_that_was_replaced_is_an_error(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        found = BulkReader(open_stored(far.put("a", DATA), storage_options=far.options()))
        assert bytes(found.read(RANGES[0])) == DATA[:100_000]
        far.put("a", DATA[::-1])
        with pytest.raises(ObjectChangedError):
            found.read(RANGES[1])


def test_a_forked_child_has_connections_of_its_own(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        found = BulkReader(open_stored(far.put("a", DATA), storage_options=far.options(hedge=False)))
        far.proxy.reset()
        assert bytes(found.read(RANGES[0])) == DATA[:100_000]

        def child() -> None:
            assert bytes(found.read(RANGES[1])) == DATA[100_000:200_000]

        assert ended_well(forked(child))
        assert bytes(found.read(RANGES[2])) == DATA[200_000:300_000]
        by_range = {each.range: each.connection for each in far.proxy.log()}
    assert len(by_range) == 3
    assert list(by_range.values()).count(by_range["bytes=100000-199999"]) == 1
