"""One rank of a run that starts again and again, each time with something altered on some ranks.

`helpers.forked_ranks` forks it; ranks of four are a node. `how` has "all", what every rank does as in
`helpers.train_process`, and "starts", a list of alterations:

    ranks       numbers of the altered ranks
    changes     what they do differently, as in `helpers.train_process`; of "loader" and "options" the given fields
    library     version of the library that they are
    algorithm   version of the algorithms that they have
    swap        name of an array of the train blend in which they swap two entries after the build
    first       whether they begin before the others, or after them

Prints a JSON object for each start: the error that the rank got, or a digest of its batches.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from typing import Any
from unittest.mock import patch

import torch.distributed
import xxhash
from helpers.train_process import build

import binidx
from binidx.dataset import rank_comparison
from binidx.errors import PeerError

BATCHES = 3
HEAD_START_SECONDS = 0.03


def read(mine: dict[str, Any], swap: str | None) -> str:
    """A digest of the first batches."""
    train = build(mine)
    if swap is not None:
        array = getattr(train, swap).copy()
        other = int((array != array[0]).argmax())
        array[[0, other]] = array[[other, 0]]
        setattr(train, swap, array)
    loader = binidx.build_pretraining_data_loader(train, **mine["loader"])
    assert loader is not None
    digest = xxhash.xxh3_64()
    for batch in itertools.islice(loader, BATCHES):
        for name in sorted(batch):
            digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()


def start(common: dict[str, Any], altered: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """One start of this rank."""
    is_altered = rank in altered.get("ranks", ())
    own, own_changes = (altered, altered.get("changes", {})) if is_altered else ({}, {})
    mine = {**common, **own_changes}
    for name, values in (("loader", {"data_parallel_rank": rank, "data_parallel_size": size}), ("options", {})):
        mine[name] = {**values, **common.get(name, {}), **own_changes.get(name, {})}
    os.chdir(mine["cwd"])
    if is_altered != altered.get("first", is_altered):
        time.sleep(HEAD_START_SECONDS)
    with (
        patch.object(binidx, "__version__", own.get("library", "1.0")),
        patch.object(rank_comparison, "ALGORITHM", own.get("algorithm", 3)),
    ):
        try:
            return {"rank": rank, "read": read(mine, own.get("swap"))}
        except (PeerError, ValueError) as error:
            return {"rank": rank, "error": type(error).__name__, "text": str(error)}


def main(how: dict[str, Any]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    socket.gethostname = lambda: f"node{rank // 4}"
    torch.distributed.init_process_group("gloo", "env://", rank=rank, world_size=size)
    for altered in how["starts"]:
        print(json.dumps(start(how["all"], altered, rank, size)), flush=True)
        torch.distributed.barrier()
