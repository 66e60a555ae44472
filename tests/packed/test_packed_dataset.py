"""Packed samples under torch's DataLoader, against a model of the original loaders under the same."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from binidx.errors import ConfigError
from binidx.packed.packed_files import PACKED_HEADER, PackedDataset, PackedDatasetBuilder, PackedFiles
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet


class Original(IterableDataset):
    """What lit-gpt's loader does, reading whole groups of files: one rank, one set."""

    def __init__(self, uris: list[str], run: PackedRun, block_size: int) -> None:
        self.uris, self.run, self.block_size = uris, run, block_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker, of = get_worker_info(), self.run.sets[0]
        count, number = (worker.num_workers, worker.id) if worker else (1, 0)
        shards, shard = self.run.num_ranks * count, self.run.rank * count + number
        mine = self.uris[shard : len(self.uris) // shards * shards : shards]
        rng = np.random.default_rng(of.seed)
        for first in range(0, len(mine) - of.n_chunks + 1, of.n_chunks):
            group = [
                np.fromfile(uri, np.uint16, offset=PACKED_HEADER.size) for uri in mine[first : first + of.n_chunks]
            ]
            for place in rng.permutation(of.n_chunks * of.num_blocks).tolist():
                start = place % of.num_blocks * self.block_size
                block = group[place // of.num_blocks][start : start + self.block_size]
                yield torch.from_numpy(block.astype(np.int64))


def write(directory: Path, num_files: int, chunk_size: int) -> list[str]:
    builder = PackedDatasetBuilder(str(directory), "t", chunk_size, 0, np.uint16)
    builder.add_array(np.random.default_rng(0).integers(0, 2**16, num_files * chunk_size))
    builder.write_reminder()
    return builder.filenames


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 1), (3, 2)])
def test_batches_are_those_of_the_original(ranks: int, workers: int, tmp_path: Path) -> None:
    uris = write(tmp_path, 27, 50)
    files = PackedFiles(uris, 7)
    for rank in range(ranks):
        run = PackedRun([PackedSet(27, files.num_blocks, 2, 5 + rank)], None, 0, rank, ranks, workers, 3)
        dataset = PackedDataset(run, [files])
        needed = list(DataLoader(Original(uris, run, 7), batch_size=3, num_workers=workers))
        flat = torch.cat(needed)
        assert len(dataset) == len(flat)
        assert torch.equal(torch.stack(dataset.__getitems__(range(len(dataset)))), flat)
        start = 3 * (len(needed) // 2)
        resumed = DataLoader(dataset, batch_size=3, sampler=range(start, len(dataset)))
        assert torch.equal(torch.cat(list(resumed)), flat[start:])


def test_a_stream_without_end_goes_on_as_long_as_asked(tmp_path: Path) -> None:
    files = PackedFiles(write(tmp_path, 4, 50), 7)
    run = PackedRun([PackedSet(4, files.num_blocks, 2, 5, at_end=AtEnd.repeat)], None, 0, 0, 1, 0, 3)
    dataset = PackedDataset(run, [files], 1000)
    epoch = 4 * files.num_blocks
    choose = random.Random(0)
    for position in choose.sample(range(1000 - epoch), 20):
        assert torch.equal(dataset[position], dataset[position + epoch])
    assert torch.equal(dataset[-1], dataset[999])
    assert len(list(islice(DataLoader(dataset, batch_size=10), 5))) == 5


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    files = PackedFiles(write(tmp_path, 4, 50), 7)
    endless = PackedRun([PackedSet(4, files.num_blocks, 2, 5, at_end=AtEnd.wrap)], None, 0, 0, 1, 0, 3)
    with pytest.raises(ConfigError, match="the run has no end"):
        PackedDataset(endless, [files])
    with pytest.raises(ConfigError, match="not those that the run's sets describe"):
        PackedDataset(endless, [PackedFiles(files.uris[:3], 7)], 10)
    with pytest.raises(IndexError, match="sample 10, it has 10"):
        PackedDataset(endless, [files], 10)[10]
