"""Batch samplers: the sample numbers of each step of a rank, as functions of consumed samples and topology alone.

    m = micro_batch_size, P = data_parallel_size, r = data_parallel_rank, T = total_samples, c = consumed_samples

    sequential   c ... T in blocks of m * P; rank r takes [r * m, (r + 1) * m) of each block
    random       one permutation an epoch, seeded by the epoch's number, entered at the position of c in its epoch
    hybrid CP    c ... T in global batches; rank r takes all its micro-batches of a step as one list

    global batch of 8, m = 2, P = 2      0 1 | 2 3 | 4 5 | 6 7
    hybrid CP, rank 0                    0 1         4 5

Source: Megatron-LM, `data_samplers.py`. The permutation is torch's `randperm`, computed without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import seed_generators, shared_zeros
from binidx.errors import ConfigError
from binidx.native.permutations import torch_randperm

DataloaderType = Literal["single", "cyclic"]
"""Megatron's names of the orders of a train split: from the first sample on, or permuted anew in each epoch."""


@runtime_checkable
class EpochDataset(Protocol):
    """A dataset whose samples differ between epochs, such as `RandomSeedDataset`."""

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, counted from 0, whose samples are read from now on."""


def check_consumed_samples(value: Any, most: int | None) -> int:
    """Return a number of consumed samples as an int; raise ConfigError unless it is whole and from 0 to `most`."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < 0 or (most is not None and value > most):
        found = int(value) if is_whole else repr(value)
        needed = "of 0 or more" if most is None else f"from 0 to {most}"
        raise ConfigError(f"consumed_samples: found {found}, needs a whole number {needed}")
    return int(value)


@dataclass(eq=False)
class PretrainingSampler(ABC):
    """Base of the samplers: the topology, iteration with a state, and any step by its number.

    Args:
        total_samples: samples of the dataset, T.
        consumed_samples: samples served before, over all ranks.
        micro_batch_size: samples of this rank in a step, m.
        data_parallel_rank: this rank, 0 to `data_parallel_size` - 1.
        data_parallel_size: number of ranks, P.

    Raises:
        ConfigError: a dataset or micro-batch without samples, or a rank outside 0 to P - 1.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    drop_last, is_endless = True, False

    def __post_init__(self) -> None:
        if self.total_samples <= 0:
            reason = "the dataset is empty: its split has no document, or fewer tokens than sequence_length + 1"
            raise ConfigError(f"total_samples: found {self.total_samples}, needs at least 1; {reason}")
        if self.micro_batch_size <= 0:
            raise ConfigError(f"micro_batch_size: found {self.micro_batch_size}, needs at least 1")
        rank, last = self.data_parallel_rank, self.data_parallel_size - 1
        if not 0 <= rank <= last:
            raise ConfigError(f"data_parallel_rank: found {rank}, needs 0 to data_parallel_size - 1 = {last}")

    @property
    def samples_per_step(self) -> int:
        """Number of samples of a step over all ranks, m * P."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_batches(self) -> int:
        """Micro-batches of this rank in a whole pass over the dataset, whatever `consumed_samples` is."""
        return self._end // self.samples_per_step

    @property
    def max_consumed_samples(self) -> int | None:
        """The number at which a state is finished; None if it never is."""
        return None if self.is_endless else self._end

    @property
    def _end(self) -> int:
        """T; more if a last step that is short counts as a whole one."""
        return self.total_samples + (0 if self.drop_last else self.samples_per_step - 1)

    def __len__(self) -> int:
        """Return the number of samples of the dataset, T: Megatron's convention, not the number of batches."""
        return self.total_samples

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self.consumed_samples)

    @abstractmethod
    def _draw(self, consumed_samples: int) -> Iterator[list[int]]:
        """Yield the micro-batches of this rank after `consumed_samples`, each a list of sample numbers."""

    @abstractmethod
    def batch(self, step: int) -> list[int]:
        """Return the micro-batch of this rank at a step of the whole run, counted from sample 0.

        Raises:
            IndexError: the run has no such step.
        """


