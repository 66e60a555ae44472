"""Flat arrays of tokens: of OLMo-core, llm.c, datatrove and nanotron, and the older index of fairseq and GPT-NeoX.

    olmo       .npy    tokens without a header; documents by the .csv.gz beside it (start, end, ...), else by EOD
    llmc       .bin    256 int32: magic, version, number of tokens; tokens. There documents begin with the EOD, and end
                       in it here
    nanotron   .ds     tokens; .ds.index: u64 end of each document, in tokens; .ds.metadata: text
    neox       .bin    tokens; .idx: TNTIDX, sizes of sequences, first sequence of each document

Source: OLMo-core 3, llm.c's data_common.py, datatrove's TokenizedFile, GPT-NeoX' IndexedDataset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np

from binidx.corpus.formats.peer_files import (
    Files,
    PeerOptions,
    Tokens,
    array_of,
    format_documents,
    inflate,
    read_file,
    read_tokens,
    split_at,
    split_stream,
    write_new,
)
from binidx.errors import ConfigError, FormatError
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import object_exists


def read_olmo(files: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the documents of files of tokens without a header; a document does not go on in the next file."""
    assert options.eod is not None
    beside = [file.beside(file.uri.removesuffix(".npy") + ".csv.gz") for file in files]
    bounds = [open_object(file) if object_exists(file) else None for file in beside]
    options.watch.say(f"bounds by .csv.gz in {len(files) - bounds.count(None)} files, by EOD in {bounds.count(None)}")
    for file, rows in zip(files, bounds, strict=True):
        dtype, reader = options.required_dtype(str(file)), open_object(file, cache=False, codec="raw")
        if bytes(reader.read([(0, min(6, reader.size))])[0]) == b"\x93NUMPY":
            raise FormatError(f"{file}: begins with NumPy's header, need tokens alone; write them by array.tofile")
        if rows is not None:
            edges = read_bounds(rows, reader.size // dtype.itemsize)
            if outside := sum(edges[1::2]) - sum(edges[::2]):
                options.watch.say(f"{file}: {outside:,} of {edges[-1]:,} tokens are in no document, so left out")
            yield from islice(split_at(read_tokens(file, dtype), np.diff(edges).tolist()), 1, None, 2)
        else:
            yield from split_stream(read_tokens(file, dtype), options.eod)


def read_bounds(file: RangeReader, num_tokens: int) -> list[int]:
    """Return 0, start and end of each document in a file of bounds, and the number of tokens: ascending numbers."""
    edges = [0]
    with inflate(file.uri, read_whole(file), "gz") as rows:
        for number, row in enumerate(iter(lambda: rows.readline(1 << 16), b""), 1):
            bounds = [int(each) for each in row.strip().split(b",", 2)[:2] if each.isdigit() and len(each) < 20]
            if len(bounds) < 2 or not edges[-1] <= bounds[0] < bounds[1] <= num_tokens:
                need = f"start,end of a document in the tokens {edges[-1]} to {num_tokens}"
                raise FormatError(f"{file.uri}: row {number}: found {row[:40]!r}, need {need}")
            edges += bounds
    return [*edges, num_tokens]


def write_olmo(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write one file of all tokens."""
    return [write_new(folder / "part-00000.npy", format_documents(documents, dtype, []))]


LLMC_KINDS: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
LLMC_HEADER, LLMC_MOST = 1024, 1 << 31
"""Bytes of the header of a file of llm.c; and the number of tokens that a file does not reach."""


def read_llmc(files: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the documents of files of llm.c, each of which begins with an EOD; files are one stream."""
    assert options.eod is not None

    def pieces() -> Iterator[Tokens]:
        for file in files:
            reader = open_object(file, cache=False, codec="raw")
            header = np.frombuffer(reader.read([(0, min(LLMC_HEADER, reader.size & ~3))])[0], "<i4")
            if len(header) < 256 or (dtype := LLMC_KINDS.get((int(header[0]), int(header[1])))) is None:
                raise FormatError(f"{file}: not a file of llm.c (found {header[:2].tolist()})")
            if reader.size != (need := LLMC_HEADER + int(header[2]) * dtype.itemsize):
                raise FormatError(f"{file}: {reader.size} bytes, its header needs {need}")
            yield from read_tokens(file, dtype, LLMC_HEADER)

    for document in split_stream(pieces(), options.eod, begins=True):
        if document[0] != options.eod:
            raise FormatError(f"{files[0]}: begins with {document[0]}, need the EOD {options.eod}")
        yield np.roll(document, -1)


def write_llmc(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write one file of all tokens: uint16 as for GPT-2, else uint32 as for Llama 3."""
    key = (20240520, 1) if dtype.itemsize <= 2 else (20240801, 7)
    if options.num_tokens >= LLMC_MOST:
        raise ConfigError(f"{folder}: {options.num_tokens:,} tokens, llm.c takes less than {LLMC_MOST:,}; cut them")
    header = np.zeros(256, "<i4")
    header[:3] = *key, options.num_tokens

    def pieces() -> Iterator[bytes]:
        yield header.tobytes()
        for number, document in enumerate(documents):
            if not len(document) or document[-1] != options.eod:
                raise FormatError(
                    f"document {number}: does not end in the EOD {options.eod}, which llm.c needs; tokenize with it"
                )
            yield np.roll(document, 1).astype(LLMC_KINDS[key]).tobytes()

    return [write_new(folder / "train.bin", pieces())]


def read_nanotron(files: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the documents of .ds files."""
    for file in files:
        ends = array_of(read_file(file + ".index"), "<u8", file + ".index").astype(np.int64)
        size = open_object(file, cache=False, codec="raw").size
        item_bytes = size // int(ends[-1]) if len(ends) and ends[-1] else 2
        lengths = np.diff(ends, prepend=0)
        if item_bytes not in (2, 4) or (len(ends) and ends[-1] * item_bytes != size) or (lengths < 0).any():
            raise FormatError(f"{file}: {size} bytes, its .index descends, or ends at {ends[-1:]} of 2 or 4 bytes")
        yield from split_at(read_tokens(file, np.dtype(f"<u{item_bytes}")), lengths.tolist())


def write_nanotron(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write one .ds file, its index and its metadata."""
    stored, lengths = np.dtype(f"<u{2 if dtype.itemsize <= 2 else 4}"), list[int]()
    file = write_new(folder / "00000.ds", format_documents(documents, stored, lengths))
    write_new(file + ".index", [np.array([*accumulate(lengths)], "<u8").tobytes()])
    write_new(file + ".metadata", [f"Unknown Tokenizer|{stored.itemsize}\n{sum(lengths)}\n{sum(lengths)} T".encode()])
    return [file]


NEOX_MAGIC = b"TNTIDX\0\0"
NEOX_HEADER = struct.Struct("<8s6Q")
NEOX_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_neox(prefixes: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the documents of `lazy` and `cached` datasets; those of `mmap` are datasets of binidx as they are."""
    for prefix in prefixes:
        data = read_file(prefix + ".idx")
        if bytes(data[:9]) == b"MMIDIDX\0\0":
            raise ConfigError(f"{prefix}.idx: is a dataset already, as GPT-NeoX' mmap; use it, or binidx convert")
        if len(data) < NEOX_HEADER.size or bytes(data[:8]) != NEOX_MAGIC:
            raise FormatError(f"{prefix}.idx: not TNTIDX (found {bytes(data[:8])!r})")
        _, _, code, _, count, num_sizes, num_bounds = NEOX_HEADER.unpack_from(data)
        first = NEOX_HEADER.size + 16 * (count + 1)
        sizes = array_of(data, "<i8", prefix + ".idx", count, first)
        bounds = array_of(data, "<i8", prefix + ".idx", num_bounds, first + 8 * count)
        tile = [*bounds[:1], *bounds[-1:]] == [0, count] and (np.diff(bounds) >= 0).all() and (sizes >= 0).all()
        if code not in NEOX_KINDS or num_sizes != count or not tile:
            raise FormatError(f"{prefix}.idx: type {code}, {num_sizes} sizes; need integers, {count} sizes in order")
        ends = np.concatenate([[0], np.cumsum(sizes)])[bounds]
        yield from split_at(read_tokens(prefix + ".bin", np.dtype(NEOX_KINDS[code])), np.diff(ends).tolist())


def write_neox(prefix: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write a dataset of GPT-NeoX' kind `lazy`; its sizes are those of documents."""
    lengths, codes = list[int](), {np.dtype(kind): code for code, kind in NEOX_KINDS.items()}
    write_new(prefix + ".bin", format_documents(documents, dtype, lengths))
    count = len(lengths)
    header = NEOX_HEADER.pack(NEOX_MAGIC, 1, codes[dtype], dtype.itemsize, count, count, count + 1)
    every, starts = np.arange(count + 1), [*accumulate(lengths, initial=0)]
    arrays = [np.asarray(values, "<i8").tobytes() for values in (every, starts, lengths, every)]
    write_new(prefix + ".idx", [header, *arrays])
    return [prefix]
