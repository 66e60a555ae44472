"""Claims that hold for builds on which ranks agree, when all has ended."""

from __future__ import annotations

from simulation.agreement_world import LONGEST, MAX_REQUESTS, Build, Part, Ranks

from binidx.dataset.rank_agreement import OK, STORE_GONE
from binidx.errors import PeerError


def check_ranks(ranks: Ranks) -> None:
    """Check all builds of a world.

    Raises:
        AssertionError: a claim does not hold; a note has the seed, the faults and the last events.
    """
    try:
        for number, build in enumerate(ranks.builds):
            check_build(ranks, number, build)
            check_counts(ranks, number, build)
        check_requests(ranks)
        for process in ranks.processes:
            assert not process.is_alive or not process.tasks, f"{process.name}: {process.tasks}"
    except AssertionError as error:
        error.add_note("\n".join([f"seed {ranks.world.seed}", *map(str, ranks.faults), *ranks.world.trace]))
        raise


def check_build(ranks: Ranks, number: int, build: Build) -> None:
    parts, store = build.parts, ranks.store
    outcome = store.data.get(f"{number}/outcome", b"").decode()
    failed = {rank for rank, part in enumerate(parts) if part.failed is not None}
    names = {rank: ranks.processes[rank].name + ")" for rank in range(ranks.size)}
    for rank, part in enumerate(parts):
        process = ranks.processes[rank]
        if part.called is None:
            continue
        where = f"rank {rank} in build {number}: {part}"
        if part.ended is None:
            assert not process.is_alive, where
            continue
        assert part.ended <= ranks.last_fault_of(number, rank) + LONGEST, where
        error = part.error
        if error is None:
            if outcome == OK:
                assert all(other.worked is not None for other in parts), where
                continue
            # It went on without ranks that had not entered.
            assert part.worked is not None
            assert part.counted is not None, where
            early = [other for other in parts if other.entered is not None and other.entered < part.counted]
            assert len(early) < ranks.size, where
            assert all(other.worked is not None and other.worked < part.counted for other in early), where
        elif isinstance(error, PeerError):
            text = str(error)
            assert "PeerError" not in text, text
            assert text.count("failed:") <= 1, text
            assert text.count("no heartbeat") <= 1, text
            if STORE_GONE in text:
                assert names[rank] in text, text
                assert may_miss_the_store(ranks, number, rank, part), where
            else:
                assert any(names[each].rstrip(")") in text for each in failed), (failed, text)
        else:
            assert rank in failed, where


def may_miss_the_store(ranks: Ranks, number: int, rank: int, part: Part) -> bool:
    """Return whether a rank may get no response: its connection is broken, or the holder of the store had to go."""
    holder = ranks.store.holder
    if ranks.clients[rank].is_broken:
        return True
    if holder is None or holder.is_alive:
        return False
    first = ranks.processes.index(holder)
    kinds = {fault.kind for fault in ranks.faults if fault.rank == first}
    stopped = any(fault.kind == "all stop" or (fault.kind, fault.rank) == ("stops", rank) for fault in ranks.faults)
    own = ranks.builds[number].parts[first]
    failed_elsewhere = own.error is None and any(other.parts[first].error is not None for other in ranks.builds)
    is_late = part.entered is None or (own.ended is not None and part.entered > own.ended)
    return (
        not kinds.isdisjoint({"is killed", "is interrupted", "is disconnected"})
        or stopped
        or is_late
        or failed_elsewhere
    )


def check_counts(ranks: Ranks, number: int, build: Build) -> None:
    """Check that each rank that entered is informed in the end, besides dead ones."""
    entered, informed = (ranks.store.data.get(f"{number}/{name}", 0) for name in ("entered", "informed"))
    called = [rank for rank, part in enumerate(build.parts) if part.called is not None]
    dead = [rank for rank in called if build.parts[rank].ended is None or ranks.clients[rank].is_broken]
    cut = [fault.rank for fault in ranks.faults if fault.kind == "is interrupted" and fault.build == number]
    if not ranks.store.is_gone():
        assert -len(cut) <= entered - informed <= len({*dead, *cut}), (number, entered, informed, dead, cut)


def check_requests(ranks: Ranks) -> None:
    most = max(ranks.store.arrivals.values(), default=0)
    assert most <= MAX_REQUESTS + 12 * ranks.size, most
