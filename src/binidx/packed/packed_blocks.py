"""Order of all blocks of packed files: set after set, file after file, and pass after pass.

sample  0 1 2 | 3 4 5 | 6 7 8 9       two files of 3 blocks in set 0, two of 2 blocks in set 1
sample  10 .. 19                      the same blocks in the second pass
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.order.blended_order import MembersOrder
from binidx.order.order_protocols import Bounds, Numbers, Order, Source, Spans
from binidx.order.reads import SampleOrigins
from binidx.packed.packed_files import PackedFiles, read_blocks
from binidx.packed.packed_order import PackedSet
from binidx.packed.packed_origins import FileGroup, group_files


@dataclass(frozen=True)
class BlockNumbers:
    """Numbers of the blocks of some sets.

    Args:
        sets: the sets.
    """

    sets: Sequence[PackedSet]

    @cached_property
    def bounds(self) -> Numbers:
        """Number of blocks of the sets before each set, and of all."""
        return np.cumsum([0, *(packed_set.num_files * packed_set.num_blocks for packed_set in self.sets)])

    @cached_property
    def num_blocks(self) -> Numbers:
        """Number of blocks in each file of each set."""
        return np.array([packed_set.num_blocks for packed_set in self.sets])

    def samples(self, blocks: Numbers) -> Numbers:
        """Return the samples that are some blocks: (set, file, block, pass), shape (n, 4)."""
        number, file, block, passes = blocks.T
        samples: Numbers = passes * self.bounds[-1] + self.bounds[number] + file * self.num_blocks[number] + block
        return samples

    def blocks(self, samples: Numbers) -> Numbers:
        """Return (set, file, block, pass) of samples, shape (n, 4)."""
        passes, place = np.divmod(samples, self.bounds[-1])
        number = self.bounds.searchsorted(place, side="right") - 1
        file, block = np.divmod(place - self.bounds[number], self.num_blocks[number])
        return np.stack([number, file, block, passes], axis=1)


class PackedBlocks(MembersOrder):
    """Blocks of the sets of packed files, as spans of the datasets of which `binidx pack` made them.

    It has the samples of one pass; greater numbers are those of later passes. A source is the dataset of the files of a
    set whose names begin with the same text.

    Args:
        sets: the sets.
        names: name of each.
        files: packed files of each; None: no block can be read, and no dataset is known.
    """

    def __init__(self, sets: Sequence[PackedSet], names: Sequence[str], files: Sequence[PackedFiles] | None) -> None:
        self.sets, self.names, self.files = sets, names, files
        self.numbers = BlockNumbers(sets)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBlocks, (self.sets, self.names, self.files)

    @cached_property
    def groups(self) -> list[tuple[int, FileGroup]]:
        """Number of the set, and files that begin with the same text; their origins are read at the first use."""
        return [(number, group) for number, files in enumerate(self.files or ()) for group in group_files(files)]

    @cached_property
    def known(self) -> list[tuple[int, FileGroup, Order]]:
        """The groups whose dataset is known, with their orders: the sources."""
        return [(number, group, group.order) for number, group in self.groups if group.order is not None]

    @property
    def members(self) -> Sequence[Order]:  # type: ignore[override]
        return [order for _, _, order in self.known]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Source of each file of all sets, -1 if it is not known, and the file's place there; shape (num_files, 2)."""
        places = np.full((int(self.first_files[-1]), 2), -1)
        for source, (number, group, _) in enumerate(self.known):
            own = self.first_files[number] + group.files
            places[own, 0], places[own, 1] = source, np.arange(len(own))
        return places

    @cached_property
    def first_files(self) -> Numbers:
        """Number of files of the sets before each set, and of all."""
        return np.cumsum([0, *(packed_set.num_files for packed_set in self.sets)])

    @property
    def identity(self) -> Any:
        return {"class": "PackedBlocks", "names": [*self.names], "sources": [each.identity for each in self.members]}

    @property
    def num_epochs(self) -> int:
        return 1

    def epochs(self, samples: Numbers) -> Numbers:
        passes: Numbers = samples // self.numbers.bounds[-1]
        return passes

    def __len__(self) -> int:
        return int(self.numbers.bounds[-1])

    def list_sources(self) -> NDArray[np.int16]:
        return self.locate(np.arange(len(self)))[0].astype(np.int16)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, -1 if its dataset is not known, and its number there."""
        number, file, block, passes = self.numbers.blocks(samples).T
        source, place = self.places[self.first_files[number] + file].T
        sizes = np.array([len(group.files) for _, group, _ in self.known] or [1])[source]
        return source, (passes * sizes + place) * self.numbers.num_blocks[number] + block

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        self.check_known(range(len(self.sets)))
        return super().spans(samples)

    def find(self, source: int, sequences: Numbers) -> Numbers:
        number, group, order = self.known[source]
        place, block = np.divmod(order.find(0, sequences), self.numbers.num_blocks[number])
        samples: Numbers = self.numbers.bounds[number] + group.files[place] * self.numbers.num_blocks[number] + block
        return samples

    def check_known(self, sets: Iterable[int]) -> None:
        """Raise ConfigError unless the documents of all files of some sets are known."""
        for number, group in self.groups:
            if group.problem and number in sets:
                raise ConfigError(group.problem)

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        return self.files[0].storage_options if self.files else None

    @property
    def sequence_length(self) -> int:
        """Number of input tokens of a block, whose last one is a label alone; 0 without files."""
        return self.files[0].block_size - 1 if self.files else 0

    def describe(self, samples: Numbers) -> tuple[SampleOrigins, Mapping[str, Numbers]]:
        number, file, block, passes = self.numbers.blocks(samples).T
        own = file * self.numbers.num_blocks[number] + block
        return SampleOrigins(number, own, passes), {"file": file, "block": block}

    def label(self, sample: int) -> dict[str, Any]:
        ((number, file, block, epoch),) = self.numbers.blocks(np.array([sample])).tolist()
        own, uri = file * self.sets[number].num_blocks + block, self.files[number].uris[file] if self.files else ""
        return {"sample": own, "source": self.names[number], "epoch": epoch, "file": uri, "block": block}

    def read(self, samples: Numbers) -> NDArray[Any]:
        if self.files is None:
            raise ConfigError("packed run: has no files to read tokens from; give files")
        return read_blocks(self.files, self.numbers.blocks(samples))

    def samples_named(self, name: str) -> Numbers:
        (uri, _, block), blocks = name.rpartition(":"), []
        for number, files in enumerate(self.files or ()):
            if uri in files.uris and block.isdecimal():
                if int(block) >= files.num_blocks:
                    raise ConfigError(f"{uri}: block {block}, it has {files.num_blocks:,}, counted from 0")
                blocks.append((number, files.uris.index(uri), int(block), 0))
        return self.numbers.samples(np.array(blocks, np.int64).reshape(-1, 4))

    def select_sources(self, name: str | None) -> Mapping[str, Source]:
        sets = [number for number, each in enumerate(self.names) if each == name] or range(len(self.names))
        self.check_known(sets)
        sources = {each.sources[0].name: each.sources[0] for number, _, each in self.known if number in sets}
        if name is None or name in self.names:
            return sources
        if name not in sources:
            raise ConfigError(f"--source: found {name}, needs one of {', '.join([*self.names, *sources])}")
        return {name: sources[name]}
