"""Folders with a list of their files: MDS of MosaicML Streaming, chunks of LitData's TokensLoader, Arrow of datasets.

    MDS       u32 n │ u32 offset × (n + 1) │ JSON of the columns │ samples: u32 size of each column without one, columns
    LitData   u32 n │ u32 offset × (n + 1) │ items: tokens
    Arrow     streams, listed in state.json, as `save_to_disk` writes them

Source: MosaicML Streaming 0.13 (MDSWriter, encodings), LitData 0.2 (BinaryWriter, TokensLoader), datasets 3 to 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

import numpy as np

from binidx.corpus.formats.peer_files import Files, PeerOptions, Tokens, group_documents, inflate, read_file, write_new
from binidx.errors import ConfigError, FormatError
from binidx.json_models import Count, JsonFile
from binidx.storage.location import Location

INDEX = "index.json"
SHAPES = ("<u1", "<u2", "<u4", "<u8")
"""Types of the lengths in the shape of an array, by the two low bits of its first byte."""

VALUES: dict[int | str, str] = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Code of an array's type, where the column does not fix it; and its name, where it does."""

VALUES |= {np.dtype(kind).name: kind for kind in VALUES.values()}


@dataclass
class ShardFile:
    """File of a shard."""

    basename: str
    bytes: Count


@dataclass
class MdsShard:
    """Fields of a shard in the index.json of MDS that binidx reads."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    raw_data: ShardFile
    compression: str | None = None
    zip_data: ShardFile | None = None


@dataclass
class MdsIndex:
    """The index.json of MDS."""

    shards: list[MdsShard]


@dataclass
class NamedFile:
    """Fields of a chunk of LitData, or of an Arrow file, that binidx reads."""

    filename: str
    chunk_bytes: Count = 0
    chunk_size: Count = 0


@dataclass
class LitdataConfig:
    """Fields of the config in the index.json of LitData that binidx reads."""

    data_format: list[str]
    compression: str | None = None
    encryption: Any = None


@dataclass
class LitdataIndex:
    """The index.json of LitData."""

    chunks: list[NamedFile]
    config: LitdataConfig


MDS_FILE, LITDATA_FILE = JsonFile(MdsIndex, {"version": 2}, open=True), JsonFile(LitdataIndex, open=True)


def file_in(folder: Location, name: str) -> Location:
    """Return the location of a file that an index names; raise FormatError if it would lie outside the folder."""
    if {"..", ""} & {*unquote(name).replace("\\", "/").split("/")}:  # HTTP clients resolve %2e%2e, too
        raise FormatError(f"{folder}: its index names {name!r}, need a file in the folder or below it")
    return folder / name


def read_shard(file: Location, compression: str | None, most: int) -> bytearray | memoryview:
    """Return the plain bytes of a shard.

    Args:
        most: bytes to which a compressed one may inflate.
    """
    data, name, plain = read_file(file), (compression or "").partition(":")[0], bytearray()
    if not name:
        return data
    if name not in ("zstd", "gz"):
        raise ConfigError(f"{file}: compressed by {name} (need zstd, gz or none); write it again")
    with inflate(file.uri, data, name) as reader:
        while piece := reader.read(1 << 20):
            plain += piece
            if len(plain) > most:
                raise FormatError(f"{file}: inflates to more than the {most} bytes that {INDEX} declares")
    return plain


def read_items(uri: str, data: bytearray | memoryview) -> Iterator[memoryview]:
    """Yield the bytes of the items of a shard."""
    view = memoryview(data)
    count = int.from_bytes(view[:4], "little")
    if 4 * (count + 2) > len(view):
        raise FormatError(f"{uri}: {len(view)} bytes, its {count} offsets need {4 * (count + 2)}")
    offsets = np.frombuffer(view, "<u4", count + 1, 4).tolist()
    for start, stop in pairwise(offsets):
        if not 4 <= start <= stop <= len(view):
            raise FormatError(f"{uri}: an item from byte {start} to {stop}, the shard has {len(view)}")
        yield view[start:stop]


def choose_column(option: str | None, preferred: Sequence[str], names: Sequence[str], subject: Location) -> str:
    """Return the column that a user names, else the first preferred one; raise ConfigError if there is none."""
    column = option or next((name for name in preferred if name in names), None)
    if column is None or column not in names:
        raise ConfigError(f"column: found {column or 'none'}, {subject} has {', '.join(names)}")
    return column


def format_shard(head: bytes, items: Sequence[bytes]) -> bytes:
    """Return the bytes of a shard: number of items, offsets, `head`, items."""
    start = 4 * (len(items) + 2) + len(head)
    offsets = np.cumsum([start, *map(len, items)], dtype=np.int64)
    if offsets[-1] >= 1 << 32:
        raise FormatError(f"shard: {offsets[-1]} bytes, need less than 4 GiB; cut the longest documents")
    return np.uint32(len(items)).tobytes() + offsets.astype("<u4").tobytes() + head + b"".join(items)


def read_mds(folders: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the samples of MDS folders."""
    for folder in folders:
        index = folder / INDEX
        for shard in MDS_FILE.decode(read_file(index), index.uri).shards:
            names, counts = shard.column_names, (len(shard.column_encodings), len(shard.column_sizes))
            if counts != (len(names), len(names)):
                raise FormatError(f"{index}: {len(names)} columns, {counts} encodings and sizes; need as many of each")
            column = choose_column(options.column, ("tokens", "input_ids"), names, index)
            file = file_in(folder, (shard.zip_data or shard.raw_data).basename)
            data = read_shard(file, shard.compression if shard.zip_data else None, shard.raw_data.bytes)
            for item in read_items(file.uri, data):
                yield decode_mds(item, shard, names.index(column), f"{file}, column {column}", options)


