"""LITPKDS files: what lit-gpt writes, read block by block from anywhere, and nothing taken on trust."""

import pickle
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.packed.packed_files import (
    PACKED_DTYPES,
    PACKED_HEADER,
    PackedDatasetBuilder,
    PackedFiles,
    PackedHeader,
    format_packed_header,
    parse_packed_header,
    read_blocks,
)
from binidx.storage.interfaces import Range
from binidx.testing import MemoryObject


def model_files(documents: list[np.ndarray], chunk_size: int, sep: int, dtype: str) -> list[bytes]:
    """The stream cut into files, the last filled up; a file that is exactly full waits for more to come."""
    stream = np.concatenate(documents) if documents else np.empty(0, dtype)
    count = max(1, -(-len(stream) // chunk_size))
    filled = np.full(count * chunk_size, sep, dtype)
    filled[: len(stream)] = stream
    code = next(code for code, stored in PACKED_DTYPES.items() if np.dtype(stored) == np.dtype(dtype))
    head = b"LITPKDS" + struct.pack("<QBQ", 1, code, chunk_size)
    return [head + filled[n * chunk_size : (n + 1) * chunk_size].tobytes() for n in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_files_are_the_stream_cut_and_filled(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    dtype, chunk_size = str(rng.choice(["<u2", "<i4"])), int(rng.integers(1, 50))
    documents = [rng.integers(0, 60_000, rng.integers(0, 90)).astype(dtype) for _ in range(int(rng.integers(0, 9)))]
    builder = PackedDatasetBuilder(str(tmp_path), "train", chunk_size, 3, dtype)
    for document in documents:
        builder.add_array(document)
    builder.write_reminder()
    assert [Path(name).name for name in builder.filenames][:2] == ["train_0000000000.bin", "train_0000000001.bin"][
        : len(builder.filenames)
    ]
    assert [Path(name).read_bytes() for name in builder.filenames] == model_files(documents, chunk_size, 3, dtype)


def write(directory: str, chunks: np.ndarray, options: dict | None = None) -> list[str]:
    builder = PackedDatasetBuilder(directory, "t", chunks.shape[1], 0, chunks.dtype, storage_options=options)
    builder.add_array(chunks.reshape(-1))
    builder.write_reminder()
    return builder.filenames


def check_blocks(files: PackedFiles, chunks: np.ndarray) -> None:
    choose = np.random.default_rng(1)
    wanted_files, blocks = choose.integers(0, len(chunks), 60), choose.integers(0, files.num_blocks, 60)
    needed = [
        chunks[file, block * files.block_size : (block + 1) * files.block_size]
        for file, block in zip(wanted_files, blocks, strict=True)
    ]
    assert (files.read(wanted_files.tolist(), blocks.tolist()) == np.stack(needed)).all()


def test_blocks_are_slices_of_their_files(tmp_path: Path) -> None:
    chunks = np.random.default_rng(0).integers(0, 2**16, (7, 103)).astype("<u2")
    files = PackedFiles(write(str(tmp_path), chunks), 10)
    assert (files.num_blocks, files.header) == (10, PackedHeader(np.dtype("<u2"), 103))
    check_blocks(files, chunks)
    check_blocks(pickle.loads(pickle.dumps(files)), chunks)
    assert files.read([], []).shape == (0, 10)


def test_blocks_come_from_a_bucket_as_from_a_disk(s3: Bucket) -> None:
    chunks = np.random.default_rng(0).integers(0, 2**31, (5, 64)).astype("<i4")
    check_blocks(PackedFiles(write(f"{s3.uri}/packed", chunks), 17), chunks)


class Meeting(MemoryObject):
    """Object whose reads return when those of all other ones have begun."""

    barrier = threading.Barrier(3, timeout=300)

    def read(self, ranges: list[Range]) -> list[memoryview]:
        self.barrier.wait()
        return super().read(ranges)


def test_blocks_of_all_sets_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = []
    for name, dtype in (("a", "<u2"), ("b", "<u2"), ("c", "<i4")):
        chunks = np.random.default_rng(len(name)).integers(0, 2**16, (1, 40)).astype(dtype)
        sets.append((PackedFiles(write(f"{tmp_path}/{name}", chunks), 10), chunks))
    files = [packed for packed, _ in sets]
    blocks = np.array([(2, 0, 1, 7), (0, 0, 3, 7), (1, 0, 0, 7), (0, 0, 2, 7), (2, 0, 0, 7)], np.int64)
    needed = [sets[number][1][file, 10 * block : 10 * block + 10] for number, file, block, _ in blocks.tolist()]
    for packed in files:
        (uri,) = packed.uris
        monkeypatch.setitem(packed._opened, 0, Meeting(Path(uri).read_bytes(), uri))
    assert read_blocks(files, blocks).tolist() == np.stack(needed).tolist()


def test_auto_dtype_changes_at_65500() -> None:
    assert PackedDatasetBuilder("memory://p", "t", 1, 0, vocab_size=65_499).dtype == np.uint16
    assert PackedDatasetBuilder("memory://p", "t", 1, 0, vocab_size=65_500).dtype == np.int32
    with pytest.raises(ConfigError, match="vocab_size"):
        PackedDatasetBuilder("memory://p", "t", 1, 0)


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    builder = PackedDatasetBuilder(str(tmp_path), "t", 4, 0, np.uint16)
    with pytest.raises(ConfigError, match="tokens from 5 to 65536, uint16 holds 0 to 65535"):
        builder.add_array(np.array([5, 65_536]))
    with pytest.raises(ConfigError, match="complex128"):
        PackedDatasetBuilder(str(tmp_path), "t", 4, 0, np.complex128)


@pytest.mark.parametrize("code", list(PACKED_DTYPES))
def test_headers_survive_the_way_there_and_back(code: int) -> None:
    header = PackedHeader(np.dtype(PACKED_DTYPES[code]), 12_345)
    data = format_packed_header(header)
    assert data[15] == code
    assert parse_packed_header(data, uri="x") == header


GOOD = PACKED_HEADER.pack(b"LITPKDS", 1, 8, 4) + bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, a LITPKDS header needs 24"),
        (GOOD[:20], "20 bytes, a LITPKDS header needs 24"),
        (b"MMIDIDX" + GOOD[7:], "begins with b'MMIDIDX'"),
        (PACKED_HEADER.pack(b"LITPKDS", 2, 8, 4) + bytes(8), "version 2"),
        (PACKED_HEADER.pack(b"LITPKDS", 1, 9, 4) + bytes(8), "dtype code 9"),
        (GOOD[:-1], "31 bytes, its header needs 32"),
        (GOOD + b"x", "33 bytes, its header needs 32"),
        (PACKED_HEADER.pack(b"LITPKDS", 1, 8, 2**63) + bytes(8), "its header needs"),
        (PACKED_HEADER.pack(b"LITPKDS", 1, 4, 2) + bytes(8), "the first file of the set has"),
    ],
)
def test_a_hostile_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(GOOD)
    second.write_bytes(content)
    with pytest.raises(FormatError, match=message) as raised:
        PackedFiles([str(first), str(second)], 2).read([0, 1], [0, 0])
    assert str(second) in str(raised.value)


def test_blocks_outside_and_files_missing_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD)
    with pytest.raises(IndexError, match="block 2, each file has 2"):
        PackedFiles([str(path)], 2).read([0], [2])
    with pytest.raises(ConfigError, match="has 4 tokens, blocks of 5"):
        PackedFiles([str(path)], 5)
    with pytest.raises(ObjectNotFoundError):
        PackedFiles([str(path), str(tmp_path / "b.bin")], 2).read([1], [0])
