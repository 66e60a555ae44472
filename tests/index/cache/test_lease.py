"""A claim in a store: one of many has it, and others see whether he lives."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from binidx.errors import StorageError
from binidx.index.cache import lease as claims
from binidx.index.cache.lease import (
    BUILDING,
    FAILED,
    UNPUBLISHED,
    HeldLease,
    Lease,
    LeaseWatcher,
    new_lease_record,
    parse_lease_record,
)
from binidx.storage.writing.publish import create_object, object_exists


@pytest.fixture(params=["local", "s3", "gs"])
def claim(request: pytest.FixtureRequest, tmp_path: Path) -> Lease:
    base = {
        "local": lambda: str(tmp_path),
        "s3": lambda: request.getfixturevalue("s3").fresh(),
        "gs": lambda: f"{request.getfixturevalue('gs')}/{tmp_path.name}",
    }[request.param]()
    return Lease(f"{base}/index.json-claim")


def winners(attempts: list[Any]) -> list[HeldLease]:
    with ThreadPoolExecutor(8) as threads:
        found = [each.result() for each in [threads.submit(attempt) for attempt in attempts]]
    return [each for each in found if each is not None]


def test_one_of_eight_takes_it_and_the_next_when_it_was_let_go(claim: Lease) -> None:
    for _ in range(2):
        (holding,) = winners([claim.take] * 8)
        with holding:
            word = claim.read()
            assert word == holding.word
            assert word.state == BUILDING
            assert claim.take() is None
        assert claim.read() is None


def test_one_of_eight_takes_over_what_the_dead_left(claim: Lease) -> None:
    dead = claim.take()
    assert dead is not None
    (holding,) = winners([lambda: claim.take_over(dead.word)] * 8)
    assert claim.read() == holding.word != dead.word
    assert claim.take_over(dead.word) is None, "who comes late sees that it was taken over"
    assert not object_exists(f"{claim.uri}-after-{dead.word.holder}")


def test_a_holder_at_work_is_seen_to_live_and_a_dead_one_is_not(claim: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.1)
    watch = LeaseWatcher(claim)
    with claim.take() as holding:  # type: ignore[union-attr]
        for _ in range(5):
            before, until = watch.look(), time.monotonic() + 300
            while watch.look() == before:
                assert time.monotonic() < until, "it is still the word that it was"
                time.sleep(0.02)
            assert watch.silent_seconds < 300
        assert watch.seen_at_work
    claim.write(holding.word)
    for _ in range(3):
        watch.look()
        time.sleep(0.2)
    assert watch.silent_seconds > 0.3


def test_what_the_holder_tells_of_its_work_is_there_before_the_next_beat(
    claim: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_SECONDS", 1000.0)
    with claim.take() as holding:  # type: ignore[union-attr]
        for done in ({"a": 1}, {"a": 1, "b": [2]}):
            holding.tell(done)
            until = time.monotonic() + 300
            while (word := claim.read()) is None or word.done != done:
                assert time.monotonic() < until
                time.sleep(0.02)
        assert word == holding.word


def test_who_fails_leaves_his_traceback_where_those_that_wait_find_it(claim: Lease) -> None:
    early, late, holding = LeaseWatcher(claim), LeaseWatcher(claim), claim.take()
    assert holding is not None

    def fail() -> None:
        with holding:
            early.look()
            raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        fail()
    for watch in (early, late):
        word = watch.look()
        assert word is not None
        assert word.state == FAILED
        assert "Traceback" in word.error
        assert "ValueError: no tokens" in word.error
        assert word.where == holding.word.where
    assert early.seen_at_work
    assert not late.seen_at_work
    assert claim.take() is None
    assert claim.take_over(word) is not None


def test_what_could_not_be_published_is_said(claim: Lease) -> None:
    with claim.take() as holding:  # type: ignore[union-attr]
        holding.published = False
    word = claim.read()
    assert word is not None
    assert word.state == UNPUBLISHED


def test_who_is_interrupted_lets_go(claim: Lease) -> None:
    with pytest.raises(KeyboardInterrupt), claim.take():  # type: ignore[union-attr]
        raise KeyboardInterrupt
    assert claim.read() is None


def test_a_word_of_another_version_can_be_watched_and_taken_over(claim: Lease) -> None:
    for foreign in (b"", b"[]", b'{"holder": 1, "more": 2}', b"\xff"):
        with create_object(claim.uri) as out:
            out.write(foreign)
        word = claim.read()
        assert word is not None
        assert word.state == BUILDING
        assert claim.take() is None
        taken = claim.take_over(word)
        assert taken is not None
        assert claim.read() == taken.word
    assert parse_lease_record(new_lease_record("n").format()).node == "n"


def test_where_nobody_may_write_there_is_no_claim(web: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for directory in (web.endpoint, f"{tmp_path}/file"):
        with pytest.raises(StorageError):
            Lease(f"{directory}/claim").take()
