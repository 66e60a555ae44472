"""How often the data is read to serve the samples that were asked for."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.errors import IndexBuildError
from binidx.index.sample import count_samples

SEPARATE_BELOW = 0.80
"""A last epoch that serves less than this part of its samples is shuffled for itself."""


@dataclass(frozen=True)
class EpochPlan:
    """The arithmetic of a GPT dataset's indices.

    num_epochs: passes over the documents, at least 1.
    tokens_per_epoch: tokens of all documents.
    num_samples: samples in all epochs; at least as many as were asked for.
    separate_final_epoch: the last epoch is shuffled for itself, so that what it leaves unserved is spread evenly.
    num_samples_sans_final_epoch: samples that end before the last epoch; 0 when there is one epoch.
    """

    num_epochs: int
    tokens_per_epoch: int
    num_samples: int
    separate_final_epoch: bool
    num_samples_sans_final_epoch: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all epochs."""
        return self.num_epochs * self.tokens_per_epoch

    @property
    def num_samples_shuffled_first(self) -> int:
        """Samples of the shuffle index's first range: those before a separate last epoch, else all."""
        return self.num_samples_sans_final_epoch if self.separate_final_epoch else self.num_samples


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    *,
    add_extra_token: bool,
    drop_last_partial: bool,
) -> EpochPlan:
    """The fewest epochs that hold `num_samples` full samples; None asks for one epoch.

    One epoch may hold no sample at all (fewer tokens than one needs); then num_samples is 0, which is an answer as long
    as none was asked for.

    Raises:
        IndexBuildError: samples asked of no tokens (Megatron Core loops for ever), or a negative argument.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices. That the last epoch serves at least 0 and
    at most samples-per-epoch + 1, which it asserts, follows from num_epochs being the smallest.
    """
    if tokens_per_epoch < 0 or (num_samples or 0) < 0:
        raise IndexBuildError(f"epochs: {num_samples} samples of {tokens_per_epoch} tokens an epoch, need 0 or more")
    if num_samples and tokens_per_epoch == 0:
        raise IndexBuildError(
            f"epochs: 0 tokens an epoch, {num_samples} samples need some; check the split and the data"
        )

    def count(epochs: int, drop: bool = True) -> int:
        tokens = epochs * tokens_per_epoch
        return count_samples(tokens, sequence_length, add_extra_token=add_extra_token, drop_last_partial=drop)

    requested = num_samples * sequence_length + add_extra_token if num_samples else 0
    num_epochs = max(1, -(-requested // max(tokens_per_epoch, 1)))
    before = count(num_epochs - 1)
    in_final = (num_samples or 0) - before
    separate = num_epochs > 1 and in_final < int(SEPARATE_BELOW * count(1))
    return EpochPlan(num_epochs, tokens_per_epoch, count(num_epochs, drop_last_partial), separate, before)
