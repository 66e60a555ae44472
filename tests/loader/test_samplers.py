"""The samplers against the rules of Megatron-LM, written down here as plain loops, with resume at every boundary."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from binidx.errors import ConfigError
from binidx.loader.samplers import (
    HybridCPMegatronPretrainingSampler,
    MegatronFullValidationSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    PretrainingSampler,
)
from binidx.loader.torch_loader import PretrainingLoader

TOPOLOGIES = list(product([1, 2, 5], [1, 2, 3]))  # micro batch size, data parallel size


def sequential_model(total: int, consumed: int, m: int, rank: int, size: int, drop_last: bool) -> Iterator[list[int]]:
    block: list[int] = []
    for idx in range(consumed, total):
        block.append(idx)
        if len(block) == m * size:
            yield block[rank * m : (rank + 1) * m]
            block = []
    if block and not drop_last:
        yield block[rank * m : (rank + 1) * m]


def random_model(total: int, consumed: int, m: int, rank: int, size: int, sharding: bool) -> Iterator[list[int]]:
    active = total - total % (m * size)
    generator = torch.Generator().manual_seed(consumed // active)
    current = consumed % active
    if sharding:
        bucket = total // (m * size) * m
        order = [rank * bucket + i for i in torch.randperm(bucket, generator=generator).tolist()[current // size :]]
    else:
        order = torch.randperm(total // m * m, generator=generator).tolist()[current:][rank::size]
    batch: list[int] = []
    for idx in order:
        batch.append(idx)
        if len(batch) == m:
            yield batch
            batch = []


def random_sampler(
    total: int, consumed: int, m: int, rank: int, size: int, sharding: bool, surplus: bool = False
) -> list[list[int]]:
    return list(MegatronPretrainingRandomSampler(range(total), total, consumed, m, rank, size, sharding, surplus))


@pytest.mark.parametrize(("m", "size"), TOPOLOGIES)
@pytest.mark.parametrize("drop_last", [True, False])
def test_sequential_batches_are_the_rule_from_every_position(m: int, size: int, drop_last: bool) -> None:
    for total, rank in product([1, 7, 30, 31], range(size)):
        for consumed in range(total):
            ours = list(MegatronPretrainingSampler(total, consumed, m, rank, size, drop_last))
            assert ours == list(sequential_model(total, consumed, m, rank, size, drop_last))


@pytest.mark.parametrize(("m", "size"), TOPOLOGIES)
@pytest.mark.parametrize("sharding", [True, False])
def test_random_batches_are_the_rule_from_every_boundary_of_three_epochs(m: int, size: int, sharding: bool) -> None:
    for total, rank in product([15, 30, 47], range(size)):
        active = total - total % (m * size)
        for consumed in range(0, 3 * active, m * size):
            rule = list(random_model(total, consumed, m, rank, size, sharding))
            assert random_sampler(total, consumed, m, rank, size, sharding, surplus=True) == rule
            assert (
                random_sampler(total, consumed, m, rank, size, sharding)
                == rule[: (active - consumed % active) // (m * size)]
            )


def test_megatrons_ranks_drift_apart_and_ours_do_not() -> None:
    # 10 samples in micro-batches of 2 on 3 ranks: the case of Megatron-LM's open pull request 7299.
    for surplus, batches, consumed in [(True, [2, 1, 1], [12, 6, 6]), (False, [1, 1, 1], [6, 6, 6])]:
        samplers = [MegatronPretrainingRandomSampler(range(10), 10, 0, 2, r, 3, False, surplus) for r in range(3)]
        assert [len(list(sampler)) for sampler in samplers] == batches
        assert [sampler.consumed_samples for sampler in samplers] == consumed


@pytest.mark.parametrize(("m", "size"), TOPOLOGIES)
def test_a_step_by_its_number_is_the_one_that_is_served(m: int, size: int) -> None:
    for rank, total in product(range(size), [15, 30, 47]):
        sequential = MegatronPretrainingSampler(total, 0, m, rank, size)
        assert [sequential.batch(step) for step in range(total // (m * size))] == list(sequential)
        assert sequential.batch(-1) == list(sequential)[-1]
        for sharding in (True, False):
            sampler = MegatronPretrainingRandomSampler(range(total), total, 0, m, rank, size, sharding)
            served = [batch for _ in range(3) for batch in sampler]
            assert [sampler.batch(step) for step in range(len(served))] == served


def test_steps_that_are_none_are_refused() -> None:
    sequential = MegatronPretrainingSampler(10, 0, 2, 0, 2)
    for step in (2, -3):
        with pytest.raises(IndexError, match="10 samples fill 2 of 4"):
            sequential.batch(step)
    with pytest.raises(IndexError, match="step -1"):
        MegatronPretrainingRandomSampler(range(10), 10, 0, 2, 0, 2, True).batch(-1)


@pytest.mark.parametrize(("m", "size"), TOPOLOGIES)
def test_a_resumed_rank_goes_on_where_the_unbroken_one_is(m: int, size: int) -> None:
    for rank, sharding in product(range(size), [True, False]):
        unbroken = random_sampler(60, 0, m, rank, size, sharding)
        sequential = list(MegatronPretrainingSampler(60, 0, m, rank, size))
        for step in range(len(sequential)):
            assert random_sampler(60, step * m * size, m, rank, size, sharding) == unbroken[step:]
            assert list(MegatronPretrainingSampler(60, step * m * size, m, rank, size)) == sequential[step:]


def test_a_new_world_size_keeps_the_global_order() -> None:
    def order(size: int, consumed: int) -> list[int]:
        ranks = [list(MegatronPretrainingSampler(48, consumed, 12 // size, rank, size)) for rank in range(size)]
        return [idx for step in zip(*ranks, strict=True) for batch in step for idx in batch]

    assert order(2, 0) == order(3, 0) == order(6, 0) == list(range(48))
    assert order(6, 24) == list(range(24, 48))


def test_consumed_samples_grows_as_batches_are_yielded() -> None:
    sampler = MegatronPretrainingRandomSampler(range(20), 20, 4, 2, 0, 2, True)
    next(iterator := iter(sampler))
    assert sampler.consumed_samples == 8
    assert len(list(iterator)) == 3
    assert sampler.consumed_samples == 20
    assert list(sampler) == list(random_model(20, 20, 2, 0, 2, True))


def test_len_is_the_samples_as_in_megatron() -> None:
    assert len(MegatronPretrainingSampler(31, 4, 2, 0, 2)) == 31
    assert len(random := MegatronPretrainingRandomSampler(range(31), 31, 4, 2, 0, 2, True)) == 31
    assert random.data_sharding


@pytest.mark.parametrize(("m", "size"), TOPOLOGIES)
def test_the_length_of_a_loader_is_its_batches_in_a_whole_pass_at_every_position(m: int, size: int) -> None:
    for total, rank in product([30, 31, 47], range(size)):
        place = (m, rank, size)
        passes: list[tuple[PretrainingSampler, PretrainingSampler]] = [
            (MegatronFullValidationSampler(total, rank, size), MegatronFullValidationSampler(total, rank, size))
        ]
        for drop_last in (True, False):
            passes += [[MegatronPretrainingSampler(total, c, *place, drop_last) for c in (0, m * size)]]  # type: ignore[list-item]
        for sharding, surplus in product([True, False], repeat=2):
            kind = MegatronPretrainingRandomSampler
            passes += [[kind(range(total), total, c, *place, sharding, surplus) for c in (0, m * size)]]  # type: ignore[list-item]
        passes += [[HybridCPMegatronPretrainingSampler(total, c, m, 2 * m * size, rank, size) for c in (0, m * size)]]  # type: ignore[list-item]
        for fresh, resumed in passes:
            loader, num_batches = PretrainingLoader(range(total), batch_sampler=resumed), len([*fresh])
            assert len(loader) == num_batches
            loader.consumed_samples = 2 * m * size
            assert len(loader) == num_batches


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ((0, 0, 1, 0, 1), "total_samples"),
        ((10, 10, 1, 0, 1), "consumed_samples: found 10"),
        ((10, -1, 1, 0, 1), "consumed_samples: found -1"),
        ((10, 0, 0, 0, 1), "micro_batch_size"),
        ((10, 0, 1, 1, 1), "data_parallel_rank: found 1"),
        ((10, 0, 1, -1, 1), "data_parallel_rank"),
    ],
)
def test_impossible_topologies_are_refused(arguments: tuple[int, ...], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        MegatronPretrainingSampler(*arguments)


@pytest.mark.parametrize(
    ("total", "consumed", "needed"), [(3, 0, "one step needs 4"), (20, 5, "multiple"), (20, -4, "0 or")]
)
def test_impossible_positions_of_the_random_sampler_are_refused(total: int, consumed: int, needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        list(MegatronPretrainingRandomSampler(range(total), total, consumed, 2, 0, 2, True))
