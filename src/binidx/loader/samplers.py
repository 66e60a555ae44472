"""Which samples a rank reads, step by step: functions of (consumed, rank, world) and nothing else.

    m = micro_batch_size, P = data_parallel_size, r = data_parallel_rank, T = total_samples, c = consumed_samples

    sequential   c ... T in blocks of m * P; rank r takes [r * m, (r + 1) * m) of each block
    random       epochs of the T - T % (m * P) samples that fill whole steps, each epoch permuted by its own number

Source: Megatron-LM, `data_samplers.py`; the permutation is torch's `randperm`, without torch.

Validation on all samples of a dataset, each once, on any number of ranks.

All micro-batches of a step at once, for a scheduler that spreads sequences of any length over ranks (hybrid CP).

global batch of 8, m = 2, P = 2      0 1 | 2 3 | 4 5 | 6 7
rank 0                               0 1         4 5            one list a step: what its micro-batches have together

Datasets that draw random numbers per sample: the same numbers for the same sample and epoch, in any worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import Split
from binidx.dataset.torch_bridge import seed_generators, shared_zeros
from binidx.errors import ConfigError
from binidx.native.permutations import torch_randperm

DataloaderType = Literal["single", "cyclic"]


@runtime_checkable
class HasEpochs(Protocol):
    """A dataset whose samples are others in each epoch."""

    def set_epoch(self, epoch: int) -> None: ...


class MegatronPretrainingSampler:
    """Micro-batches in the dataset's own order; the global order depends on `consumed_samples` and m * P alone.

    Args:
        total_samples: samples of the dataset, T.
        consumed_samples: samples served before, over all ranks.
        micro_batch_size: samples a rank reads at a time.
        data_parallel_rank, data_parallel_size: this rank, and how many there are.
        drop_last: leave out the block that does not fill a step; otherwise each rank takes its slice of it, which may
            be short or empty.

    Yields lists of sample numbers. `len()` is T, as in Megatron, not the number of batches.

    Raises:
        ConfigError: nothing left to consume, or a rank outside the world.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        check_topology(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if not 0 <= consumed_samples < total_samples:
            raise ConfigError(f"consumed_samples: found {consumed_samples}, needs 0 to {total_samples - 1}")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Drawing:
        return Drawing(self, self.consumed_samples)

    def draw(self, consumed_samples: int) -> Iterator[list[int]]:
        """The micro-batches of this rank from there on."""
        block = self.micro_batch_size * self.data_parallel_size
        for start in range(consumed_samples, self.total_samples, block):
            stop = min(start + block, self.total_samples)
            if stop - start < block and self.drop_last:
                return
            first = start + self.data_parallel_rank * self.micro_batch_size
            yield list(range(first, min(first + self.micro_batch_size, stop)))

    def batch(self, step: int) -> list[int]:
        """The micro-batch of this rank at a step of the whole run, counted from sample 0.

        Raises:
            IndexError: the samples do not fill so many steps.
        """
        block = self.micro_batch_size * self.data_parallel_size
        steps = self.total_samples // block
        if not -steps <= step < steps:
            raise IndexError(f"step {step}: {self.total_samples} samples fill {steps} of {block}")
        first = step % steps * block + self.data_parallel_rank * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))


