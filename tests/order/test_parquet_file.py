"""Parquet that we write, read by pyarrow and DuckDB."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from binidx.errors import ConfigError
from binidx.order.arrow import pa, parquet
from binidx.order.parquet_file import ParquetFile

CODECS = {"a": "lz4_raw", "b": "zstd", "lists.list.element": "zstd", "structs.list.element.y": "lz4_raw"}
NUMBERS = (pa.int16(), pa.int32(), pa.int64(), pa.uint16(), pa.uint32())


def lists(bounds: Any, values: Any) -> Any:
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values, type=kind)


def random_table(seed: int) -> Any:
    """Numbers of all kinds, strings by number, lists of numbers and of structs; of some seeds with empty lists."""
    random = np.random.default_rng(seed)
    count = int(random.choice([1, 8, 100, 3000]))
    bounds = np.cumsum(np.append(0, random.integers(seed % 2, 9, count)))

    def numbers(kind: Any, size: int) -> Any:
        least, most = np.iinfo(kind.to_pandas_dtype()).min, np.iinfo(kind.to_pandas_dtype()).max
        return pa.array(random.integers(least, most, size, kind.to_pandas_dtype(), endpoint=True), kind)

    names = pa.array([f"s3://ö/{number}" for number in range(int(random.choice([1, 3, 400])))])
    which = pa.array(random.integers(0, len(names), count), pa.int16())
    parts = [pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.int32(), nullable=False)]
    structs = pa.StructArray.from_arrays([numbers(part.type, int(bounds[-1])) for part in parts], fields=parts)
    columns = {name: numbers(kind, count) for name, kind in zip("abcde", NUMBERS, strict=True)}
    columns["source"] = pa.DictionaryArray.from_arrays(which, names)
    columns["lists"] = lists(bounds, numbers(NUMBERS[seed % 5], int(bounds[-1])))
    columns["structs"] = lists(bounds, structs)
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def write(path: Path, tables: list[Any]) -> Path:
    with path.open("wb") as out:
        file = ParquetFile(out, tables[0].schema, {"whose": "ours"}, CODECS, ranged=("a", "c"))
        for table in tables:
            file.write_table(table)
        file.close()
    return path


@pytest.mark.parametrize("seed", range(24))
def test_pyarrow_and_duckdb_read_what_was_written(seed: int, tmp_path: Path) -> None:
    whole = random_table(seed)
    tables = [whole, whole.slice(len(whole) // 3, 50), whole.slice(0, 0), pa.concat_tables([whole, whole])]
    path, needed = write(tmp_path / "it.parquet", tables), pa.concat_tables(tables)
    found = parquet.read_table(path)
    assert found.schema.equals(needed.schema.with_metadata({"whose": "ours"}), check_metadata=True)
    assert found.to_pylist() == needed.to_pylist()
    assert duckdb.sql(f"select * from '{path}'").to_arrow_table().to_pylist() == needed.to_pylist()
    assert duckdb.sql(f"select sum(len(lists)) from '{path}'").fetchall() == [
        (len(needed["lists"].combine_chunks().flatten()),)
    ]


def test_each_table_is_a_row_group_that_tells_its_range(tmp_path: Path) -> None:
    tables = [random_table(seed) for seed in (1, 3)]
    tables = [table.select(["a", "b", "c"]) for table in tables]
    file = parquet.ParquetFile(write(tmp_path / "it.parquet", tables))
    assert file.metadata.num_row_groups == 2
    for group, table in enumerate(tables):
        told = [file.metadata.row_group(group).column(number).statistics for number in range(3)]
        for place, name in ((0, "a"), (2, "c")):
            values = table[name].to_pylist()
            assert (told[place].min, told[place].max, told[place].null_count) == (min(values), max(values), 0)
        assert told[1] is None


def test_no_rows_are_a_file(tmp_path: Path) -> None:
    empty = random_table(1).slice(0, 0)
    assert parquet.read_table(write(tmp_path / "it.parquet", [empty])).equals(empty)


def test_a_page_that_its_header_cannot_count_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binidx.order.parquet_file.MOST_PAGE_BYTES", 100)
    with pytest.raises(ConfigError, match="bytes of one column in a row group, it takes 100"):
        write(tmp_path / "it.parquet", [pa.concat_tables([random_table(1)] * 50)])
