"""The number of epochs and the samples of the last one, against Megatron's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.document_sample import EpochPlan, plan_epochs


def megatron_num_epochs(tokens: int, sequence_length: int, num_samples: int | None, extra: bool) -> int:
    config = SimpleNamespace(sequence_length=sequence_length, add_extra_token_to_sequence=extra)
    return megatron.gpt.GPTDataset._get_num_epochs(SimpleNamespace(num_samples=num_samples, config=config), tokens)


def plan(
    tokens: int, sequence_length: int, num_samples: int | None, extra: bool = True, drop: bool = True
) -> EpochPlan:
    return plan_epochs(tokens, sequence_length, num_samples, add_extra_token=extra, drop_last_partial=drop)


def random_requests(count: int) -> list[tuple[int, int, int | None, bool]]:
    rng = np.random.default_rng(2)
    return [
        (
            int(rng.integers(1, rng.choice([3, 50, 5000]))),
            int(rng.integers(1, rng.choice([3, 20, 300]))),
            None if rng.random() < 0.1 else int(rng.integers(0, rng.choice([2, 30, 400]))),
            bool(rng.integers(2)),
        )
        for _ in range(count)
    ]


def test_the_number_of_epochs_is_megatrons() -> None:
    for request in random_requests(3000):
        assert plan(*request).num_epochs == megatron_num_epochs(*request), request


def test_the_final_epoch_is_separate_when_it_serves_less_than_four_fifths() -> None:
    """By counting samples one at a time: those that end before the last epoch, in it, and in one epoch alone."""
    seen = set()
    for tokens, length, num_samples, extra in random_requests(1500):
        found = plan(tokens, length, num_samples, extra)
        ends = np.arange(1, found.num_samples + 1) * length + extra
        before, in_one = (int((ends <= epochs * tokens).sum()) for epochs in (found.num_epochs - 1, 1))
        separate = found.num_epochs > 1 and (num_samples or 0) - before < int(0.80 * in_one)
        assert found.num_samples_sans_final_epoch == before
        assert found.separate_final_epoch is separate
        assert found.num_samples_shuffled_first == (before if separate else found.num_samples)
        seen.add((found.num_epochs > 1, separate))
    assert seen == {(False, False), (True, False), (True, True)}


def test_what_megatron_asserts_of_the_final_epoch_always_holds() -> None:
    for tokens, length, num_samples, extra in random_requests(3000):
        found = plan(tokens, length, num_samples, extra)
        if found.num_epochs > 1:
            assert num_samples is not None
            assert 0 <= num_samples - found.num_samples_sans_final_epoch <= (tokens - extra) // length + 1


def test_there_are_as_many_samples_as_requested_and_no_epoch_too_many() -> None:
    for tokens, length, num_samples, extra in random_requests(3000):
        found = plan(tokens, length, num_samples, extra)
        assert found.num_samples >= (num_samples or 0)
        assert found.num_epochs == 1 or found.num_samples_sans_final_epoch < (num_samples or 0)
        assert found.num_tokens == found.num_epochs * tokens


def test_a_billion_epochs_are_counted_at_once() -> None:
    assert plan(1, 10**6, 10**6).num_epochs == 10**12 + 1


def test_the_last_partial_sample_counts_unless_it_is_dropped() -> None:
    assert plan(14, 4, None, drop=True).num_samples == 3
    assert plan(14, 4, None, drop=False).num_samples == 4
    assert plan(13, 4, None, drop=False).num_samples == 3
    assert plan(12, 4, None, extra=False, drop=False).num_samples == 3


@pytest.mark.parametrize("num_samples", [None, 0])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_too_few_tokens_for_a_sample_are_no_error_when_none_is_requested(tokens: int, num_samples: int | None) -> None:
    assert plan(tokens, 4, num_samples) == EpochPlan(1, tokens, 0, False, 0)


def test_samples_of_no_tokens_are_an_error() -> None:
    """Megatron Core adds 0 tokens an epoch until there are enough, for ever."""
    with pytest.raises(IndexBuildError, match="0 tokens an epoch, 5 samples need some; check the split"):
        plan(0, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, -1), "-1 samples"),
        ((-1, 4, 1), "of -1 tokens"),
        ((10, 0, 1), "sequence_length: found 0, need at least 1"),
    ],
)
def test_arguments_below_their_range_are_errors(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        plan(*arguments)