class MegatronPretrainingRandomSampler:
    """Micro-batches in a random order that starts anew each epoch.

    Args:
        dataset: what is sampled from; its `set_epoch`, if it has one, is told each epoch that begins.
        total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size: as above; here
            `consumed_samples` may be beyond one epoch.
        data_sharding: each rank permutes its own contiguous share; otherwise all share one permutation.
        surplus_batches: without `data_sharding`, where T does not divide by m * P, Megatron gives its first ranks more
            batches in an epoch than the others: they count other consumed samples from then on, and end their epochs
            apart. True is Megatron's rule to the letter; False leaves these last batches out, on every rank.

    `consumed_samples` grows as batches are yielded. `len()` is T, as in Megatron.

    Raises:
        ConfigError: fewer samples than one step, or `consumed_samples` between two steps.
    """

    def __init__(
        self,
        dataset: Sized,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
        surplus_batches: bool = False,
    ) -> None:
        check_topology(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.step = micro_batch_size * data_parallel_size
        if total_samples < self.step:
            raise ConfigError(f"total_samples: found {total_samples}, one step needs {self.step}")
        if consumed_samples < 0:
            raise ConfigError(f"consumed_samples: found {consumed_samples}, needs 0 or more")
        self.dataset = dataset
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding
        self.surplus_batches = surplus_batches

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Drawing:
        return Drawing(self, self.consumed_samples)

    def draw(self, consumed_samples: int) -> Iterator[list[int]]:
        """The micro-batches of this rank from there to the end of the epoch; `consumed_samples` grows with them."""
        self.consumed_samples = consumed_samples
        epoch, into_epoch = divmod(consumed_samples, self._active)
        if into_epoch % self.step:
            raise ConfigError(
                f"consumed_samples: {consumed_samples} is {into_epoch} into its epoch, "
                f"needs a multiple of micro_batch_size * data_parallel_size = {self.step}"
            )
        if isinstance(self.dataset, HasEpochs):
            self.dataset.set_epoch(epoch)
        order = self._order(epoch, into_epoch)
        for start in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self.step
            yield order[start : start + self.micro_batch_size].tolist()

    def batch(self, step: int) -> list[int]:
        """The micro-batch of this rank at a step of the whole run, counted from sample 0 of epoch 0.

        Raises:
            IndexError: a negative step; a run that begins anew each epoch has no last one.
        """
        if step < 0:
            raise IndexError(f"step {step}: needs 0 or more")
        epoch, into_epoch = divmod(step * self.step, self._active)
        batch: list[int] = self._order(epoch, into_epoch)[: self.micro_batch_size].tolist()
        return batch

    @property
    def _active(self) -> int:
        """Samples of an epoch that fill whole steps."""
        return self.total_samples - self.total_samples % self.step

    def _order(self, epoch: int, into_epoch: int) -> NDArray[np.int64]:
        """What is left of this rank's epoch."""
        if self.data_sharding:
            share = self.total_samples // self.step * self.micro_batch_size
            mine = permutation(share, epoch)[into_epoch // self.data_parallel_size :]
            return mine + self.data_parallel_rank * share
        whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
        stop = whole if self.surplus_batches else self._active
        return permutation(whole, epoch)[into_epoch:stop][self.data_parallel_rank :: self.data_parallel_size]


class Drawing(Iterator[list[int]]):
    """The micro-batches of one iteration over a sampler, which knows how far it is.

    It has the `state_dict` that torchdata's StatefulDataLoader asks the iterators of samplers for.
    """

    def __init__(self, sampler: PretrainingSampler, consumed_samples: int) -> None:
        self._sampler = sampler
        self._go_on_from(consumed_samples)

    def __next__(self) -> list[int]:
        batch = next(self._batches)
        self.consumed_samples += self._sampler.micro_batch_size * self._sampler.data_parallel_size
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._go_on_from(state["consumed_samples"])

    def _go_on_from(self, consumed_samples: int) -> None:
        self.consumed_samples = consumed_samples
        self._batches = self._sampler.draw(consumed_samples)


def check_topology(total_samples: int, micro_batch_size: int, rank: int, size: int) -> None:
    """Raise ConfigError unless there is something to sample and the rank is one of the world."""
    if total_samples <= 0:
        raise ConfigError(f"total_samples: found {total_samples}, needs at least 1")
    if micro_batch_size <= 0:
        raise ConfigError(f"micro_batch_size: found {micro_batch_size}, needs at least 1")
    if not 0 <= rank < size:
        raise ConfigError(f"data_parallel_rank: found {rank}, needs 0 to data_parallel_size - 1 = {size - 1}")


@lru_cache(maxsize=1)
def permutation(num_samples: int, epoch: int) -> NDArray[np.int64]:
    """An epoch's order, shape (num_samples,), read-only; the last one is kept.

    The sampler, the copy of it that looks ahead, and all ranks of a description of the run want the same one.
    """
    order = torch_randperm(num_samples, epoch)
    order.flags.writeable = False
    return order


PretrainingSampler = MegatronPretrainingSampler | MegatronPretrainingRandomSampler


def build_sampler(
    dataloader_type: DataloaderType,
    dataset: Sized,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    data_sharding: bool = True,
    surplus_batches: bool = False,
) -> PretrainingSampler:
    """The sampler of a type: "single" keeps the dataset's order, "cyclic" permutes it anew each epoch.

    Raises:
        ConfigError: no such type, and whatever the sampler refuses.
    """
    topology = (micro_batch_size, data_parallel_rank, data_parallel_size)
    if dataloader_type == "single":
        return MegatronPretrainingSampler(len(dataset), consumed_samples, *topology)
    if dataloader_type == "cyclic":
        return MegatronPretrainingRandomSampler(
            dataset, len(dataset), consumed_samples, *topology, data_sharding, surplus_batches
        )
    raise ConfigError(f"dataloader_type: found {dataloader_type!r}, needs 'single' or 'cyclic'")


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """Every sample once, from the first on, one at a time: rank r takes r, r + P, ...

    `len()` is the number of batches of this rank. A rank may have one less than another: a trainer that counts steps
    takes the most of any rank, and lets the others begin again.

    Source: Megatron-LM, `MegatronFullValidationSampler`.
    """

    def __init__(self, total_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        super().__init__(total_samples, 0, 1, data_parallel_rank, data_parallel_size, drop_last=False)

    def __len__(self) -> int:
        return len(range(self.data_parallel_rank, self.total_samples, self.data_parallel_size))

    def draw(self, consumed_samples: int) -> Iterator[list[int]]:
        return filter(None, super().draw(consumed_samples))

    def batch(self, step: int) -> list[int]:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step}: rank {self.data_parallel_rank} has {len(self)}")
        return [self.data_parallel_rank + step % len(self) * self.data_parallel_size]


def is_validated_in_full(dataset: Any) -> bool:
    """Whether it is a valid split, or a blend of some, whose config has `full_validation`."""
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return split is Split.valid and bool(getattr(getattr(dataset, "config", None), "full_validation", False))


class HybridCPMegatronPretrainingSampler(MegatronPretrainingSampler):
    """The sequential sampler, a whole step at a time.

    Args:
        total_samples, consumed_samples, data_parallel_rank, data_parallel_size, drop_last: as there.
        micro_batch_size: samples of a micro-batch; as an attribute, samples of this rank in a step.
        global_batch_size: samples of a step over all ranks.

    Give it to a `PretrainingLoader` with `collate_fn=list`, so that samples stay apart.

    Raises:
        ConfigError: a global batch that is not made of whole micro-batches (Megatron cuts it down in silence).

    Source: Megatron-LM, `HybridCPMegatronPretrainingSampler`.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        of_all_ranks = micro_batch_size * data_parallel_size
        if min(of_all_ranks, global_batch_size) < 1 or global_batch_size % of_all_ranks:
            raise ConfigError(f"global_batch_size: found {global_batch_size}, needs a multiple of {of_all_ranks}")
        share = global_batch_size // data_parallel_size
        super().__init__(
            total_samples, consumed_samples, share, data_parallel_rank, data_parallel_size, drop_last=drop_last
        )
        self.global_batch_size, self._in_micro_batch = global_batch_size, micro_batch_size

    def draw(self, consumed_samples: int) -> Iterator[list[int]]:
        for start in range(consumed_samples, self.total_samples, self.global_batch_size):
            if start + self.global_batch_size <= self.total_samples or not self.drop_last:
                yield self._share(start)

    def batch(self, step: int) -> list[int]:
        steps = self.total_samples // self.global_batch_size
        if not -steps <= step < steps:
            raise IndexError(f"step {step}: {self.total_samples} samples fill {steps} of {self.global_batch_size}")
        return self._share(step % steps * self.global_batch_size)

    def _share(self, start: int) -> list[int]:
        """Of the step that begins with this sample, what there is of it."""
        of_all_ranks = self._in_micro_batch * self.data_parallel_size
        stop = min(start + self.global_batch_size, self.total_samples)
        mine = range(start + self.data_parallel_rank * self._in_micro_batch, stop, of_all_ranks)
        return [sample for first in mine for sample in range(first, min(first + self._in_micro_batch, stop))]


class RandomSeedDataset:
    """A map dataset that seeds torch, NumPy and random with seed + epoch + number before it reads a sample.

    For augmentation in datasets of your own; ours draw from the sample's number alone. The "cyclic" sampler says which
    epoch it is, through memory that workers share.

    Args:
        dataset: its `__getitem__` may draw from the global generators.
        seed: of epoch 0, as `random_seed` of the config.

    Source: Megatron-LM, `RandomSeedDataset`; there a persistent worker never hears of a new epoch, and draws that of
    the first again.
    """

    RECORDED_NAME: ClassVar[str] = "RandomSeedDataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.base_seed = dataset, seed
        self._epoch = shared_zeros(1)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Called by the sampler when an epoch begins."""
        self._epoch[0] = epoch

    def __getitem__(self, idx: int) -> Any:
        seed_generators(self.base_seed + int(self._epoch[0]) + int(idx))
        return self.dataset[idx]
