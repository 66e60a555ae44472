"""Folders of Hugging Face datasets, as `save_to_disk` writes them: Arrow streams, listed in state.json.

Source: datasets 3 to 5, `Dataset.save_to_disk`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from binidx.corpus.formats.peer_files import Files, PeerOptions, Tokens, group_documents, read_file, write_new
from binidx.errors import ConfigError, FormatError
from binidx.json_models import JsonFile
from binidx.storage.location import Location


@dataclass
class ArrowFile:
    """File of a folder."""

    filename: str


@dataclass
class DatasetState:
    """Fields of state.json that binidx reads."""

    _data_files: list[ArrowFile]
    _indices_files: list[Any] | None = None


STATE = JsonFile(DatasetState, open=True)
COLUMNS = ("input_ids", "tokens")


def read_arrow(folders: Sequence[Location], options: PeerOptions) -> Iterator[Tokens]:
    """Yield the lists of integers in a column of folders that `save_to_disk` wrote."""
    from binidx.format.arrow import pa

    for folder in folders:
        state = STATE.decode(read_file(folder / "state.json"), (folder / "state.json").uri)
        if state._indices_files:
            raise ConfigError(f"{folder}: has a mapping of its rows; flatten_indices() before save_to_disk()")
        for entry in state._data_files:
            file = folder / entry.filename
            try:
                table = pa.ipc.open_stream(pa.py_buffer(read_file(file))).read_all()
            except (pa.ArrowInvalid, OSError) as error:
                raise FormatError(f"{file}: not an Arrow stream: {error}") from error
            names = table.column_names
            column = options.column or next((name for name in COLUMNS if name in names), None)
            if column not in names:
                raise ConfigError(f"column: found {column or 'none'}, {file} has {', '.join(names)}")
            kind = table.schema.field(column).type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
                raise ConfigError(f"column: {column} of {file} is {kind}, need lists of integers")
            for chunk in table.column(column).chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False)
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
