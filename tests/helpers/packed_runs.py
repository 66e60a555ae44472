"""Random runs over packed files."""

from __future__ import annotations

import json
import random
from pathlib import Path

from helpers.traceable_runs import write_source

from binidx.format.indexed_dataset import IndexedDataset
from binidx.packed.packed_convert import indexed_to_packed
from binidx.packed.packed_run import FORKS

SEPARATOR = 999_999


def write_packed_run(directory: Path, seed: int) -> tuple[str, random.Random]:
    """The file of a random run over packed files whose tokens say where they come from."""
    choose = random.Random(seed)
    block = choose.randrange(2, 9)
    sets = []
    for name in ("web", "code")[: choose.randrange(1, 3)]:
        prefix = write_source(directory / name, choose, choose.random() < 0.5)
        options = {"add_separator": choose.random() < 0.5}
        chunk = block * choose.randrange(1, 4) + choose.randrange(block)
        files = indexed_to_packed(IndexedDataset(prefix), f"{directory}/packed", name, chunk, SEPARATOR, **options)
        sets.append({"name": name, "files": files, "weight": choose.random() + 0.1})
    described = {
        "fork": choose.choice([*FORKS]), "block_size": block, "n_chunks": choose.randrange(1, 3), "seed": seed,
        "sets": sets, "num_ranks": choose.randrange(1, 3), "num_workers": choose.randrange(3),
        "micro_batch_size": choose.randrange(1, 4), "accumulation": choose.randrange(1, 3),
        "shuffle_filenames": choose.choice([None, True, False]),
    }  # fmt: skip
    (directory / "packed.json").write_text(json.dumps(described))
    return f"{directory}/packed.json", choose
