"""Dataset of the blocks of packed files (LITPKDS), in the order in which their own loaders served one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError
from binidx.packed.packed_files import PackedFiles
from binidx.packed.packed_order import PackedRun


class PackedDataset:
    """The stream of one rank, by position: `dataset[i]` is its i-th block, int64 of shape (block_size,).

    A DataLoader over it with the run's micro-batch size and no shuffling yields the batches of the original loader,
    with any number of its own workers: the workers of the original are part of `run`. To resume, start at a position.

    Args:
        run: the order of the blocks of this rank.
        files: packed files of each set.
        num_samples: length of the dataset, required if the run has no end.

    Raises:
        ConfigError: sets and files that do not fit each other, or no end.

    Example:
        dataset = binidx.PackedDataset(order.run_of(rank=0), order.files, num_samples=1_000_000)

    Source: lit-gpt, `PackedDataset` and `CombinedDataset`, which can only start at position 0.
    """

    RECORDED_NAME: ClassVar[str] = "PackedDataset"

    def __init__(self, run: PackedRun, files: Sequence[PackedFiles], num_samples: int | None = None) -> None:
        if [(len(each.uris), each.num_blocks) for each in files] != [(s.num_files, s.num_blocks) for s in run.sets]:
            raise ConfigError("packed dataset: the files are not those that the run's sets describe")
        if len({each.block_size for each in files}) != 1:
            raise ConfigError(f"packed dataset: blocks of {[each.block_size for each in files]}, needs one size")
        length = run.length if num_samples is None else num_samples
        if length is None or (run.length is not None and length > run.length):
            raise ConfigError(f"packed dataset: num_samples {num_samples}, the run has {run.length or 'no end'}")
        self.run, self.files, self.num_samples = run, list(files), length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, idx: int) -> Tensor:
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[int]) -> list[Tensor]:
        """Return the blocks at these positions, by one vectored read."""
        positions = [self._position(idx) for idx in idxs]
        blocks = np.concatenate(
            [np.empty((0, 4), np.int64), *(self.run.blocks(*each) for each in _stretches(positions))]
        )
        out = np.empty((len(positions), self.files[0].block_size), np.int64)
        for number, files in enumerate(self.files):
            here = blocks[:, 0] == number
            if here.any():
                out[here] = files.read(blocks[here, 1].tolist(), blocks[here, 2].tolist())
        return list(as_tensor(out))

    def _position(self, idx: int) -> int:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"packed dataset: sample {idx}, it has {len(self)}")
        return int(idx) % len(self)


def _stretches(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Group consecutive positions: [3, 4, 5, 9] -> [(3, 6), (9, 10)]."""
    stretches: list[tuple[int, int]] = []
    for position in positions:
        if stretches and stretches[-1][1] == position:
            stretches[-1] = (stretches[-1][0], position + 1)
        else:
            stretches.append((position, position + 1))
    return stretches
