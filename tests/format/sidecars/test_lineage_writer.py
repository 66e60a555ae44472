"""The writer of a lineage file fills its row groups, whatever the sizes of the tables that it gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from binidx.corpus.lineage import lineage_writer
from binidx.storage.location import Location


def test_row_groups_are_full_but_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_writer, "GROUP_ROWS", 20)
    writer = lineage_writer.LineageWriter(Location.of(tmp_path / "en.lineage.parquet"))
    for first, stop in ((0, 15), (15, 15), (15, 30), (30, 95)):
        rows = np.arange(first, stop)
        writer.write(lineage_writer.build_lineage_table(["a"], np.zeros(len(rows), np.int32), rows, None, None, None))
    writer.publish()
    file = parquet.ParquetFile(tmp_path / "en.lineage.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [20, 20, 20, 20, 15]
    assert file.read().column("row").to_pylist() == list(range(95))
