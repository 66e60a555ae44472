"""Reading documents' text: MB of jsonl a CPU-second, to one UTF-8 buffer and its offsets, by format.

    ours      read_slice over all slices of a local file
    theirs    the plain Python way to the same buffer: json.loads or pyarrow's lists, after gzip, zstandard or pyarrow

The MB are those of the plain jsonl for every format, so that they compare. The text is that of `tests.bench.text`.
The goal: reading takes at most 1.3 ms a MB of plain jsonl, 770 MB/s.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import zstandard

from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import plan_slices
from tests.bench.table import Conditions, Row, interleaved_medians
from tests.bench.text import documents, joined

CONDITIONS = Conditions(cores=1, size="64 MiB of jsonl", cached="the files in the page cache")
JSONL_BYTES = 64 << 20
PART_BYTES = 16 << 20
ROUNDS = 5


def rows(directory: Path) -> list[Row]:
    _, texts = documents()
    lines = corpus(list(joined(texts)))
    size = sum(map(len, lines)) / 1e6
    found = []
    for suffix, (write, theirs) in FORMATS.items():
        path = directory / f"text.{suffix}"
        write(path, lines)
        needed = sum(map(len, theirs(path)))
        assert needed == ours(path)
        mine, other = interleaved_medians(
            lambda path=path: ours(path),  # type: ignore[misc]
            lambda path=path, theirs=theirs: sum(map(len, theirs(path))),  # type: ignore[misc]
            rounds=ROUNDS,
            clock=time.process_time,
        )
        row = Row(f"text of .{suffix}", size / mine, size / other, "MB jsonl/CPU-s", True, against="plain Python")
        found.append(row)
    return found


def corpus(texts: list[str]) -> list[bytes]:
    """Lines of documents in a random order, until there are enough of them."""
    lines: list[bytes] = []
    total, rng = 0, random.Random(0)
    while total < JSONL_BYTES:
        rng.shuffle(texts)
        lines += [json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(texts)]
        total += sum(map(len, lines[-len(texts) :]))
    return lines


def ours(path: Path) -> int:
    """Bytes of all texts."""
    slices = plan_slices(find_inputs(str(path)), PART_BYTES)
    return sum(len(batch.texts) for each in slices for (batch,) in read_slice(each))


def texts_of(lines: Iterable[bytes]) -> Iterable[bytes]:
    return (json.loads(line)["text"].encode() for line in lines)


def of_plain(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        yield from texts_of(file)


def of_gzip(path: Path) -> Iterable[bytes]:
    with gzip.open(path) as file:
        yield from texts_of(file)


def of_zstd(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        yield from texts_of(io.BufferedReader(reader, 1 << 20))  # type: ignore[arg-type]


def of_parquet(path: Path) -> Iterable[bytes]:
    for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
        yield from (text.encode() for text in batch.column(0).to_pylist())


def write_zstd(path: Path, lines: list[bytes]) -> None:
    """A window shorter than the text, so that no copy of it helps."""
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=19)
    path.write_bytes(zstandard.ZstdCompressor(compression_params=options).compress(b"".join(lines)))


def write_parquet(path: Path, lines: list[bytes]) -> None:
    table = pa.Table.from_pylist([json.loads(line) for line in lines])
    parquet.write_table(table, path, row_group_size=10_000, use_dictionary=False, compression="zstd")


Write = Callable[[Path, list[bytes]], object]
Read = Callable[[Path], Iterable[bytes]]

FORMATS: dict[str, tuple[Write, Read]] = {
    "jsonl": (lambda path, lines: path.write_bytes(b"".join(lines)), of_plain),
    "jsonl.gz": (lambda path, lines: path.write_bytes(gzip.compress(b"".join(lines), 6)), of_gzip),
    "jsonl.zst": (write_zstd, of_zstd),
    "parquet": (write_parquet, of_parquet),
}
"""suffix -> how the corpus is written, how it is read without us"""
