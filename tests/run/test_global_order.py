"""The order of readings against the samplers themselves, rank by rank, micro-batch by micro-batch."""

import random
from itertools import islice

import numpy as np
import pytest

from binidx.errors import ConfigError
from binidx.loader.samplers import build_sampler
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule


def random_order(choose: random.Random) -> GlobalOrder:
    micro, ranks = choose.randrange(1, 4), choose.randrange(1, 4)
    block = micro * ranks
    rampup = (block, block, choose.randrange(1, 200)) if choose.random() < 0.5 else None
    kind, consumed = choose.choice(["single", "cyclic"]), choose.choice([0, 0, choose.randrange(40)])
    if kind == "cyclic":
        consumed -= consumed % block
    schedule = BatchSchedule(block * choose.randrange(2, 5), micro, ranks, rampup, consumed_samples=consumed)
    return GlobalOrder(schedule, choose.randrange(block * 5 + consumed, 400), kind, choose.random() < 0.5)


def served(order: GlobalOrder, rank: int, num_steps: int) -> list[list[int]]:
    """The samples of a rank's steps, out of samplers that begin anew when an epoch ends."""
    schedule, consumed, steps = order.schedule, order.schedule.consumed_samples, []
    for step in range(num_steps):
        size = schedule.samples_before(step + 1) - schedule.samples_before(step)
        mine: list[int] = []
        for _ in range(size // schedule.block):
            sampler = build_sampler(
                order.dataloader_type,
                range(order.num_samples),
                consumed,
                schedule.micro_batch_size,
                rank,
                schedule.data_parallel_size,
                order.data_sharding,
            )
            mine += next(iter(sampler))
            consumed += schedule.block
        steps.append(mine)
    return steps


@pytest.mark.parametrize("seed", range(80))
def test_every_rank_reads_what_its_sampler_yields(seed: int) -> None:
    choose = random.Random(seed)
    order = random_order(choose)
    num_steps = min(order.num_steps() or 20, 20)
    whole = order.readings(range(num_steps))
    for rank in range(order.schedule.data_parallel_size):
        needed = served(order, rank, num_steps)
        mine = order.readings(range(num_steps), rank)
        assert mine.sample.tolist() == [sample for step in needed for sample in step]
        assert mine.slot.tolist() == [slot for step in needed for slot in range(len(step))]
        assert mine.step.tolist() == [number for number, step in enumerate(needed) for _ in step]
        here = whole.rank == rank
        for column, alone in zip(whole, mine, strict=True):
            assert (column[here] == alone).all()
    first = choose.randrange(num_steps)
    part = order.readings(range(first, num_steps))
    assert (part.sample == whole.sample[whole.step >= first]).all()
    assert np.sort(whole.position).tolist() == list(
        range(order.schedule.consumed_samples, order.schedule.samples_before(num_steps))
    )


@pytest.mark.parametrize("seed", range(40))
def test_served_at_is_the_inverse(seed: int) -> None:
    choose = random.Random(seed)
    order = random_order(choose)
    num_steps = min(order.num_steps() or 30, 30)
    whole = order.readings(range(num_steps))
    wanted = np.array(choose.sample(range(order.num_samples), 5))
    found = order.served_at(wanted, order.schedule.samples_before(num_steps))
    here = np.flatnonzero(np.isin(whole.sample, wanted))
    here = here[np.argsort(whole.position[here])]
    for column, needed in zip(found, whole, strict=True):
        assert column.tolist() == needed[here].tolist()


def test_a_run_ends_with_its_last_whole_step() -> None:
    order = GlobalOrder(BatchSchedule(6, 1, 3), 16)
    assert (order.end, order.num_steps()) == (15, 2)
    assert len(order.readings(range(2)).step) == 12
    with pytest.raises(IndexError, match="steps: found 0:3, the run has 2 steps"):
        order.readings(range(3))
    assert len(order.readings(range(0)).step) == 0
    with pytest.raises(ConfigError, match="2 samples, one micro-batch a rank needs 3"):
        GlobalOrder(BatchSchedule(6, 1, 3), 2)
    with pytest.raises(ConfigError, match="4 is 4 into its epoch"):
        GlobalOrder(BatchSchedule(6, 1, 3, consumed_samples=4), 16, "cyclic")


def test_samplers_and_loaders_agree_on_what_is_left() -> None:
    """A loader from the start of a step goes on as the description says."""
    order = GlobalOrder(BatchSchedule(4, 2, 2), 23, "cyclic", False)
    sampler = build_sampler("cyclic", range(23), 8, 2, 1, 2, False)
    assert [*islice(sampler, 1)] == [order.readings(range(2, 3), rank=1).sample.tolist()]
