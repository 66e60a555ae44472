"""Lines of text in the order of their keys: Python's own sort of the same lines."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import Bucket
from helpers.conversion import names_beside
from helpers.shuffle_oracle import new_order, small_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.prepare.text.line_shuffle import shuffle_lines
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.writing.publish import create_object

MEMORY = 512 << 20
LINES = [b'{"id": %d, "text": "%s"}\n' % (n, b"word " * (n * 37 % 50)) for n in range(3000)]
PACK = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}
UNPACK: dict[str, Any] = {
    "jsonl": bytes,
    "jsonl.gz": gzip.decompress,
    "jsonl.zst": lambda data: zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read(),
}


def in_memory(lines: list[bytes], seed: int) -> bytes:
    return b"".join(lines[number] for number in new_order(seed, len(lines)))


def stored(uri: Any) -> bytes:
    return bytes(read_whole(open_object(str(uri), cache=False)))


@pytest.mark.parametrize("form", PACK)
@pytest.mark.parametrize("num_buckets", [1, 7])
def test_lines_of_several_files_stand_in_the_order_of_their_keys(
    form: str, num_buckets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buckets(monkeypatch, num_buckets, round_bytes=5000)
    for number, part in enumerate((LINES[:1000], [], LINES[1000:])):
        (tmp_path / f"{number}.{form}").write_bytes(PACK[form](b"".join(part)))
    done = shuffle_lines([f"{tmp_path}/*.{form}"], tmp_path / f"to/new.{form}", seed=3, memory_bytes=MEMORY)
    assert UNPACK[form]((tmp_path / f"to/new.{form}").read_bytes()) == in_memory(LINES, 3)
    assert (done.num_inputs, done.num_lines, done.num_buckets) == (3, 3000, num_buckets)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=30), max_size=20), st.booleans(), st.integers(1, 5), st.integers(1, 60))
def test_any_bytes_between_newlines_are_a_line(
    tmp_path_factory: Any, lines: list[bytes], ends: bool, num_buckets: int, round_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    lines = [each.replace(b"\n", b"") for each in lines]
    (folder / "in.txt").write_bytes(b"\n".join(lines) + (b"\n" if ends and lines else b""))
    whole = [each + b"\n" for each in (lines if ends or not lines or lines[-1] else lines[:-1])]
    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch, num_buckets, round_bytes, bucket_bytes=40, chunk_bytes=16, extent_bytes=7)
        shuffle_lines([folder / "in.txt"], folder / "new.txt", seed=1, memory_bytes=MEMORY)
    assert (folder / "new.txt").read_bytes() == in_memory(whole, 1)


def test_from_s3_to_s3(s3: Bucket) -> None:
    base = s3.fresh()
    with create_object(Location.of(f"{base}/in.jsonl.gz")) as out:
        out.write(gzip.compress(b"".join(LINES)))
    shuffle_lines([f"{base}/in.jsonl.gz"], f"{base}/new.jsonl", seed=1, memory_bytes=MEMORY)
    assert stored(f"{base}/new.jsonl") == in_memory(LINES, 1)


def test_what_cannot_be_shuffled_leaves_what_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"".join(LINES))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES))[:-9])
    (tmp_path / "long.jsonl").write_bytes(b"x" * (MEMORY // 8 + 1))
    (tmp_path / "new.jsonl").write_bytes(b"before")
    cases = [
        (FormatError, "cut.jsonl.gz", {"inputs": [tmp_path / "cut.jsonl.gz"]}),
        (
            FormatError,
            "found 67,108,865 bytes at byte 0, need at most 67,108,864",
            {"inputs": [tmp_path / "long.jsonl"]},
        ),
        (ConfigError, "which is an input, too; give another", {"target": tmp_path / "in.jsonl"}),
        (ObjectExistsError, "new.jsonl: exists", {"overwrite": False}),
        (ConfigError, "need at least 512 MB", {"memory_bytes": 1 << 20}),
        (
            ConfigError,
            r"No such file or directory\), need a folder",
            {"scratch": str(tmp_path / "nowhere")},
        ),
    ]
    for kind, message, options in cases:
        given: Any = {"inputs": [tmp_path / "in.jsonl"], "target": tmp_path / "new.jsonl", "overwrite": True, **options}
        with pytest.raises(kind, match=message):
            shuffle_lines(**{"seed": 1, "memory_bytes": MEMORY, **given})
    assert (tmp_path / "new.jsonl").read_bytes() == b"before"
    assert names_beside(f"{tmp_path}/new") == ["new.jsonl"]


MEASURED = """
import sys
from binidx.prepare.text.line_shuffle import shuffle_lines
done = shuffle_lines([sys.argv[1]], sys.argv[2], seed=1, memory_bytes=512 << 20)
with open("/proc/self/status") as file:
    print(done.num_buckets, next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


def test_the_process_stays_within_its_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with (tmp_path / "in.jsonl").open("wb") as file:
        for length in rng.integers(0, 2000, 400_000).tolist():
            file.write(b"x" * length + b"\n")
    command = [sys.executable, "-c", MEASURED, tmp_path / "in.jsonl", tmp_path / "new.jsonl"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    num_buckets, peak = map(int, told.split())
    assert num_buckets > 2
    assert peak * 1024 < 320 << 20
