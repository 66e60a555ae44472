"""Reading ahead in virtual time: any order, pace, fault and end; what one seed draws, and what each rule is for."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from simulation.readahead_world import Fault, Pace, Store, Trainer
from simulation.world import World

from binidx.loader.prediction import Prediction
from binidx.loader.readahead_window import WindowSize, count_first_reads
from binidx.loader.samplers import MegatronPretrainingSampler, PretrainingSampler, build_sampler

RECOVERY_SECONDS = 3.0
"""Within this time after the end of the last fault a trainer has its batch: 20 slow reads of 60 ms and a queue."""


def drawn_sampler(draw: random.Random) -> PretrainingSampler:
    micro, size = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 3])
    kind: Any = draw.choice(["single", "single", "cyclic"])
    total = draw.choice([40, 300, 2_000]) * micro * size
    consumed = draw.randrange(total // (micro * size) // 2 + 1) * micro * size
    return build_sampler(kind, range(total), consumed, micro, draw.randrange(size), size, draw.random() < 0.5)


def drawn_faults(draw: random.Random) -> tuple[Fault, ...]:
    """Return up to four faults in the first three seconds."""
    kinds = ["fail", "hang", "slow", "memory", "throttled", "filling"]
    begins = [draw.uniform(0, 2) for _ in range(draw.randrange(5))]
    return tuple(Fault(begin, begin + draw.uniform(0.1, 1), draw.choice(kinds)) for begin in begins)


def drawn_trainer(world: World, draw: random.Random, name: str, store: Store, start: PretrainingSampler) -> Trainer:
    workers = draw.choice([1, 1, 2, 3])
    surprises = {name: draw.choice([0.0, 0.0, 0.03]) for name in ("foreign", "skip", "interrupt")}
    pace = Pace(draw.choice([0.0005, 0.005, 0.05]), **surprises)
    return Trainer(
        world,
        name,
        store,
        start,
        worker=draw.randrange(workers),
        num_workers=workers,
        pace=pace,
        budget_bytes=draw.choice([1_000, 10_000, 100_000]),
        fixed=draw.choice([None, None, None, 1, 3, 16]),
        in_groups=draw.random() < 0.8,
        is_deaf=draw.random() < 0.1,
    )


@pytest.mark.parametrize("seed", [*range(60), 5_000_115, 7_000_080])
def test_any_trainer_has_the_batches_of_its_order_whatever_fails_and_whoever_is_collected(seed: int) -> None:
    world, draw = World(seed), random.Random(seed)
    large = draw.choice([1, 1, 10])
    store = Store(
        world,
        draw.choice([0.001, 0.03, 0.06]),
        drawn_faults(draw),
        frozenset(draw.sample(range(200), draw.choice([0, 0, 3]))),
        lambda number: 100 * (large if number % 97 > 48 else 1),
    )
    start = drawn_sampler(draw)
    trainers = [drawn_trainer(world, draw, "first", store, start)]

    def begin_again() -> None:
        trainers.append(drawn_trainer(world, draw, "second", store, start))

    def fork() -> None:  # the child goes on at the parent's place in the order, with none of its reads
        order = trainers[0].order[trainers[0].place :]
        trainers.append(Trainer(world, "child", store, start, batches=order, pace=trainers[0].pace))

    surprises = (0.4, "collect", trainers[0].abandon), (0.4, "again", begin_again), (0.3, "fork", fork)
    for share, event, function in (*surprises, (0.2, "exit", trainers[0].stop)):
        if draw.random() < share:
            world.later(draw.uniform(0, 3), "loader", event, function)
    world.run(3.0)
    served = [len(trainer.outcomes) for trainer in trainers]
    world.run(3.0 + RECOVERY_SECONDS)
    for trainer, before in zip(trainers, served, strict=False):
        assert trainer.is_over or len(trainer.outcomes) > before, f"{trainer.name} waits for ever"


def fast_trainer(seed: int, seconds: float, faults: tuple[Fault, ...] = (), **options: Any) -> Trainer:
    """Return a trainer of 4,000 batches of 8 samples, of 100 bytes each, that takes them as fast as they come."""
    world = World(seed)
    store = Store(world, seconds, faults)
    start = build_sampler("single", range(32_000), 0, 8, 0, 1)
    return Trainer(world, "trainer", store, start, pace=Pace(options.pop("pace", 0.0001)), num_batches=4_000, **options)


def begun_sizes(trainer: Trainer) -> list[int]:
    """Note the number of batches of each group that is begun from now on."""
    sizes, check = list[int](), trainer.threads.on_begin
    trainer.threads.on_begin = lambda group: (check(group), sizes.append(len(group.batches)))
    return sizes


def test_the_first_batch_is_read_alone_then_eight_are_ahead_and_more_while_the_trainer_waits() -> None:
    trainer = fast_trainer(0, 0.03, budget_bytes=64 * 800)
    sizes = begun_sizes(trainer)
    trainer.world.run(0.02)
    assert sizes == [1]
    trainer.world.run(0.05)
    assert sizes == [1, 1, 2, 2, 2]
    assert count_first_reads(8) == 2 * 8
    assert count_first_reads(100) == 64
    assert trainer.size.batches == 8
    trainer.world.run(2.0)
    assert trainer.size.batches == 64
    assert max(sizes) == 8
    assert sizes[-1] == 8
    assert len(trainer.outcomes) > 0.8 * 2.0 / 0.03 * 32 * 0.75  # four groups of eight in flight


def test_a_trainer_that_waits_for_no_batch_leaves_the_window_as_it_is() -> None:
    trainer = fast_trainer(0, 0.03, pace=0.05)
    trainer.world.run(5.0)
    assert trainer.size.batches == 8
    assert max(trainer.waits[1:]) == 0
    small = fast_trainer(0, 0.03, budget_bytes=10)
    small.world.run(1.0)
    assert small.size.batches == 2


def test_a_window_that_is_full_of_arrived_batches_does_not_grow_for_a_throttled_trainer() -> None:
    trainer = fast_trainer(0, 0.03, (Fault(0.1, 20.0, "throttled"),))
    trainer.world.run(10.0)
    assert trainer.size.batches <= 16


def test_batches_from_memory_are_read_by_the_trainer_until_one_is_fetched() -> None:
    trainer = fast_trainer(0, 0.01, (Fault(0.5, 1.0, "memory"),), pace=0.001)
    trainer.window.prediction.find = None  # type: ignore[assignment, method-assign]
    trainer.world.run(0.99)
    sizes = begun_sizes(trainer)
    trainer.world.run(0.999)
    assert not trainer.window.groups
    assert not sizes
    assert trainer.window.is_followed
    trainer.world.run(1.1)
    assert len(trainer.window.groups) > 3
    assert trainer.in_order > 300


def test_a_constant_window_is_never_left_also_from_memory() -> None:
    trainer = fast_trainer(0, 0.01, (Fault(0.0, 1.0, "memory"),), pace=0.001, fixed=5)
    trainer.world.run(0.8)
    assert sum(group.num_batches for group in trainer.window.groups) >= 4
    assert trainer.size.batches == 5


def test_the_next_group_begins_after_the_trainer_has_its_batch_unless_it_waits() -> None:
    trainer = fast_trainer(0, 0.001, pace=0.05)
    pauses = list[float]()
    check = trainer.threads.on_begin
    trainer.threads.on_begin = lambda group: (check(group), pauses.append(group.pause))
    trainer.world.run(2.0)
    assert pauses[0] == 0
    assert {*pauses[8:]} == {0.02}


def test_a_trainer_whose_order_is_another_one_is_not_read_ahead_for() -> None:
    trainer = fast_trainer(0, 0.001)
    trainer.order = [[number, number + 7] for number in range(4_000)]
    sizes = begun_sizes(trainer)
    trainer.in_order = -(10**6)
    trainer.world.run(1.0)
    assert not sizes
    assert len(trainer.outcomes) > 500


def test_a_loader_that_begins_again_or_elsewhere_is_followed_after_few_batches() -> None:
    for kind in ("single", "cyclic"):
        world = World(0)
        start: PretrainingSampler = build_sampler(kind, range(4_000), 0, 8, 0, 1)  # type: ignore[arg-type]
        again = [*itertools.islice(copy.copy(start), 100)]
        moved = copy.copy(start)
        whole = [*moved]
        orders = [
            again + again,
            [*whole, *itertools.islice(moved, 50)],
            whole[:20] + whole[60:],
            whole[:9] + whole[20:],
        ]
        for order in orders:
            trainer = Trainer(world, kind, Store(world, 0.001), start, batches=order)
            trainer.places = {}
            followed = list[bool]()
            world.invariants.append(lambda t=trainer, f=followed: f.append(t.window.is_followed))  # type: ignore[misc]
            world.run(world.now + 20.0)
            assert len(trainer.outcomes) == len(order)
            assert all(followed[5:])


def test_a_window_doubles_when_the_trainer_waits_for_a_group_that_was_begun_under_it() -> None:
    size = WindowSize(None, 100)
    size.measure(1)
    for _ in range(8):
        size.request(is_waiting=True)
        assert size.batches == 8
    size.request(is_waiting=True)
    assert size.batches == 16
    for _ in range(16):
        size.request(is_waiting=True)
        assert size.batches == 16


def test_a_window_of_which_more_than_four_groups_are_in_flight_does_not_grow() -> None:
    """Its groups are of one batch of 64 samples each, and four are read at a time."""
    world = World(0)
    start = build_sampler("single", range(64_000), 0, 64, 0, 1)
    trainer = Trainer(world, "trainer", Store(world, 0.03), start, pace=Pace(0.0001), budget_bytes=10**6)
    in_flight = list[int]()

    def waits(is_waiting: bool, request: Any = trainer.size.request) -> None:
        in_flight.append(sum(not group.is_read for group in trainer.window.groups))
        assert not is_waiting or in_flight[-1] <= 4, "the window grows, and its groups wait for a thread"
        request(is_waiting)

    trainer.size.request = waits  # type: ignore[method-assign]
    world.run(1.0)
    assert max(in_flight) > 4


@pytest.mark.parametrize("num_workers", [1, 3, 16])
def test_foreign_batches_and_jumps_of_some_batches_cost_no_read_ahead(num_workers: int) -> None:
    for jump in (0, 1, 5):
        trainer = fast_trainer(7, 0.001, pace=0.01, worker=0, num_workers=num_workers)
        trainer.is_over, foreign, count = True, [10**6], 0
        for batch in trainer.order[: 30 * (jump + 1) : jump + 1]:
            for _ in range(3 if not jump else 0):
                assert trainer.window.request(foreign, count) is None
                trainer.window.serve(foreign, 0)
            group = trainer.window.request(batch, count := count + 1)
            assert trainer.window.is_followed
            assert group is not None
            trainer.world.run(trainer.world.now + 0.1)
            trainer.window.take()
            trainer.window.serve(batch, 800)


@pytest.mark.parametrize(("num_workers", "searched"), [(1, 64), (4, 64), (16, 128)])
def test_a_jump_is_found_among_the_batches_that_are_searched(num_workers: int, searched: int) -> None:
    start = build_sampler("single", range(32_000), 0, 8, 0, 1)
    batches = [*start]
    assert Prediction(start, 0, num_workers).find(batches[searched - 1])
    prediction = Prediction(start, 0, num_workers)
    assert not prediction.find(batches[searched])
    assert prediction.next() == batches[0]


def test_a_jump_after_more_failed_batches_than_are_searched_is_found() -> None:
    """Seed 7,000,080: a batch that fails is not served, so the search never came to the one after the jump."""
    start = build_sampler("single", range(32_000), 0, 8, 0, 1)
    batches, prediction = [*start], Prediction(start)
    prediction.mark_served(prediction.next())  # type: ignore[arg-type]
    assert [prediction.next() for _ in range(100)] == batches[1:101]
    assert prediction.find(batches[102])
    assert prediction.next() == batches[102]


def test_a_batch_that_was_served_is_forgotten() -> None:
    start = build_sampler("single", range(32_000), 0, 8, 0, 1)
    batches, prediction = [*start], Prediction(start)
    for batch in batches[:70]:
        assert prediction.next() == batch
        prediction.mark_served(batch)
    assert not prediction.find(batches[69])
    assert prediction.next() == batches[70]


def test_the_last_batch_of_a_rank_may_be_empty() -> None:
    """17 samples of two ranks with 8 each: the second rank has none of the second batch."""
    world = World(0)
    trainer = Trainer(world, "second rank", Store(world), MegatronPretrainingSampler(17, 0, 8, 1, 2, drop_last=False))
    world.run(1.0)
    assert [outcome for _, outcome in trainer.outcomes] == ["served", "served"]
    assert trainer.order[1] == []