class SamplerIterator(Iterator[list[int]]):
    """One iteration over a sampler, with the `state_dict` that torchdata's StatefulDataLoader requires.

    Attributes:
        consumed_samples: number of samples served over all ranks, including the last micro-batch returned.
    """

    def __init__(self, sampler: PretrainingSampler, consumed_samples: int) -> None:
        self._sampler = sampler
        self.load_state_dict({"consumed_samples": consumed_samples})

    def __next__(self) -> list[int]:
        batch = next(self._batches)
        self.consumed_samples += self._sampler.samples_per_step
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.consumed_samples = check_consumed_samples(state["consumed_samples"], self._sampler.max_consumed_samples)
        self._batches = self._sampler._draw(self.consumed_samples)


@dataclass(eq=False)
class MegatronPretrainingSampler(PretrainingSampler):
    """Micro-batches in the dataset's own order; the global order depends on `consumed_samples` and m * P alone.

    Args:
        total_samples: samples of the dataset, T.
        consumed_samples: samples served before, over all ranks; 0 to T - 1.
        micro_batch_size: samples of this rank in a step, m.
        data_parallel_rank: this rank, 0 to `data_parallel_size` - 1.
        data_parallel_size: number of ranks, P.
        drop_last: leave out the last block if it does not fill a step. With False each rank takes its slice of that
            block, which may be short or empty.

    Iteration yields lists of m sample numbers. `len()` is T, as in Megatron-LM, not the number of batches.

    Raises:
        ConfigError: no samples left to consume, or a rank outside 0 to P - 1.

    Example:
        >>> [*binidx.megatron.MegatronPretrainingSampler(8, 0, 2, data_parallel_rank=1, data_parallel_size=2)]
        [[2, 3], [6, 7]]

    Source: Megatron-LM, `MegatronPretrainingSampler`. `batch` and the iterator's `state_dict` are ours.
    """

    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.consumed_samples = check_consumed_samples(self.consumed_samples, self.total_samples - 1)

    def _draw(self, consumed_samples: int) -> Iterator[list[int]]:
        for start in range(consumed_samples, self.total_samples, self.samples_per_step):
            if start + self.samples_per_step <= self.total_samples or not self.drop_last:
                yield self._slice(start)

    def batch(self, step: int) -> list[int]:
        """Return the micro-batch of this rank at a step of the whole run.

        Args:
            step: counted from sample 0; a negative step counts from the last full one.

        Returns:
            m sample numbers.

        Raises:
            IndexError: the samples do not fill so many steps.
        """
        steps = self.total_samples // self.samples_per_step
        if not isinstance(step, SupportsIndex):
            raise TypeError(f"loader: found {step!r}, needs the number of a step; loader[0] is a batch")
        if not -steps <= step < steps:
            raise IndexError(f"step {step}: {self.total_samples} samples fill {steps} of {self.samples_per_step}")
        return self._slice(step % steps * self.samples_per_step)

    def _slice(self, start: int) -> list[int]:
        """Return the samples of this rank in the step that begins with sample `start`."""
        first = start + self.data_parallel_rank * self.micro_batch_size
        return list(range(first, min(first + self.micro_batch_size, self.total_samples)))


