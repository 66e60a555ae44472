"""Description of a run over packed files in JSON.

    {"fork": "umd", "block_size": 2049, "n_chunks": 4, "seed": 1337,
     "sets": [{"name": "web", "files": ["s3://corpus/web_0000000000.bin", ...], "weight": 0.7}, ...],
     "num_ranks": 256, "num_workers": 1, "micro_batch_size": 8, "accumulation": 1}

`fork` names the loader whose rules apply; FORKS lists them. `files` is a list, or the URI of a text file with one name
per line. lit-gpt reads the files in the order of a directory listing, so that order is part of the description; the
others sort and shuffle them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from binidx.errors import ConfigError
from binidx.json_models import Count, JsonFile, Positive
from binidx.packed.packed_order import AtEnd


@dataclass(frozen=True)
class Fork:
    """Rules of a loader: for the end of the files, for the seed of each rank's draws, and for shuffling files."""

    at_end: AtEnd
    mixed_by_rank: bool
    shuffles_files: bool


FORKS = {
    "lit-gpt": Fork(AtEnd.stop, mixed_by_rank=True, shuffles_files=False),
    "lit-gpt-wrap": Fork(AtEnd.wrap, mixed_by_rank=True, shuffles_files=False),
    "tinyllama": Fork(AtEnd.wrap, mixed_by_rank=False, shuffles_files=True),
    "umd": Fork(AtEnd.repeat, mixed_by_rank=True, shuffles_files=True),
}
"""Rules of each loader. "tinyllama" is TinyLlama after its #67; "umd" made the Gemstones, goldfish and fictional-QA."""


@dataclass(frozen=True)
class DescribedSet:
    """One set of packed files; `files` is the list of their names, or the URI of a text file with their names."""

    name: str
    files: str | list[str]
    weight: float = 1.0
    scheduler: list[str | float | int] | None = None
    max_epoch: Positive | None = None


@dataclass(frozen=True)
class PackedDescription:
    """Fields of the description; `PackedSet` and `PackedRunOrder` document them."""

    fork: str
    block_size: Positive
    n_chunks: Positive
    seed: Count
    sets: list[DescribedSet]
    num_ranks: Positive = 1
    num_workers: Count = 0
    micro_batch_size: Positive = 1
    accumulation: Positive = 1
    shuffle: bool = True
    shuffle_filenames: bool | None = None

    def __post_init__(self) -> None:
        if self.fork not in FORKS:
            raise ConfigError(f"fork: found {self.fork!r}, needs one of {', '.join(FORKS)}")
        if not self.sets:
            raise ConfigError("sets: found none, needs at least one")
        if self.fork != "umd" and any(each.scheduler or each.max_epoch for each in self.sets):
            raise ConfigError(f"scheduler, max_epoch: found in a run of {self.fork}, only umd has them")
        weights = [packed_set.weight for packed_set in self.sets]
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ConfigError("sets: found weights below 0, or none above it, or infinite ones")


PACKED_FILE = JsonFile(PackedDescription, error=ConfigError)
