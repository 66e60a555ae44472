"""Where single documents came from: the rows asked for, and of the sidecar only the row groups that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.lineage_data import END, build_with_lineage, read_lineage
from hypothesis import given, settings
from hypothesis import strategies as st
from servers.latency_proxy import latency_proxy

from binidx.corpus.lineage import lineage_writer
from binidx.errors import FormatError
from binidx.format.sidecars.lineage import origin_text, read_origins
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

COUNT = 90


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage_writer, "GROUP_ROWS", 20)
        return build_with_lineage(tmp_path_factory.mktemp("origins") / "en", COUNT, 1)


@settings(max_examples=30)
@given(documents=st.lists(st.integers(0, COUNT - 1)))
def test_each_document_has_its_row(source: str, documents: list[int]) -> None:
    rows = read_lineage(source)
    assert read_origins(Location.of(source), documents) == {number: rows[number] for number in documents}


def test_a_document_that_is_not_there_and_a_dataset_without_lineage(source: str) -> None:
    with pytest.raises(FormatError, match=r"lineage.parquet: 90 rows, needed one for document 90"):
        read_origins(Location.of(source), [3, COUNT])
    assert read_origins(Location.of(source + "-other"), [3]) == {}


def test_it_reads_well() -> None:
    origin = {"source": "s3://text/a.jsonl", "row": 1700, "byte": 20_340, "id": "a1", "hash": 5}
    assert origin_text(origin) == 's3://text/a.jsonl row 1,700, byte 20,340, id "a1"'
    assert origin_text({**origin, "byte": None, "id": None}) == "s3://text/a.jsonl row 1,700"


def test_only_the_row_groups_that_hold_them_are_read(s3: Bucket, tmp_path: Path) -> None:
    count, rng = 1_000_000, np.random.default_rng(0)
    writer = lineage_writer.LineageWriter(Location.of(f"{tmp_path}/en{END}"))
    hashes = rng.integers(0, 2**63, count).astype(np.uint64)
    writer.write(
        lineage_writer.build_lineage_table(["a"], np.zeros(count, np.int32), np.arange(count), None, None, hashes)
    )
    writer.publish()
    uri, size = f"{s3.fresh()}/en", Path(f"{tmp_path}/en{END}").stat().st_size
    with create_object(Location.of(uri + END)) as out:
        out.write(Path(f"{tmp_path}/en{END}").read_bytes())
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        before = proxy.counts()
        found = read_origins(Location.of(uri), [600_000, 600_001])
        moved = (proxy.counts() - before).bytes
    assert [found[number]["hash"] for number in (600_000, 600_001)] == hashes[600_000:600_002].tolist()
    assert moved < size / 2
