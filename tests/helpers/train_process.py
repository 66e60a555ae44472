"""One rank of a run that builds its datasets and reads a batch: `helpers.forked_ranks` forks it.

Each rank prints one JSON object: the error that it got, or the tokens of its batch. `how` has "all", what every rank
does, and by its number what one does differently:

    prefixes, weights, seed, size, sequence_length     of the train split
    options     further fields of the config
    tokenizer   fields of its SpecialTokens
    library     a folder with the metadata of another version of this library
    cwd         working directory: a relative prefix then names other data
    after       numbers of ranks that have ended before this one begins
    replace     [prefix, URI]: copies the pair of a prefix over another before it begins
    alone       makes its GPTDataset without a build
    idle        it needs no datasets
    loader      arguments of build_pretraining_data_loader; read a batch
    state       fields of a state, which is loaded into the loader before, and otherwise its own
    info        its log has lines of level INFO
    one_line    its dataset is that of load_dataset, and the rank that of its loader()
    mesh        shape of a DeviceMesh of dimensions "dp" and "tp", for the topology of the loader
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
from helpers.gpt_data import TOKENIZER
from torch.distributed.device_mesh import init_device_mesh

import binidx
from binidx.errors import PeerError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.writing.publish import create_object


def build(mine: dict[str, Any]) -> Any:
    """The train split."""
    config = binidx.GPTDatasetConfig(
        random_seed=mine["seed"], sequence_length=mine["sequence_length"], blend=(mine["prefixes"], mine["weights"]),
        split="1,0,0", **mine.get("options", {}),
        tokenizer=binidx.SpecialTokens(**mine["tokenizer"]) if "tokenizer" in mine else TOKENIZER,
    )  # fmt: skip
    if "alone" in mine:
        data = binidx.IndexedDataset(mine["prefixes"][0])
        documents = np.arange(len(data), dtype=np.int32)
        return binidx.GPTDataset(data, mine["prefixes"][0], documents, mine["size"], binidx.Split.train, config)
    sizes = [mine["size"], 0, 0]
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: "idle" not in mine, config).build()[0]


def read(mine: dict[str, Any]) -> list[Any]:
    """The tokens of the first batch, or what the rank built."""
    if "one_line" in mine:
        if "mesh" in mine:
            init_device_mesh("cpu", tuple(mine["mesh"]), mesh_dim_names=("dp", "tp"))
        short = binidx.load_dataset([*zip(mine["prefixes"], mine["weights"], strict=True)], mine["sequence_length"])
        batch: list[Any] = next(iter(short.loader(2)))["tokens"].tolist()
        return batch
    train = build(mine)
    if "loader" not in mine:
        return [train is not None]
    arguments = dict(mine["loader"])
    if "mesh" in mine:
        mesh = init_device_mesh("cpu", tuple(mine["mesh"]), mesh_dim_names=("dp", "tp"))
        names = ("data_parallel_rank", "data_parallel_size")
        arguments |= dict(zip(names, binidx.find_topology(mesh["dp"]), strict=True))
    loader = binidx.build_pretraining_data_loader(train, **arguments)
    assert loader is not None
    if "state" in mine:
        loader.load_state_dict({**loader.state_dict(), **mine["state"]})
    tokens: list[Any] = next(iter(loader))["tokens"].tolist()
    return tokens


def main(how: dict[str, Any]) -> None:
    rank, size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["STORE"]
    mine = {**how["all"], **how.get(str(rank), {})}
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    Path(f"{store}.began{rank}").touch()
    if "loader" in mine and "mesh" not in mine:
        mine["loader"] = {"data_parallel_rank": rank, "data_parallel_size": size, **mine["loader"]}
    if "info" in mine:
        logging.basicConfig(level=logging.INFO)
    os.chdir(mine.get("cwd", "."))
    sys.path[:0] = mine.get("library", [])
    wait_for_files(f"{store}.ended{other}" for other in mine.get("after", []))
    if "replace" in mine:
        source, target = mine["replace"]
        for suffix in (".bin", ".idx"):
            reader = open_object(source + suffix)
            with create_object(Location.of(target + suffix)) as out:
                out.write(reader.read([(0, reader.size)])[0])
    found: dict[str, Any] = {"rank": rank, "error": None}
    try:
        found["read"] = read(mine)
    except (PeerError, ValueError) as error:
        found |= {"error": type(error).__name__, "text": str(error)}
    Path(f"{store}.ended{rank}").touch()
    print(json.dumps(found), flush=True)
    # A group forms between processes: whoever left early would break it for a rank that is not yet through.
    wait_for_files(f"{store}.began{other}" for other in range(size))


def wait_for_files(paths: Iterable[str]) -> None:
    left = [Path(path) for path in paths]
    while not all(path.exists() for path in left):
        time.sleep(0.01)
