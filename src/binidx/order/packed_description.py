"""A run over packed files in one JSON file.

    {"fork": "umd", "block_size": 2049, "n_chunks": 4, "seed": 1337,
     "sets": [{"name": "web", "files": ["s3://corpus/web_0000000000.bin", ...], "weight": 0.7}, ...],
     "num_ranks": 256, "num_workers": 1, "micro_batch_size": 8, "accumulation": 1}

`fork` names whose rules hold, as the table FORKS has them. `files` is a list, or the URI of a text file with one name a
line. lit-gpt takes the files as a directory lists them, so their order is part of the description; the others sort and
shuffle them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError
from binidx.format.packed import PackedFiles
from binidx.index.packed_order import AtEnd, PackedSet, list_files
from binidx.order.packed_run import PackedRunOrder
from binidx.storage.backends import open_object
from binidx.storage.transfer import read_whole


@dataclass(frozen=True)
class Fork:
    """Whose loader: what it does at the end, which seeds have the rank in them, and whether it shuffles the files."""

    at_end: AtEnd
    mixed_by_rank: bool
    shuffles_files: bool


FORKS = {
    "lit-gpt": Fork(AtEnd.stop, mixed_by_rank=True, shuffles_files=False),
    "lit-gpt-wrap": Fork(AtEnd.wrap, mixed_by_rank=True, shuffles_files=False),
    "tinyllama": Fork(AtEnd.wrap, mixed_by_rank=False, shuffles_files=True),
    "umd": Fork(AtEnd.repeat, mixed_by_rank=True, shuffles_files=True),
}
"""name -> rules. TinyLlama is that after its #67; umd is that of the Gemstones, goldfish and fictional-QA."""

NEEDED = ("fork", "block_size", "n_chunks", "seed", "sets")
OPTIONAL = {"num_ranks": 1, "num_workers": 0, "micro_batch_size": 1, "accumulation": 1, "shuffle": True}


def load_packed_run(uri: str, storage_options: Mapping[str, Any] | None = None) -> PackedRunOrder:
    """The run that a file describes, its packed files opened and checked.

    Raises:
        ConfigError: no JSON object, fields unknown or missing, or values that do not fit.
        ObjectNotFoundError, FormatError: a packed file is missing or none.
    """
    text = bytes(read_whole(open_object(uri, storage_options=storage_options, cache=False)))
    try:
        return parse_packed_run(json.loads(text), storage_options)
    except ConfigError as error:
        raise ConfigError(f"{uri}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: no description of a packed run: {error}") from error


def parse_packed_run(found: Any, storage_options: Mapping[str, Any] | None = None) -> PackedRunOrder:
    """The same for what the file holds."""
    _check(found)
    fork, seed = FORKS[found["fork"]], found["seed"]
    names, weights, files = [], [], []
    for each in found["sets"]:
        listed = _listed(each["files"], storage_options)
        uris = list_files(listed, seed) if fork.shuffles_files else listed
        files.append(PackedFiles(uris, found["block_size"], storage_options=storage_options))
        names.append(each["name"])
        weights.append(each.get("weight", 1.0))
    shuffle = found.get("shuffle", True)
    sets = [PackedSet(len(each.uris), each.num_blocks, found["n_chunks"], seed, shuffle, fork.at_end) for each in files]
    total = sum(weights)
    rest = {name: found.get(name, default) for name, default in OPTIONAL.items() if name != "shuffle"}
    return PackedRunOrder(
        sets,
        names,
        [weight / total for weight in weights],
        seed,
        mixed_by_rank=fork.mixed_by_rank,
        files=files,
        **rest,
    )


def _listed(files: str | Sequence[str], storage_options: Mapping[str, Any] | None) -> list[str]:
    if isinstance(files, str):
        text = bytes(read_whole(open_object(files, storage_options=storage_options, cache=False)))
        return text.decode().split("\n")[:-1] if text.endswith(b"\n") else text.decode().split("\n")
    return list(files)


def _check(found: Any) -> None:
    if not isinstance(found, dict):
        raise ConfigError(f"packed run: found {type(found).__name__}, needs a JSON object")
    if unknown := [name for name in found if name not in (*NEEDED, *OPTIONAL)]:
        raise ConfigError(f"packed run: found unknown {', '.join(unknown)}; it has {', '.join([*NEEDED, *OPTIONAL])}")
    if missing := [name for name in NEEDED if name not in found]:
        raise ConfigError(f"packed run: found no {', '.join(missing)}, which it needs")
    if found["fork"] not in FORKS:
        raise ConfigError(f"fork: found {found['fork']!r}, needs one of {', '.join(FORKS)}")
    for each in found["sets"] or [{}]:
        if not isinstance(each, dict) or not {"name", "files"} <= each.keys() <= {"name", "files", "weight"}:
            raise ConfigError(f"sets: found {each!r}, needs name, files, and weight where there are several")
