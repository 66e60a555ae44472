"""The server of the sweep: the bytes of a file by ranges, no earlier than asked, many at once."""

from __future__ import annotations

import time
from pathlib import Path

from servers.far_object import far_object

from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import find_object

DATA = bytes(range(256)) * 1024
DELAY_MS = 150


def test_ranges_come_from_afar_and_at_once(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(DATA)
    ranges = [(start, start + 1000) for start in range(0, 200_000, 10_000)]
    settings = {"max_gap": 0, "concurrency": len(ranges)}
    with far_object(tmp_path / "object", delay_ms=DELAY_MS) as endpoint:
        options = {"endpoint_url": endpoint, "key": "any", "secret": "any", "binidx": settings}
        reader = open_object("s3://any/object", storage_options=options, cache=False)
        assert reader.size == len(DATA)
        reader.read(ranges)
        began = time.perf_counter()
        views = reader.read(ranges)
        elapsed = time.perf_counter() - began
    assert [bytes(view) for view in views] == [DATA[start:stop] for start, stop in ranges]
    assert DELAY_MS / 1e3 <= elapsed < len(ranges) * DELAY_MS / 1e3


def test_a_folder_is_a_bucket_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "object").write_bytes(DATA)
    with far_object(tmp_path, delay_ms=1) as endpoint:
        options = {"endpoint_url": endpoint, "key": "any", "secret": "any"}
        reader = open_object("s3://any/deep/object", storage_options=options, cache=False)
        assert [bytes(view) for view in reader.read([(3, 2000)])] == [DATA[3:2000]]
        assert find_object(Location.of("s3://any/other", options)) is None
