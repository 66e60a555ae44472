"""Where a loader is: one integer, and a fingerprint of the order that it counts in.

    {"consumed_samples": 4194304, "fingerprint": "7adca21e0c51d6f3"}

A fingerprint is that of the samples, not of the files: data that moved or was copied has the same, data that was
written anew, another seed, split, weight or sequence length has another. Nor does it know how many samples a run was
asked for, as long as these come in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from binidx.dataset.megatron_dataset import recorded_name
from binidx.errors import ConfigError
from binidx.loader.samplers import MegatronPretrainingRandomSampler, PretrainingSampler

State = dict[str, Any]


class Place:
    """How far a loader's iterations are: what was served, where its sampler may be ahead of that.

    Args:
        sampler: as it is before the first iteration.
    """

    def __init__(self, sampler: PretrainingSampler) -> None:
        self.sampler = sampler
        self.consumed_samples = sampler.consumed_samples

    def begin(self) -> int:
        """A new iteration; returns the samples of a micro-batch."""
        if isinstance(self.sampler, MegatronPretrainingRandomSampler):
            self.sampler.consumed_samples = self.consumed_samples
        self.consumed_samples = self.sampler.consumed_samples
        return self.sampler.micro_batch_size

    def served(self) -> None:
        """One more step: a micro-batch of every rank. The last may be short, but there is nothing after it."""
        self.consumed_samples += self.sampler.micro_batch_size * self.sampler.data_parallel_size

    def move_to(self, consumed_samples: int) -> None:
        """The next iteration begins there."""
        self.sampler.consumed_samples = self.consumed_samples = consumed_samples


def state_of(dataset: Any, sampler: PretrainingSampler, consumed_samples: int) -> State:
    """What a loader goes on from, in JSON values."""
    return {"consumed_samples": consumed_samples, "fingerprint": fingerprint_of(dataset, sampler)}


def consumed_of(state: Mapping[str, Any], dataset: Any, sampler: PretrainingSampler) -> int:
    """The consumed samples of a state that is this loader's.

    Raises:
        ConfigError: it is no state, or counts in another order.
    """
    try:
        consumed, theirs = int(state["consumed_samples"]), state["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"resume: found {state!r}, needs what state_dict() of a loader gave") from error
    ours = fingerprint_of(dataset, sampler)
    if theirs != ours:
        raise ConfigError(
            f"resume: state is for fingerprint {theirs}, this loader is {ours}; check data, split, weights, seed and "
            "sequence length, and for a cyclic loader its micro_batch_size and data_parallel_size, as they are part "
            f"of its order. If you know better, give consumed_samples={consumed} itself"
        )
    return consumed


def fingerprint_of(dataset: Any, sampler: PretrainingSampler) -> str:
    """Of the order in which all ranks together are served, 16 hex digits."""
    text = json.dumps([_order_of(dataset), _walk_of(sampler)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _order_of(dataset: Any) -> Any:
    """What the samples of a dataset depend on; of a kind that does not say, its name and length."""
    known = getattr(dataset, "order_identity", None)
    return [recorded_name(type(dataset)), len(dataset)] if known is None else known


def _walk_of(sampler: PretrainingSampler) -> Any:
    """What a sampler's order depends on: nothing for the one that goes straight on, on any number of ranks."""
    if not isinstance(sampler, MegatronPretrainingRandomSampler):
        return "single"
    topology = sampler.total_samples, sampler.micro_batch_size, sampler.data_parallel_size
    return ["cyclic", *topology, sampler.data_sharding, sampler.surplus_batches]
