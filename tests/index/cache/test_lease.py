"""Leases in a store: one of many processes holds one, and others see whether it is renewed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from binidx.errors import StorageError
from binidx.index.cache.build_lock import HeldLease, Lease, new_lease_record
from binidx.index.cache.lease import (
    BUILDING,
    FAILED,
    LEASE_FILE,
    NO_LEASE,
    UNPUBLISHED,
    LeaseRecord,
    LeaseWait,
    parse_lease_record,
)
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.steps import Steps, run
from binidx.storage.writing.publish import create_object


@pytest.fixture(params=["local", "s3", "gs"])
def lease(request: pytest.FixtureRequest, tmp_path: Path) -> Lease:
    base = {
        "local": lambda: str(tmp_path),
        "s3": lambda: request.getfixturevalue("s3").fresh(),
        "gs": lambda: f"{request.getfixturevalue('gs')}/{tmp_path.name}",
    }[request.param]()
    return Lease(Location.of(f"{base}/index.json-claim"))


def winners(attempts: list[Any]) -> list[HeldLease]:
    with ThreadPoolExecutor(8) as threads:
        found = [each.result() for each in [threads.submit(attempt) for attempt in attempts]]
    return [each for each in found if each is not None]


def test_one_of_eight_acquires_it_and_another_when_it_is_released(lease: Lease) -> None:
    for _ in range(2):
        (held,) = winners([lambda: run(lease.acquire())] * 8)
        with held:
            record = run(lease.read())
            assert record == held.record
            assert record.state == BUILDING
            assert run(lease.acquire()) is None
        assert run(lease.read()) == NO_LEASE


def test_one_of_eight_takes_over_an_expired_lease(lease: Lease) -> None:
    dead = run(lease.acquire())
    assert dead is not None
    (held,) = winners([lambda: run(lease.take_over(dead.record))] * 8)
    assert run(lease.read()) == held.record != dead.record
    assert run(lease.take_over(dead.record)) is None, "a late process sees that it was taken over"
    assert not object_exists(Location.of(f"{lease.location}-after-{dead.record.holder}"))


class OftenRenewed(Lease):
    beat_seconds = 0.1


def poll(wait: LeaseWait, lease: Lease) -> LeaseRecord:
    wait.polled(run(lease.read()), time.monotonic())
    return wait.record


def test_a_working_holder_renews_its_lease_and_a_dead_one_does_not(lease: Lease) -> None:
    lease, wait = OftenRenewed(lease.location), LeaseWait("")
    with run(lease.acquire()) as held:  # type: ignore[union-attr]
        for _ in range(5):
            before, until = poll(wait, lease), time.monotonic() + 300
            while poll(wait, lease) == before:
                assert time.monotonic() < until, "it is still the same record"
                time.sleep(0.02)
            assert wait.silent_seconds < 300
    run(lease.write(held.record))
    for _ in range(3):
        poll(wait, lease)
        time.sleep(0.2)
    assert wait.silent_seconds > 0.3


def test_a_failed_holder_leaves_its_traceback_for_the_waiting_processes(lease: Lease) -> None:
    early, late, held = LeaseWait(""), LeaseWait(""), run(lease.acquire())
    assert held is not None

    def fail() -> None:
        with held:
            poll(early, lease)
            raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        fail()
    for wait in (early, late):
        record = poll(wait, lease)
        assert record.state == FAILED
        assert "Traceback" in record.error
        assert "ValueError: no tokens" in record.error
        assert record.where == held.record.where
    assert early.next_step() == "raise"
    assert late.next_step() == "take over"
    assert run(lease.acquire()) is None
    assert run(lease.take_over(record)) is not None


def test_a_result_that_could_not_be_published_is_recorded(lease: Lease) -> None:
    with run(lease.acquire()) as held:  # type: ignore[union-attr]
        held.published = False
    record = run(lease.read())
    assert record is not None
    assert record.state == UNPUBLISHED


def test_an_interrupted_holder_releases_its_lease(lease: Lease) -> None:
    with pytest.raises(KeyboardInterrupt), run(lease.acquire()):  # type: ignore[union-attr]
        raise KeyboardInterrupt
    assert run(lease.read()) == NO_LEASE


def test_a_record_of_another_version_can_be_watched_and_taken_over(lease: Lease) -> None:
    for foreign in (b"", b"[]", b'{"holder": 1, "more": 2}', b"\xff"):
        with create_object(lease.location) as out:
            out.write(foreign)
        record = run(lease.read())
        assert record is not None
        assert record.state == BUILDING
        assert run(lease.acquire()) is None
        taken = run(lease.take_over(record))
        assert taken is not None
        assert run(lease.read()) == taken.record
    assert parse_lease_record(LEASE_FILE.encode(run(new_lease_record("n")))).node == "n"


def test_a_holder_is_no_path() -> None:
    record = parse_lease_record(b'{"holder": "x/../../../etc/cron.d/x"}')
    assert record.holder.startswith("unknown-")


def test_a_store_that_cannot_be_written_to_has_no_lease(web: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for directory in (web.endpoint, f"{tmp_path}/file"):
        with pytest.raises(StorageError):
            run(Lease(Location.of(f"{directory}/claim")).acquire())


def test_a_takeover_does_not_wait_for_a_process_of_its_node_that_was_killed_in_its_own(lease: Lease) -> None:
    dead = run(lease.acquire())
    assert dead is not None
    run(lease._marker(dead.record.holder).write(run(new_lease_record("node7"))))
    assert run(lease.take_over(dead.record)) is None
    assert run(lease.take_over(dead.record, "node8")) is None
    held = run(lease.take_over(dead.record, "node7"))
    assert held is not None
    assert run(lease.read()) == held.record
    assert not object_exists(lease._marker(dead.record.holder).location)


class KilledAtItsEnd(Lease):
    """Lease of a process that is killed before it removes the marker of its takeover."""

    def remove_marker(self, ended: LeaseRecord) -> Steps[None]:
        yield from ()


def test_a_takeover_removes_the_marker_of_a_process_that_was_killed_at_the_end_of_its_own(lease: Lease) -> None:
    dead = run(lease.acquire())
    assert dead is not None
    second = run(KilledAtItsEnd(lease.location).take_over(dead.record))
    assert second is not None
    assert object_exists(lease._marker(dead.record.holder).location)
    held = run(lease.take_over(second.record))
    assert held is not None
    for holder in (dead.record.holder, second.record.holder):
        assert not object_exists(lease._marker(holder).location)
