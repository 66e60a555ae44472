"""Nesting against sets: what each topology has read, written out."""

import random
from dataclasses import replace

import pytest

from binidx.errors import ConfigError
from binidx.packed.packed_order import PackedSet, WorkerOrder
from binidx.packed.packed_run import Nesting


def read_by(nesting: Nesting, count: int, num_files: int) -> set[tuple[int, int]]:
    """The blocks that `count` shards have read when all of them together have read so many files."""
    blocks: set[tuple[int, int]] = set()
    for shard in range(count):
        order = WorkerOrder(replace(nesting.of, seed=shard), shard, count)
        rows = order.blocks(0, num_files // count * nesting.of.num_blocks)
        blocks |= set(map(tuple, rows[:, :2].tolist()))
    return blocks


@pytest.mark.parametrize("seed", range(40))
def test_at_sync_points_all_have_read_the_same_set(seed: int) -> None:
    choose = random.Random(seed)
    shards = choose.sample([1, 2, 3, 4, 6, 8], 3)
    of = PackedSet(choose.randrange(60, 200), choose.randrange(1, 5), choose.choice([1, 2, 3]), seed)
    nesting = Nesting(of, 7, shards)
    for number in range(nesting.num_syncs + 1):
        seen = [read_by(nesting, count, number * nesting.sync_files) for count in shards]
        assert seen[0] == seen[1] == seen[2]
        assert len(seen[0]) * 7 == number * nesting.sync_tokens
    after = nesting.files_read(min(shards, key=nesting.files_read))
    assert after < (nesting.num_syncs + 1) * nesting.sync_files


def test_between_sync_points_they_differ() -> None:
    nesting = Nesting(PackedSet(16, 4, 1, 0), 7, [2, 4])
    assert read_by(nesting, 2, 2) != read_by(nesting, 4, 4)
    assert read_by(nesting, 2, 4) == read_by(nesting, 4, 4)


def test_the_gemstones_meet_every_8_6_billion_tokens() -> None:
    gemstones = Nesting(PackedSet(166_000, 2048, 4, 1337), 2049, [64, 256, 512])
    assert gemstones.sync_tokens == 8_594_128_896
    assert gemstones.num_syncs == 81


def test_shards_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="shard counts"):
        Nesting(PackedSet(8, 6, 1, 0), 7, [2, 0])
