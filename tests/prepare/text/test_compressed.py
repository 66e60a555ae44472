"""gzip and zstd: whole, in members and frames, damaged, and larger than memory would like."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from helpers.text_oracle import read_file
from isal import isal_zlib

from binidx.errors import FormatError
from binidx.prepare.text import compressed_text
from binidx.prepare.text.compressed_text import decompress_gzip, decompress_zstd
from binidx.prepare.text.slices import Slice

DATA = b"".join(b'{"text": "document %d"}\n' % number for number in range(300))
NAMES = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}
WHOLE = Slice("a", "jsonl.zst", {}, 0, None, 0, 0, 0)

Compress = Callable[[bytes], bytes]


@pytest.fixture(params=["isal", "zlib"], autouse=True)
def inflate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to read gzip."""
    if request.param == "zlib":
        monkeypatch.setattr(compressed_text, "GZIP_LIBRARY", zlib)
    else:
        assert compressed_text.GZIP_LIBRARY is isal_zlib


@pytest.mark.parametrize(("suffix", "compress"), NAMES.items())
@pytest.mark.parametrize("members", [1, 3])
def test_compressed_lines_are_those_that_were_compressed(
    tmp_path: Path, suffix: str, compress: Compress, members: int
) -> None:
    path, size = tmp_path / f"a.{suffix}", len(DATA) // members + 1
    path.write_bytes(b"".join(compress(DATA[at : at + size]) for at in range(0, len(DATA), size)))
    found = read_file(path, batch_bytes=512)
    assert found.texts == [[f"document {number}"] for number in range(300)]
    assert found.rows == list(range(300))
    assert found.positions[17] == DATA.index(b'{"text": "document 17"')
    assert found.num_bytes == path.stat().st_size


@pytest.mark.parametrize(("suffix", "compress"), NAMES.items())
def test_what_is_cut_off_anywhere_is_no_shorter_file(tmp_path: Path, suffix: str, compress: Compress) -> None:
    path = tmp_path / f"a.{suffix}"
    whole = compress(DATA[:1000])
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=f"a.{suffix}: "):
            read_file(path)


@pytest.mark.parametrize(("suffix", "compress"), NAMES.items())
@pytest.mark.parametrize("after", [b"x", b"\x1f\x8b", b"garbage that is longer"])
def test_what_follows_and_is_no_member_is_an_error(
    tmp_path: Path, suffix: str, compress: Compress, after: bytes
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(compress(DATA) + after)
    with pytest.raises(FormatError, match=f"a.{suffix}: "):
        read_file(path)


@pytest.mark.parametrize(("suffix", "compress"), NAMES.items())
def test_a_flipped_bit_is_an_error_or_harmless(tmp_path: Path, suffix: str, compress: Compress) -> None:
    """Harmless: in the names and times of a header. zstd checks what it decoded only where its writer asked for it."""
    path = tmp_path / f"a.{suffix}"
    whole = (
        compress(DATA[:400])
        if suffix == "jsonl.gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress(DATA[:400])
    )
    needed = gzip.compress(b"") and [f"document {number}" for number in range(DATA[:400].count(b"\n"))]
    for byte in range(len(whole)):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        try:
            assert [each[0] for each in read_file(path).texts] == needed
        except FormatError:
            continue


def test_zeros_after_gzip_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(DATA) + bytes(1000))
    assert len(read_file(path).texts) == 300


@pytest.mark.parametrize("suffix", NAMES)
def test_an_empty_file_has_no_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"")
    assert read_file(path).texts == []


@pytest.mark.parametrize(
    ("read", "compress"), [(decompress_gzip, gzip.compress), (decompress_zstd, zstandard.compress)]
)
def test_pieces_are_bounded_whatever_they_were_compressed_from(
    read: Callable[..., Iterator[bytes]], compress: Compress
) -> None:
    packed = compress(b"\n" * (64 << 20))
    tracemalloc.start()
    sizes = [len(piece) for piece in read([packed], WHOLE)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 1 << 20
    assert peak < 8 << 20


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize(
    ("read", "compress"), [(decompress_gzip, gzip.compress), (decompress_zstd, zstandard.compress)]
)
def test_pieces_may_come_in_any_size(read: Callable[..., Iterator[bytes]], compress: Compress, cut: int) -> None:
    packed = compress(DATA[:2000]) + compress(b"") + compress(DATA[2000:])
    assert b"".join(read([packed[at : at + cut] for at in range(0, len(packed), cut)], WHOLE)) == DATA


@pytest.mark.parametrize(
    "options", [{"write_content_size": False}, {"write_checksum": True}, {"level": 19}, {"level": -5}]
)
def test_frames_of_every_kind_are_read(options: dict[str, int]) -> None:
    data = DATA * 200
    packed = zstandard.ZstdCompressor(**options).compress(data)
    streamed = zstandard.ZstdCompressor(**options).compressobj()
    assert b"".join(decompress_zstd([packed], WHOLE)) == data
    assert b"".join(decompress_zstd([streamed.compress(data) + streamed.flush()], WHOLE)) == data
    assert b"".join(decompress_zstd([zstandard.ZstdCompressor(**options).compress(bytes(1 << 20))], WHOLE)) == bytes(
        1 << 20
    )
