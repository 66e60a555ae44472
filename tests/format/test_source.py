"""A pair of files as a source: what is read is what was looked at, and nothing is looked at twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.proxied_store import distant_store
from servers.http_objects import http_objects

from binidx.errors import ObjectChangedError, ObjectNotFoundError
from binidx.format.source import PairSource
from binidx.storage.location import Location


@pytest.mark.parametrize("end", ["bin", "idx"])
@pytest.mark.parametrize("store", ["s3", "s3 fast", "gs fast", "http fast"])
def test_what_is_read_is_what_was_looked_at(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, end: str
) -> None:
    with distant_store(store, request, tmp_path, delay_ms=0) as far:
        uris = {each: far.put(f"en.{each}", each.encode() * 10) for each in ("bin", "idx")}
        source = PairSource(Location.of(f"{far.base}/en", far.options()))
        open_it = {"bin": source.open_stored, "idx": source.open_idx}[end]
        far.proxy.reset()
        assert bytes(open_it().read([(0, 30)])[0]) == end.encode() * 10
        assert [each.method for each in far.proxy.log()] == ["GET"]
        source.check_unchanged()

        far.put(f"en.{end}", b"new" * 10)
        with pytest.raises(ObjectChangedError, match=f"{uris[end]}: changed since it was opened"):
            open_it().read([(0, 30)])
        with pytest.raises(ObjectChangedError, match=r"changed since it was opened \(.*\); run it again"):
            source.check_unchanged()


def test_what_has_gone_is_named() -> None:
    with http_objects({"/en.bin": bytes(30), "/en.idx": bytes(30)}) as server:
        source = PairSource(Location.of(f"{server.endpoint}/en"))
        del server.objects["/en.bin"]
        with pytest.raises(ObjectNotFoundError, match=r"en\.bin: no such object"):
            source.open_stored().read([(0, 30)])


def test_a_weak_etag_pins_nothing_so_it_is_looked_at_again() -> None:
    with http_objects({"/en.bin": bytes(30), "/en.idx": bytes(30)}) as server:
        server.etag = lambda data: f'W/"{len(data)}"'
        source = PairSource(Location.of(f"{server.endpoint}/en"))
        server.objects["/en.bin"] = bytes(33)
        assert source.open_stored().size == 33
        with pytest.raises(ObjectChangedError, match=r"changed since it was opened \(.*\); run it again"):
            source.check_unchanged()
