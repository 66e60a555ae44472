"""One cache of a node, its processes and fillings, in worlds of faults: `cache_world` states what holds in each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from simulation.cache_world import CacheProcess, CacheWorld, Fault

from binidx.storage.cache.fill_plan import ExtentUses, FillPlan, FillSizes

NUM_WORLDS = 50


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Worlds log what real processes do: damaged chunks, and directories that are full."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, NUM_WORLDS, 10))
def test_claims_hold_in_worlds_of_faults(first: int) -> None:
    counts = [CacheWorld(seed).run().counts for seed in range(first, first + 10)]
    assert sum(count["reads"] for count in counts) > 100
    assert sum(count["evicted"] for count in counts) > 0


def test_a_process_that_is_stopped_while_it_fetches_is_waited_for_half_a_minute() -> None:
    """For 200 s; the others read the exact bytes then."""
    CacheWorld(11, [Fault(0.1 * number, "stop", 50.0, number) for number in (1, 2)]).run()


@pytest.mark.parametrize("seed", [0, 7, 8])
def test_bytes_that_a_full_disk_has_taken_are_counted(seed: int) -> None:
    CacheWorld(seed, [Fault(0.1 * number, "full", 1.0, 0) for number in (1, 2, 3)]).run()


@pytest.mark.parametrize("seed", [224_371_803, 224_372_175])
def test_a_thread_that_finds_chunks_of_others_written_looks_again_at_the_rest(seed: int) -> None:
    """It waited without a look at chunks that other threads were fetching."""
    CacheWorld(seed).run()


def test_a_chunk_that_cannot_be_written_is_fetched_once_also_if_caching_goes_on_at_once() -> None:
    world = CacheWorld(3, [])
    for other in world.processes:
        other.kill()
    process = CacheProcess(world, "alone")
    process.quota.pause_seconds, world.disk.is_full = 0.0, True
    before = world.counts["fetched"]
    task = process.start(process.open(0).fill_chunks([0, 1]), "fill")
    world.world.run(5.0)
    assert task.ended.is_set
    assert world.counts["fetched"] == before + 2


def test_a_filling_without_room_looks_again_after_15_s_and_then_ever_later_up_to_8_minutes() -> None:
    plan = FillPlan(FillSizes(), 0)
    one = np.ones(1, np.int64)
    plan.count(ExtentUses(0 * one, 0 * one, 100 * one, 50.0 * one, 0 * one, 9 * one), keeps_all=False)
    assert [plan.choose(0, 0, 0.0) for _ in range(8)] == [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0]


def test_an_extent_for_which_there_is_no_room_counts_no_bytes() -> None:
    """The rate of extents grew with each round of a full cache, so extents seemed to pay that do not."""
    CacheWorld(974_214_712).run()


def test_a_checksum_that_a_kill_has_cut_is_found_by_the_reader_of_its_chunk() -> None:
    """A filling takes the chunk for written."""
    CacheWorld(86_453_729).run()


def test_a_block_that_a_filling_begins_to_need_during_an_eviction_is_in_use_or_fetched_again() -> None:
    CacheWorld(86_452_333).run()


def test_one_seed_is_one_trace() -> None:
    assert CacheWorld(3).run().world.digest == CacheWorld(3).run().world.digest
    assert CacheWorld(3).run().world.digest != CacheWorld(4).run().world.digest