def decode_mds(item: memoryview, shard: MdsShard, column: int, subject: str, options: PeerOptions) -> Tokens:
    """Return the tokens in a column of a sample: after the sizes of the columns without a fixed one, the columns."""
    at = 4 * shard.column_sizes.count(None)
    kind, *fixed = shard.column_encodings[column].split(":")
    if kind not in ("bytes", "ndarray"):
        raise ConfigError(f"column: {subject} is of {shard.column_encodings[column]}, need bytes or ndarray")
    try:
        stored = iter(np.frombuffer(item, "<u4", at // 4).tolist())
        lengths = [next(stored) if size is None else size for size in shard.column_sizes]
        if at + sum(lengths) != len(item):
            raise ValueError(f"columns of {at + sum(lengths)} bytes, it has {len(item)}")
        start = at + sum(lengths[:column])
        data = item[start : start + lengths[column]]
        if kind == "bytes":
            return np.frombuffer(data, options.required_dtype(subject))
        dtype, at = np.dtype(VALUES[fixed[0] if fixed else data[0]]), 0 if fixed else 1
        if len(fixed) < 2:
            at += 1 + (data[at] >> 2) * (1 << data[at] % 4)
        return np.frombuffer(data[at:], dtype)
    except (ValueError, TypeError, LookupError) as error:
        raise FormatError(f"{subject}: no sample of these columns: {error}") from error


def write_mds(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write documents as samples with a column `tokens`; return the folder."""
    config = {
        "column_encodings": [f"ndarray:{dtype.name}"], "column_names": ["tokens"], "column_sizes": [None],
        "compression": None, "format": "mds", "hashes": [], "size_limit": None, "version": 2,
    }  # fmt: skip
    head, shards = json.dumps(config, sort_keys=True).encode(), []
    for number, group in enumerate(group_documents(documents)):
        name = f"shard.{number:05}.mds"
        data = format_shard(head, [encode_mds(document) for document in group])
        write_new(folder / name, [data])
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        shards.append({**config, "raw_data": raw, "samples": len(group), "zip_data": None})
    write_new(folder / INDEX, [json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode()])
    return [folder]


def encode_mds(document: Tokens) -> bytes:
    """Return the bytes of a sample of one array."""
    if not len(document):
        raise FormatError("document: has no tokens, which MDS cannot hold; preprocess with --empty drop")
    code = next(number for number in range(4) if len(document) < 1 << (8 << number))
    data = bytes([1 << 2 | code]) + np.array(len(document), SHAPES[code]).tobytes() + document.tobytes()
    return np.uint32(len(data)).tobytes() + data


LITDATA_CODES = {"uint8": 11, "int8": 12, "int16": 13, "int32": 15, "int64": 17, "uint16": 20}
"""Type -> its number in `data_format`, which LitData keeps."""

LITDATA_KINDS = {str(number): np.dtype(name) for name, number in LITDATA_CODES.items()} | {
    "14": np.dtype("int16"), "16": np.dtype("int32"), "18": np.dtype("int64"),
}  # fmt: skip
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])
"""torch's text of the structure of an item that is one tensor."""


def read_litdata(folders: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the items of folders that were written for LitData's TokensLoader."""
    for folder in folders:
        index = LITDATA_FILE.decode(read_file(folder / INDEX), (folder / INDEX).uri)
        kind, _, number = "".join(index.config.data_format[:1]).partition(":")
        dtype = LITDATA_KINDS.get(number) if kind == "no_header_tensor" else options.stored_dtype
        if dtype is None or index.config.encryption:
            raise ConfigError(f"{folder}: items are {kind}:{number}, or encrypted; need plain tensors of integers")
        for chunk in index.chunks:
            file = file_in(folder, chunk.filename)
            most = chunk.chunk_bytes + 4 * (chunk.chunk_size + 2)  # the bytes of its items alone
            for item in read_items(file.uri, read_shard(file, index.config.compression, most)):
                if len(item) % dtype.itemsize:
                    raise FormatError(f"{file}: an item of {len(item)} bytes, need a multiple of {dtype.itemsize}")
                yield np.frombuffer(item, dtype)


def write_litdata(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write documents as the items of chunks for LitData's TokensLoader; return the folder."""
    if dtype.name not in LITDATA_CODES:
        raise ConfigError(f"{folder}: tokens of {dtype.name}, LitData has {', '.join(LITDATA_CODES)}")
    chunks = []
    for number, group in enumerate(group_documents(documents)):
        name, data = f"chunk-0-{number}.bin", format_shard(b"", [document.tobytes() for document in group])
        write_new(folder / name, [data])
        counts = {"chunk_bytes": len(data), "chunk_size": len(group), "dim": sum(map(len, group))}
        chunks.append({**counts, "filename": name})
    config = {
        "chunk_bytes": 1 << 26, "chunk_size": None, "compression": None, "encryption": None, "data_spec": LEAF,
        "data_format": [f"no_header_tensor:{LITDATA_CODES[dtype.name]}"], "item_loader": "TokensLoader",
    }  # fmt: skip
    write_new(folder / INDEX, [json.dumps({"chunks": chunks, "config": config}, sort_keys=True).encode()])
    return [folder]


@dataclass
class DatasetState:
    """Fields of state.json that binidx reads."""

    _data_files: list[NamedFile]
    _indices_files: list[Any] | None = None


STATE = JsonFile(DatasetState, open=True)


def read_arrow(folders: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the lists of integers in a column of folders that `save_to_disk` wrote."""
    from binidx.format.arrow import pa

    for folder in folders:
        state = STATE.decode(read_file(folder / "state.json"), (folder / "state.json").uri)
        if state._indices_files:
            raise ConfigError(f"{folder}: has a mapping of its rows; flatten_indices() before save_to_disk()")
        for entry in state._data_files:
            file = file_in(folder, entry.filename)
            try:
                table = pa.ipc.open_stream(pa.py_buffer(read_file(file))).read_all()
                table.validate(full=True)
                names = table.column_names
            except (pa.ArrowException, OSError, ValueError) as error:
                raise FormatError(f"{file}: not an Arrow stream: {error}") from error
            column = choose_column(options.column, ("input_ids", "tokens"), names, file)
            kind = table.schema.field(names.index(column)).type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
                raise ConfigError(f"column: {column} of {file} is {kind}, need lists of integers")
            for chunk in table.column(names.index(column)).chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False)
                if chunk.null_count or chunk.flatten().null_count:
                    raise FormatError(f"{file}: column {column} has nulls, need integers")
                bounds = np.concatenate([[0], np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))])
                yield from np.split(values, bounds[1:-1].astype(np.int64)) if len(chunk) else ()


def write_arrow(folder: Location, documents: Iterable[Tokens], dtype: np.dtype[Any], options: PeerOptions) -> Files:
    """Write documents as the rows of a column `input_ids`; return the folder."""
    from binidx.format.arrow import pa

    kind = pa.list_(pa.from_numpy_dtype(dtype))
    feature = {"feature": {"dtype": dtype.name, "_type": "Value"}, "_type": "List"}
    schema = pa.schema({"input_ids": kind}).with_metadata(
        {"huggingface": json.dumps({"info": {"features": {"input_ids": feature}}})}
    )
    names = []
    for number, group in enumerate(group_documents(documents)):
        bounds = np.cumsum([0, *map(len, group)], dtype=np.int32)
        column = pa.ListArray.from_arrays(pa.array(bounds), pa.array(np.concatenate(group)))
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, schema) as writer:
            writer.write_table(pa.table([column], schema=schema))
        names.append(f"data-{number:05}.arrow")
        write_new(folder / names[-1], [memoryview(out.getvalue())])
    info = {"features": {"input_ids": feature}, "description": "", "citation": "", "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names], "_fingerprint": folder.name or "binidx",
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
        "_split": None,
    }  # fmt: skip
    write_new(folder / "dataset_info.json", [json.dumps(info).encode()])
    write_new(folder / "state.json", [json.dumps(state).encode()])
    return [folder]
