"""The packed order against a slow model of the loaders: iterators that read file after file, as the originals do."""

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest

from binidx.errors import ConfigError
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet, WorkerOrder, order_files

Block = tuple[int, int, int]


def model_worker(of: PackedSet, shard: int, num_shards: int) -> Iterator[Block]:
    """(file, block, pass), by reading group after group."""
    usable = of.num_files // num_shards * num_shards
    mine = list(range(of.num_files))[shard:usable:num_shards]
    rng, turn, start = np.random.default_rng(of.seed), 0, 0
    while True:
        if len(mine) - start < of.n_chunks:
            if of.at_end is AtEnd.stop:
                return
            turn, start = turn + 1, 0
            if of.at_end is AtEnd.repeat:
                rng = np.random.default_rng(of.seed)
        count = of.n_chunks * of.num_blocks
        for number in rng.permutation(count) if of.shuffle else range(count):
            yield mine[start + int(number) // of.num_blocks], int(number) % of.num_blocks, turn
        start += of.n_chunks


def model_mix(run: PackedRun, worker: int) -> Iterator[tuple[int, int, int, int]]:
    count = max(1, run.num_workers)
    streams = [model_worker(each, run.rank * count + worker, run.num_ranks * count) for each in run.sets]
    draws = random.Random(run.seed)
    weights = run.weights or [1 / len(streams)] * len(streams)
    while True:
        (number,) = draws.choices(range(len(streams)), weights=weights, k=1)
        block = next(streams[number], None)
        if block is None:
            return
        yield (number, *block)


def model_rank(run: PackedRun) -> Iterator[tuple[int, int, int, int]]:
    """torch's DataLoader over an iterable dataset: micro-batches of the workers in turn, the last of each short."""
    workers = [model_mix(run, worker) for worker in range(max(1, run.num_workers))]
    while workers:
        batches = [(worker, list(islice(worker, run.micro_batch_size))) for worker in workers]
        for _, batch in batches:
            yield from batch
        workers = [worker for worker, batch in batches if len(batch) == run.micro_batch_size]


def random_run(choose: random.Random, num_sets: int) -> PackedRun:
    at_end = choose.choice(list(AtEnd))
    num_ranks, num_workers, n_chunks = choose.choice([1, 2, 4]), choose.choice([0, 1, 2, 3]), choose.choice([1, 2, 4])
    least = num_ranks * max(1, num_workers) * n_chunks
    sets = [
        PackedSet(
            num_files=least + choose.randrange(2 * least),
            num_blocks=choose.randrange(1, 9),
            n_chunks=n_chunks,
            seed=choose.randrange(2**31),
            shuffle=choose.random() < 0.8,
            at_end=at_end,
        )
        for _ in range(num_sets)
    ]
    weights = choose.choice([None, [choose.random() + 0.01 for _ in sets]])
    rank = choose.randrange(num_ranks)
    return PackedRun(sets, weights, choose.randrange(2**40), rank, num_ranks, num_workers, choose.randrange(1, 6))


@pytest.mark.parametrize("seed", range(150))
def test_any_stretch_of_a_run_is_what_the_loaders_serve(seed: int) -> None:
    choose = random.Random(seed)
    run = random_run(choose, num_sets=1 + seed % 3)
    served = list(islice(model_rank(run), 700))
    if run.length is not None:
        assert run.length == sum(1 for _ in model_rank(run))
    assert list(map(tuple, run.blocks(0, len(served)).tolist())) == served
    for _ in range(5):
        first = choose.randrange(len(served))
        stop = min(len(served), first + choose.randrange(60))
        assert list(map(tuple, run.blocks(first, max(first, stop)).tolist())) == served[first : max(first, stop)]


def test_a_position_far_on_needs_nothing_before_it() -> None:
    of = PackedSet(num_files=4 * 81, num_blocks=2048, n_chunks=4, seed=3, at_end=AtEnd.wrap)
    order, again = WorkerOrder(of, 0, 1), WorkerOrder(of, 0, 1)
    whole = order.blocks(0, 3 * order.pass_blocks)
    for position in (0, 8191, 8192, 500_000, 3 * order.pass_blocks - 1, 17):
        assert (again.blocks(position, position + 1)[0] == whole[position]).all()


def test_threads_may_share_an_order() -> None:
    of = PackedSet(num_files=40, num_blocks=16, n_chunks=2, seed=3, at_end=AtEnd.wrap)
    shared, whole = WorkerOrder(of, 0, 1), WorkerOrder(of, 0, 1).blocks(0, 2000)

    def work(seed: int) -> bool:
        choose = random.Random(seed)
        firsts = [choose.randrange(1990) for _ in range(60)]
        return all((shared.blocks(first, first + 10) == whole[first : first + 10]).all() for first in firsts)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_numpy_still_permutes_as_it_did_for_the_gemstones() -> None:
    order = WorkerOrder(PackedSet(num_files=4, num_blocks=2048, n_chunks=4, seed=1337), 0, 1).blocks(0, 8192)
    numbers = order[:, 0] * 2048 + order[:, 1]
    assert numbers[:8].tolist() == [6303, 7320, 5076, 2261, 4933, 4235, 5116, 4774]
    assert hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest().startswith("347cba66443082ae")


def test_files_are_listed_as_python_shuffles_them() -> None:
    names = [f"{number:02d}" for number in range(12)]
    assert list(map(int, order_files(reversed(names), 1337))) == [6, 0, 1, 4, 10, 7, 3, 11, 2, 5, 8, 9]


def test_what_cannot_be_served_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give each of 4 workers 1, needs 2"):
        WorkerOrder(PackedSet(7, 1, 2, 0), 0, 4)
    stream = WorkerOrder(PackedSet(2, 3, 1, 0), 0, 1)
    with pytest.raises(IndexError, match="it has 6"):
        stream.blocks(5, 7)
    with pytest.raises(IndexError, match="it has 6"):
        PackedRun([PackedSet(2, 3, 1, 0)], None, 0, 0, 1, 0, 4).blocks(0, 7)
