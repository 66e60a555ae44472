"""All micro-batches of a step at once, for a scheduler that spreads sequences of any length over ranks (hybrid CP).

global batch of 8, m = 2, P = 2      0 1 | 2 3 | 4 5 | 6 7
rank 0                               0 1         4 5            one list a step: what its micro-batches have together
"""

from __future__ import annotations

from collections.abc import Iterator

from binidx.errors import ConfigError
from binidx.loader.samplers import MegatronPretrainingSampler


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