class MegatronPretrainingRandomSampler(PretrainingSampler):
    """Micro-batches in a random order that starts anew each epoch.

    Args:
        dataset: the dataset to sample from. If it has a `set_epoch(epoch)`, that is called when an epoch begins.
        total_samples: samples of the dataset, T; at least m * P.
        consumed_samples: samples served before, over all ranks; may exceed one epoch. A multiple of m * P within its
            epoch.
        micro_batch_size: samples of this rank in a step, m.
        data_parallel_rank: this rank, 0 to `data_parallel_size` - 1.
        data_parallel_size: number of ranks, P.
        data_sharding: True permutes each rank's own contiguous share; False shares one permutation among all ranks.
        surplus_batches: True is Megatron-LM's rule to the letter: without `data_sharding`, where T does not divide by
            m * P, the first ranks get more batches in an epoch than the others, so their consumed samples diverge and
            epochs end apart. False leaves these last batches out on every rank.

    Iteration yields lists of m sample numbers to the end of the epoch, and increases `consumed_samples` by m * P for
    each. `len()` is T, as in Megatron-LM.

    Raises:
        ConfigError: fewer samples than one step; at the first batch, `consumed_samples` between two steps.

    Source: Megatron-LM, `MegatronPretrainingRandomSampler`. Differences: `surplus_batches` False is the default, and
    `consumed_samples` between two steps is an error instead of an assertion.
    """

    is_endless = True

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
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if total_samples < self.samples_per_step:
            raise ConfigError(f"total_samples: found {total_samples}, one step needs {self.samples_per_step}")
        self.consumed_samples = check_consumed_samples(consumed_samples, self.max_consumed_samples)
        self.dataset = dataset
        self.data_sharding = data_sharding
        self.surplus_batches = surplus_batches

    @property
    def num_batches(self) -> int:
        if self.data_sharding or not self.surplus_batches:
            return super().num_batches
        whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
        return len(range(self.data_parallel_rank, whole, self.data_parallel_size)) // self.micro_batch_size

    def _draw(self, consumed_samples: int) -> Iterator[list[int]]:
        """Yield the micro-batches after `consumed_samples`, up to the end of the epoch.

        The attribute `consumed_samples` increases with each.
        """
        self.consumed_samples = consumed_samples
        epoch, into_epoch = divmod(consumed_samples, self._samples_per_epoch)
        if into_epoch % self.samples_per_step:
            raise ConfigError(
                f"consumed_samples: {consumed_samples} is {into_epoch} into its epoch, "
                f"needs a multiple of micro_batch_size * data_parallel_size = {self.samples_per_step}"
            )
        if isinstance(self.dataset, EpochDataset):
            self.dataset.set_epoch(epoch)
        order = self._order(epoch, into_epoch)
        for start in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self.samples_per_step
            yield order[start : start + self.micro_batch_size].tolist()

    def batch(self, step: int) -> list[int]:
        """Return the micro-batch of this rank at a step of the whole run.

        Args:
            step: 0 or more, counted from sample 0 of epoch 0.

        Returns:
            m sample numbers.

        Raises:
            IndexError: a negative step; a run of endless epochs has no last step.
        """
        if step < 0:
            raise IndexError(f"step {step}: needs 0 or more")
        epoch, into_epoch = divmod(step * self.samples_per_step, self._samples_per_epoch)
        batch: list[int] = self._order(epoch, into_epoch)[: self.micro_batch_size].tolist()
        return batch

    @property
    def _samples_per_epoch(self) -> int:
        """Number of samples of an epoch that fill whole steps."""
        return self.total_samples - self.total_samples % self.samples_per_step

    def _order(self, epoch: int, into_epoch: int) -> NDArray[np.int64]:
        """Return the samples of this rank in the rest of an epoch, after `into_epoch` samples of all ranks."""
        if self.data_sharding:
            share = self.total_samples // self.samples_per_step * self.micro_batch_size
            drawn = permutation(share, epoch)[into_epoch // self.data_parallel_size :]
            return drawn + self.data_parallel_rank * share
        whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
        stop = whole if self.surplus_batches else self._samples_per_epoch
        return permutation(whole, epoch)[into_epoch:stop][self.data_parallel_rank :: self.data_parallel_size]


@lru_cache(maxsize=1)
def permutation(num_samples: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers 0 to num_samples - 1 in an order seeded by the number of the epoch, read-only.

    The last permutation is cached: the sampler, its copy that predicts batches, and all ranks of a run's global order
    use the same one.
    """
    order = torch_randperm(num_samples, epoch)
    order.flags.writeable = False
    return order


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """Every sample once, from the first on, one at a time: rank r takes samples r, r + P, r + 2 P, ...

    Args:
        total_samples: samples of the validation set, T.
        data_parallel_rank: this rank, 0 to `data_parallel_size` - 1.
        data_parallel_size: number of ranks, P.

    Iteration yields lists of one sample number. `len()` is the number of batches of this rank. A rank may have one
    batch less than another: a trainer that counts steps takes the largest number of any rank and restarts the others.

    Raises:
        ConfigError: no samples, or a rank outside 0 to P - 1.

    Example:
        >>> [*binidx.megatron.MegatronFullValidationSampler(5, data_parallel_rank=1, data_parallel_size=2)]
        [[1], [3]]

    Source: Megatron-LM, `MegatronFullValidationSampler`.
    """

    def __init__(self, total_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        super().__init__(total_samples, 0, 1, data_parallel_rank, data_parallel_size, drop_last=False)

    def __len__(self) -> int:
        return len(range(self.data_parallel_rank, self.total_samples, self.data_parallel_size))

    @property
    def num_batches(self) -> int:
        return len(self)

    def _draw(self, consumed_samples: int) -> Iterator[list[int]]:
        return filter(None, super()._draw(consumed_samples))

    def batch(self, step: int) -> list[int]:
        """Return the micro-batch of this rank at a step.

        Args:
            step: counted from sample 0; a negative step counts from the last one.

        Returns:
            One sample number.

        Raises:
            IndexError: this rank has no such step.
        """
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step}: rank {self.data_parallel_rank} has {len(self)}")
        return [self.data_parallel_rank + step % len(self) * self.data_parallel_size]


class HybridCPMegatronPretrainingSampler(MegatronPretrainingSampler):
    """All micro-batches of this rank in a step as one list, for a scheduler that spreads sequences of any length.

    Args:
        total_samples: samples of the dataset, T.
        consumed_samples: samples served before, over all ranks; 0 to T - 1.
        micro_batch_size: samples of one micro-batch. (The attribute of this name counts all of this rank's in a step.)
        global_batch_size: samples of a step over all ranks; a multiple of `micro_batch_size * data_parallel_size`.
        data_parallel_rank: this rank, 0 to `data_parallel_size` - 1.
        data_parallel_size: number of ranks, P.
        drop_last: leave out the last step if samples do not fill it.

    Iteration yields lists of `global_batch_size / P` sample numbers. Pass the sampler to a `PretrainingLoader` with
    `collate_fn=list`, so that samples of different lengths are not stacked.

    Raises:
        ConfigError: a global batch that does not consist of whole micro-batches (Megatron-LM rounds it down silently).

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
        self._stride = micro_batch_size * data_parallel_size
        if min(self._stride, global_batch_size) < 1 or global_batch_size % self._stride:
            raise ConfigError(f"global_batch_size: found {global_batch_size}, needs a multiple of {self._stride}")
        share = global_batch_size // data_parallel_size
        super().__init__(total_samples, consumed_samples, share, data_parallel_rank, data_parallel_size, drop_last)
        self.global_batch_size, self._in_micro_batch = global_batch_size, micro_batch_size

    def _slice(self, start: int) -> list[int]:
        stop = min(start + self.global_batch_size, self.total_samples)
        firsts = range(start + self.data_parallel_rank * self._in_micro_batch, stop, self._stride)
        return [sample for first in firsts for sample in range(first, min(first + self._in_micro_batch, stop))]


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
    """Return the sampler of a type: "single" keeps the dataset's order, "cyclic" permutes it anew each epoch.

    The other arguments are those of `MegatronPretrainingSampler` and `MegatronPretrainingRandomSampler`.

    Raises:
        ConfigError: an unknown type, or arguments that the sampler rejects.
    """
    topology = (micro_batch_size, data_parallel_rank, data_parallel_size)
    if dataloader_type == "single":
        return MegatronPretrainingSampler(len(dataset), consumed_samples, *topology)
    if dataloader_type == "cyclic":
        return MegatronPretrainingRandomSampler(
            dataset, len(dataset), consumed_samples, *topology, data_sharding, surplus_batches
        )
    raise ConfigError(f"dataloader_type: found {dataloader_type!r}, needs 'single' or 'cyclic'")


class RandomSeedDataset:
    """Map-style dataset that seeds torch, NumPy and random with seed + epoch + sample number before each sample.

    For augmentation in a dataset of the user; the datasets of this library draw from the sample's number alone. The
    "cyclic" sampler sets the epoch, in memory that workers share.

    Args:
        dataset: map-style dataset whose `__getitem__` may draw from the global random generators.
        seed: seed of epoch 0, usually `random_seed` of the config.

    Example:
        >>> dataset = binidx.megatron.RandomSeedDataset(augmented_images, seed=1234)
        >>> loader = binidx.build_pretraining_data_loader(dataset, 0, 8, dataloader_type="cyclic")

    Source: Megatron-LM, `RandomSeedDataset`. Difference: there a persistent worker never receives a new epoch, so it
    repeats the draws of the first one.
    """

    RECORDED_NAME: ClassVar[str] = "RandomSeedDataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.base_seed = dataset, seed
        self._epoch = shared_zeros(1)

    def __len__(self) -> int:
        """Return the number of samples of the dataset."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch; the sampler calls it when an epoch begins.

        Args:
            epoch: counted from 0.
        """
        self._epoch[0] = epoch

    def __getitem__(self, idx: int) -> Any:
        """Seed the global generators and return the dataset's sample `idx`."""
        seed_generators(self.base_seed + int(self._epoch[0]) + int(idx))
        return self.dataset[idx]
