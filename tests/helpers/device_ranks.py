"""One rank of two that train on the same batches: the first reads and sends them; prints them as JSON."""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import Any

import torch.distributed

import binidx
from binidx.errors import BinidxError, StorageError


class Unread:
    """Dataset whose tokens only the first rank may read."""

    def __init__(self, dataset: Any, fails_at: int) -> None:
        self.dataset, self.fails_at = dataset, fails_at

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, idxs: list[int]) -> Any:
        assert torch.distributed.get_rank() == 0
        if self.fails_at in idxs:
            raise StorageError(f"s3://corpus/en: no sample {self.fails_at}")
        return self.dataset.__getitems__(idxs)


def main(how: dict[str, Any]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    dataset: Any = binidx.load_dataset(how["prefix"], 24, **how["options"]).wrapped
    topology = {"data_parallel_rank": 0, "data_parallel_size": 1}
    group = torch.distributed.group.WORLD
    unread = Unread(dataset, how.get("fails_at", -1))
    loader = binidx.build_pretraining_data_loader(unread, 0, 4, device="cpu", group=group, **topology)
    assert loader is not None
    try:
        batches = [{name: value.tolist() for name, value in batch.items()} for batch in islice(loader, how["most"])]
        print(json.dumps({"batches": batches, "consumed": loader.consumed_samples}), flush=True)
    except BinidxError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    torch.distributed.barrier()
