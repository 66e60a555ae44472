"""Documents by where they came from: the way back from their origins."""

from pathlib import Path

import pytest
from helpers.lineage_data import build_with_lineage, read_lineage

from binidx.corpus.lineage import lineage_writer
from binidx.errors import ObjectNotFoundError
from binidx.format.sidecars.lineage import documents_at, documents_with_id
from binidx.storage.location import Location

COUNT = 90


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage_writer, "GROUP_ROWS", 20)
        return build_with_lineage(tmp_path_factory.mktemp("origins") / "en", COUNT, 1)


def test_each_document_is_found_by_its_row_and_by_its_id(source: str) -> None:
    rows = read_lineage(source)
    for row in rows[::7]:
        needed = [n for n, other in enumerate(rows) if (other["source"], other["row"]) == (row["source"], row["row"])]
        assert documents_at(Location.of(source), row["source"], row["row"]) == needed
        assert documents_at(Location.of(source), row["source"].rpartition("/")[2], row["row"]) == needed
        if row["id"] is not None:
            assert documents_with_id(Location.of(source), row["id"]) == [
                n for n, each in enumerate(rows) if each["id"] == row["id"]
            ]


def test_what_is_not_there_is_not_found(source: str, tmp_path: Path) -> None:
    assert documents_with_id(Location.of(source), "no such id") == []
    assert documents_at(Location.of(source), "no such file", 0) == []
    assert documents_at(Location.of(source), read_lineage(source)[0]["source"], 10**9) == []
    with pytest.raises(ObjectNotFoundError, match="not found; binidx preprocess writes it beside a dataset"):
        documents_with_id(Location.of(str(tmp_path / "en")), "a")
