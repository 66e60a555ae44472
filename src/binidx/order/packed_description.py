"""A run over packed files in one JSON file.

    {"fork": "umd", "block_size": 2049, "n_chunks": 4, "seed": 1337,
     "sets": [{"name": "web", "files": ["s3://corpus/web_0000000000.bin", ...], "weight": 0.7}, ...],
     "num_ranks": 256, "num_workers": 1, "micro_batch_size": 8, "accumulation": 1}

`fork` names whose rules hold, as the table FORKS has them. `files` is a list, or the URI of a text file with one name a
line. lit-gpt takes the files as a directory lists them, so their order is part of the description; the others sort and
shuffle them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError
from binidx.format.packed import PackedFiles
from binidx.index.packed_order import AtEnd, PackedSet, list_files
from binidx.json_models import Count, JsonFile, Positive
from binidx.order.packed_run import PackedRunOrder
from binidx.storage.backends import open_object
from binidx.storage.transfer import read_document, read_whole


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


@dataclass(frozen=True)
class DescribedSet:
    """One set of packed files; `files` lists them, or is the URI of a text file that does."""

    name: str
    files: str | list[str]
    weight: float = 1.0


@dataclass(frozen=True)
class PackedDescription:
    """The fields of the file; `PackedSet` and `PackedRunOrder` explain them."""

    fork: str
    block_size: Positive
    n_chunks: Positive
    seed: int
    sets: list[DescribedSet]
    num_ranks: Positive = 1
    num_workers: Count = 0
    micro_batch_size: Positive = 1
    accumulation: Positive = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.fork not in FORKS:
            raise ConfigError(f"fork: found {self.fork!r}, needs one of {', '.join(FORKS)}")
        if not self.sets:
            raise ConfigError("sets: found none, needs at least one")
        if min(each.weight for each in self.sets) < 0 or not any(each.weight for each in self.sets):
            raise ConfigError("sets: found weights below 0, or none above it")


PACKED_FILE = JsonFile(PackedDescription, error=ConfigError)


def load_packed_run(uri: str, storage_options: Mapping[str, Any] | None = None) -> PackedRunOrder:
    """The run that a file describes, its packed files opened and checked.

    Raises:
        ConfigError: no JSON object, fields unknown or missing, or values that do not fit.
        ObjectNotFoundError, FormatError: a packed file is missing or none.
    """
    described = PACKED_FILE.decode(read_document(PACKED_FILE, uri, storage_options), uri)
    try:
        return open_packed_run(described, storage_options)
    except ConfigError as error:
        raise ConfigError(f"{uri}: {error}") from error


def open_packed_run(described: PackedDescription, storage_options: Mapping[str, Any] | None = None) -> PackedRunOrder:
    """The same for what the file holds."""
    fork, seed = FORKS[described.fork], described.seed
    files = []
    for each in described.sets:
        listed = _listed(each.files, storage_options)
        uris = list_files(listed, seed) if fork.shuffles_files else listed
        files.append(PackedFiles(uris, described.block_size, storage_options=storage_options))
    total = sum(each.weight for each in described.sets)
    return PackedRunOrder(
        [
            PackedSet(len(each.uris), each.num_blocks, described.n_chunks, seed, described.shuffle, fork.at_end)
            for each in files
        ],
        [each.name for each in described.sets],
        [each.weight / total for each in described.sets],
        seed,
        described.num_ranks,
        described.num_workers,
        described.micro_batch_size,
        described.accumulation,
        mixed_by_rank=fork.mixed_by_rank,
        files=files,
    )


def _listed(files: str | Sequence[str], storage_options: Mapping[str, Any] | None) -> list[str]:
    if isinstance(files, str):
        text = bytes(read_whole(open_object(files, storage_options=storage_options, cache=False)))
        return text.decode().split("\n")[:-1] if text.endswith(b"\n") else text.decode().split("\n")
    return list(files)
