"""Records that went through an exchange, against the same records grouped by NumPy."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket

import binidx.corpus.exchange as module
from binidx.corpus import shuffle, shuffle_buckets
from binidx.corpus.exchange import ExchangeWriter, exchange_file, list_blocks, read_bucket
from binidx.corpus.shuffle_buckets import BucketRecords
from binidx.errors import FormatError
from binidx.storage.location import Location

ROW = np.dtype([("key", "<u4"), ("num_bytes", "<u4", (1,))])
NUM_BUCKETS = 5


def write_tasks(folder: Location, rng: np.random.Generator) -> tuple[dict, list[tuple[int, int, bytes]]]:
    """Write a few objects; return their results, and (bucket, key, data) of every record in the order of writing."""
    results, records = {}, []
    for task in range(int(rng.integers(1, 4))):
        with closing(ExchangeWriter(NUM_BUCKETS, ROW)) as writer:
            for _ in range(int(rng.integers(0, 6))):
                count = int(rng.integers(0, 9))
                rows, buckets = np.zeros(count, ROW), rng.integers(0, NUM_BUCKETS - 1, count)  # the last stays empty
                rows["key"], rows["num_bytes"] = rng.integers(0, 100, count), rng.integers(0, 50, (count, 1))
                data = rng.integers(0, 256, 60, np.uint8)
                starts = rng.integers(0, 10, count)
                stops = starts + rows["num_bytes"][:, 0]
                bounds = np.column_stack([starts, stops]).reshape(-1)
                writer.add_rows(buckets, rows, [(data, bounds)], np.arange(0, 2 * count, 2))
                for bucket, key, start, stop in zip(buckets, rows["key"].tolist(), starts, stops, strict=True):
                    records.append((bucket, key, data[start:stop].tobytes()))
            results[f"task-{task}"] = writer.publish(exchange_file(folder, f"task-{task}"))
    return results, records


def read_all(folder: Location, results: dict) -> list[BucketRecords]:
    return [read_bucket(folder, blocks, ROW) for blocks in list_blocks(results, NUM_BUCKETS)]


def contents(found: BucketRecords, order: np.ndarray) -> list[tuple[int, bytes]]:
    """Return (key, data) of the records in this order."""
    data, done, contents = b"".join(bytes(piece) for _, (pieces,) in found.sorted(order) for piece in pieces), 0, []
    for key, (size,) in found.rows[order].tolist():
        contents.append((key, data[done : done + size]))
        done += size
    return contents


@pytest.mark.parametrize("memory_bytes", [1 << 30, 100])
@pytest.mark.parametrize("seed", range(10))
def test_a_bucket_holds_its_records_in_their_order(
    seed: int, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("HELD_BYTES", memory_bytes), ("PIECE_BYTES", 64), ("ROUND_BYTES", 100)):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(shuffle_buckets, "BUCKET_CHUNK_BYTES", 64)
    monkeypatch.setattr(shuffle_buckets, "BUCKET_EXTENT_BYTES", 48)
    folder = Location(f"{tmp_path}/exchange")
    results, records = write_tasks(folder, np.random.default_rng(seed))
    for bucket, blocks in enumerate(list_blocks(results, NUM_BUCKETS)):
        found = read_bucket(folder, blocks, ROW)
        needed = [(key, data) for number, key, data in records if number == bucket]
        order = np.random.default_rng(seed).permutation(len(needed))
        assert contents(found, order) == [needed[place] for place in order]


def test_objects_in_a_store_are_read_without_a_head(s3: Bucket) -> None:
    folder = Location(s3.fresh()) / "exchange"
    results, records = write_tasks(folder, np.random.default_rng(3))
    keys = [found.rows["key"].tolist() for found in read_all(folder, results)]
    assert keys == [[key for bucket, key, _ in records if bucket == number] for number in range(NUM_BUCKETS)]


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    folder = Location(str(tmp_path))
    results, _ = write_tasks(folder, np.random.default_rng(1))
    file = next(tmp_path.glob("*.exchange"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"task-0.exchange: damaged; delete it and the .json beside it"):
        read_all(folder, results)


@pytest.mark.parametrize("num_buckets", [1, 127, 128, 129, 500])
def test_a_task_of_a_shuffle_holds_a_piece_for_each_bucket(num_buckets: int) -> None:
    """Tasks grow with the number of buckets, so that no block of a bucket is small."""
    target: Any = None
    job = shuffle._ShuffleParts(target, [], [(10**6, num_buckets * shuffle.BUCKET_BYTES)], "uint16", False, 1, None)
    tasks = job.document_tasks()
    assert job.num_buckets == num_buckets
    assert len(tasks) == min(num_buckets, module.HELD_BYTES // module.PIECE_BYTES)
    assert all(task.size >= num_buckets * module.PIECE_BYTES for task in tasks)
    assert [task.rows.start for task in tasks[1:]] == [task.rows.stop for task in tasks[:-1]]
