"""parse_index: what Megatron writes is read as it is; each broken rule has its own message."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from helpers.oracle import megatron
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import FormatError
from binidx.format import idx
from binidx.format.idx import DType, format_idx_header, open_index, parse_index
from binidx.storage.open import open_object

DTYPES = [np.dtype(kind.name).type for kind in DType]


def idx_bytes(lengths=(3, 0, 2), bounds=(0, 2, 2, 3), pointers=None, modes=(), dtype=np.uint16, header=None):
    """An .idx by hand; every part can be replaced by a wrong one."""
    size = np.dtype(dtype).itemsize
    if pointers is None:
        pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    return b"".join(
        [
            format_idx_header(dtype, len(lengths), len(bounds)) if header is None else header,
            np.array(lengths, "<i4").tobytes(),
            np.array(pointers, "<i8").tobytes(),
            np.array(bounds, "<i8").tobytes(),
            np.array(modes, "i1").tobytes(),
        ]
    )


def raw_header(magic=b"MMIDIDX\0\0", version=1, code=8, sequences=3, bounds=4):
    return struct.pack("<9sQBQQ", magic, version, code, sequences, bounds)


HOSTILE = {
    "empty": (b"", "0 bytes, an .idx header needs 34"),
    "cut in the header": (idx_bytes()[:33], "33 bytes, an .idx header needs 34"),
    "other magic": (
        idx_bytes(header=raw_header(magic=b"MMIDIDX\0\1")),
        r"starts with b'MMIDIDX\\x00\\x01', an .idx needs",
    ),
    "other version": (idx_bytes(header=raw_header(version=2)), "version 2, needed 1"),
    "big-endian version": (idx_bytes(header=raw_header(version=1 << 56)), f"version {1 << 56}, needed 1"),
    "dtype code 0": (idx_bytes(header=raw_header(code=0)), "dtype code 0, needed 1 to 8"),
    "dtype code 9": (idx_bytes(header=raw_header(code=9)), "dtype code 9, needed 1 to 8"),
    "no document bounds": (idx_bytes(bounds=()), "0 document bounds, needed at least the leading 0"),
    "cut in the arrays": (idx_bytes()[:-1], "101 bytes, its header .3 sequences, 4 document bounds. needs 102"),
    "one byte too many": (idx_bytes() + b"\0", "103 bytes, its header .* needs 102, or 105 with modes"),
    "modes and one byte": (idx_bytes(modes=(0, 0, 0, 0)), "106 bytes, its header .* needs 102, or 105 with modes"),
    # 12 S wraps round to the right size in 64-bit arithmetic: (2^62 + 3) * 12 = 36 mod 2^64
    "count that overflows": (
        idx_bytes(header=raw_header(sequences=2**62 + 3)),
        "102 bytes, its header .4611686018427387907",
    ),
    "bounds that overflow": (
        idx_bytes(header=raw_header(bounds=2**61 + 4)),
        "102 bytes, its header .3 sequences, 2305843009213693956",
    ),
    "largest counts": (
        idx_bytes(header=raw_header(sequences=2**64 - 1, bounds=2**64 - 1)),
        "102 bytes, its header .18446744073709551615 sequences",
    ),
    "negative length": (idx_bytes(lengths=(3, -1, 2)), "sequence 1 has length -1, needed 0 or more"),
    "gap": (idx_bytes(pointers=(0, 6, 8)), "sequence 2 starts at byte 8, needed 6"),
    "overlap": (idx_bytes(pointers=(0, 4, 6)), "sequence 1 starts at byte 4, needed 6"),
    "first pointer": (idx_bytes(pointers=(2, 6, 6)), "sequence 0 starts at byte 2, needed 0"),
    "negative pointer": (idx_bytes(pointers=(0, -6, 6)), "sequence 1 starts at byte -6, needed 6"),
    "first bound": (idx_bytes(bounds=(1, 2, 2, 3)), "first document bound is 1, needed 0"),
    "negative bound": (idx_bytes(bounds=(0, -2, 2, 3)), "document bound 1 is -2, needed 0 to 3"),
    "falling bound": (idx_bytes(bounds=(0, 2, 1, 3)), "document bound 2 is 1, needed 2 to 3"),
    "bound past the end": (idx_bytes(bounds=(0, 2, 4, 3)), "document bound 2 is 4, needed 2 to 3"),
    "last bound": (idx_bytes(bounds=(0, 1, 2, 2)), "last document bound is 2, needed 3 .*end_document"),
    "only the leading 0": (idx_bytes(bounds=(0,)), "last document bound is 0, needed 3"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_each_broken_rule_has_its_message(name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(FormatError, match=f"^s3://b/en.idx: {message}"):
        parse_index(data, uri="s3://b/en.idx")


@pytest.mark.parametrize("block", [1, 2, 1 << 18])
@pytest.mark.parametrize("name", HOSTILE)
def test_in_blocks_each_broken_rule_has_the_same_message(name: str, block: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(idx, "BLOCK_VALUES", block)
    data, message = HOSTILE[name]
    (tmp_path / "en.idx").write_bytes(data)
    with pytest.raises(FormatError, match=f"en.idx: {message}"):
        open_index(open_object(tmp_path / "en.idx"), "en.idx").check()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (idx_bytes(), "no modes, multimodal=True needs 3 bytes of them; open it as text"),
        (idx_bytes(modes=(1, 2)), "104 bytes, its header .* and modes need 105"),
        (idx_bytes(modes=(1, 2, 3, 4)), "106 bytes, its header .* and modes need 105"),
    ],
)
def test_a_multimodal_reader_insists_on_modes(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"^x: {message}"):
        parse_index(data, uri="x", multimodal=True)


@given(st.binary(max_size=120))
def test_no_bytes_after_a_header_crash_the_parser(tail: bytes) -> None:
    for data in (tail, raw_header() + tail, raw_header(sequences=1, bounds=2) + tail):
        try:
            index = parse_index(data, uri="x")
        except FormatError:
            continue
        assert len(index) == index.document_indices[-1]


def test_arrays_are_views_of_the_buffer_and_modes_are_passed_over_as_text() -> None:
    data = bytearray(idx_bytes(modes=(1, 0, -2)))
    text, multi = parse_index(data, uri="x"), parse_index(data, uri="x", multimodal=True)
    assert text.sequence_modes is None
    assert multi.sequence_modes.tolist() == [1, 0, -2]
    assert (text.num_tokens, text.num_bytes, len(text), text.document_count) == (5, 10, 3, 4)
    assert np.shares_memory(text.sequence_lengths, np.frombuffer(data, np.uint8))


def test_an_index_of_nothing_is_an_index() -> None:
    index = parse_index(idx_bytes(lengths=(), bounds=(0,)), uri="x", multimodal=True)
    assert (len(index), index.num_tokens, index.document_indices.tolist()) == (0, 0, [0])


def test_the_dtype_table_is_megatrons() -> None:
    theirs = megatron.indexed.DType
    assert {kind.name: kind.value for kind in DType} == {kind.name: kind.value for kind in theirs}
    for dtype in DTYPES:
        code = DType.code_from_dtype(dtype)
        assert code == theirs.code_from_dtype(dtype) == DType.code_from_dtype(np.dtype(dtype))
        assert DType.dtype_from_code(code) is theirs.dtype_from_code(code) is dtype
        assert DType.size(code) == DType.size(dtype) == theirs.size(code)
    for cardinality in (None, 0, 65499, 65500, 65536, 10**6):
        assert DType.optimal_dtype(cardinality) is theirs.optimal_dtype(cardinality)


def test_types_without_a_code_are_named() -> None:
    with pytest.raises(FormatError, match="dtype: uint32, needed one of uint8, int8"):
        DType.code_from_dtype(np.uint32)
    with pytest.raises(ValueError, match="'int32', needed a code or a NumPy number type"):
        DType.size("int32")
    with pytest.raises(ValueError, match="9 is not a valid DType"):
        DType.dtype_from_code(9)
