"""What one rank raises all raise: real gloo process groups, with kills."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.latency_proxy import latency_proxy

import binidx
from binidx.dataset.rank_agreement import agree_on_outcome
from binidx.storage.writing.publish import create_object

RANK_PROCESS = ["-m", "helpers.rank_process"]
BUILD_PROCESS = ["-m", "helpers.build_process"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def ranks(size: int, *arguments: str, place: dict[str, str] | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """A process group, as a launcher starts it."""
    place = place or {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    about = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**about, "RANK": str(rank), "BINIDX_INDEX_DIR": f"{about['BINIDX_INDEX_DIR']}/node{rank % 2}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outcome(size: int, how: dict[str, Any], place: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What each rank printed; of one that was killed nothing but its number, and all its log as "log"."""
    with ranks(size, *RANK_PROCESS, json.dumps(how), place=place) as processes:
        outputs = [process.communicate(timeout=900) for process in processes]
    found = []
    for rank, (out, log) in enumerate(outputs):
        printed = [line for line in out.splitlines() if line.startswith("{")]
        found.append({**(json.loads(printed[-1]) if printed else {"rank": rank, "error": "killed"}), "log": log})
    return found


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("place", ["tcp", "file"])
def test_what_one_rank_raises_all_raise_within_seconds_with_its_traceback(
    culprit: int, place: str, tmp_path: Path
) -> None:
    """Also where it is rank 0, with whose process the store of the group dies."""
    how = {"else": {"wait": 6000}, str(culprit): {"sleep": 1, "fail": "no tokens here"}}
    found = outcome(4, how, {"STORE": f"{tmp_path}/store"} if place == "file" else None)
    assert [each["error"] for each in found] == ["ValueError" if each == culprit else "PeerError" for each in range(4)]
    for each in found:
        assert "no tokens here" in each["text"]
        assert each["seconds"] < 1 + 200
        if each["rank"] != culprit:
            first_line = each["text"].partition("\n")[0]
            assert f"rank {culprit} (" in first_line
            assert "failed: ValueError: no tokens here" in first_line
            assert "Traceback (most recent call last)" in each["text"]
            assert 'raise ValueError(how["fail"])' in each["text"]


def test_an_error_is_known_to_those_that_were_done_already() -> None:
    found = outcome(4, {"else": {}, "3": {"sleep": 2, "fail": "too late"}})
    assert [each["error"] for each in found] == ["PeerError"] * 3 + ["ValueError"]
    assert max(each["seconds"] for each in found) < 2 + 200


def test_a_rank_that_comes_after_another_one_failed_does_not_begin(tmp_path: Path) -> None:
    how = {"else": {}, "1": {"fail": "no tokens here"}, "2": {"late": 3, "sleep": 6000}}
    found = outcome(3, how, {"STORE": f"{tmp_path}/store"})
    assert [each["error"] for each in found] == ["PeerError", "ValueError", "PeerError"]
    assert "no tokens here" in found[2]["text"]
    assert found[2]["seconds"] < 3 + 200


def test_a_rank_that_comes_when_the_store_has_gone_is_told_so() -> None:
    found = outcome(3, {"else": {}, "1": {"fail": "no tokens here"}, "2": {"late": 8, "sleep": 6000}})
    assert found[2]["error"] == "PeerError"
    assert "the store of the process group does not answer" in found[2]["text"]


def test_all_go_on_together_when_all_are_done_as_often_as_they_come() -> None:
    found = outcome(4, {"else": {}, "1": {"sleep": 1}, "again": True})
    assert [each["error"] for each in found] == [None] * 4
    assert min(each["seconds"] for each in found) >= 2, "who is done waits for the one that sleeps, twice"
    assert max(each["seconds"] for each in found) < 2 + 200


def test_a_rank_that_is_killed_is_missed_by_all() -> None:
    how = {"HEARTBEAT_TIMEOUT_SECONDS": 5, "HEARTBEAT_SECONDS": 0.3, "POLL_SECONDS": 0.3}
    found = outcome(4, {**how, "else": {}, "2": {"sleep": 0.5, "kill": True}})
    assert [each["error"] for each in found] == ["PeerError", "PeerError", "killed", "PeerError"]
    for each in found:
        if each["rank"] != 2:
            assert "rank 2 (" in each["text"]
            assert "no heartbeat for" in each["text"]
            assert each["seconds"] < 0.5 + 2 + 200


def test_the_death_of_the_rank_that_has_the_store_is_seen_by_all() -> None:
    how = {"HEARTBEAT_SECONDS": 0.3, "POLL_SECONDS": 0.3}
    found = outcome(3, {**how, "else": {"wait": 6000}, "0": {"sleep": 0.5, "kill": True}})
    assert [each["error"] for each in found] == ["killed", "PeerError", "PeerError"]
    for each in found[1:]:
        assert "the store of the process group does not answer" in each["text"]
        assert each["seconds"] < 0.5 + 200


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    found = outcome(3, {"ABSENT_SECONDS": 1, "else": {}, "2": {"absent": 10}})
    assert [each["error"] for each in found] == [None] * 3
    for each in found[:2]:
        assert each["seconds"] < 1 + 7
        assert "1 of 3 ranks have not entered build()" in each["log"]


def test_without_a_process_group_it_is_a_plain_block() -> None:
    with pytest.raises(ValueError, match="mine"), agree_on_outcome():
        raise ValueError("mine")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index of it is worth a cache: more than 2^15 sequences."""
    prefix = str(tmp_path_factory.mktemp("pair") / "pair")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4, 40_000)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_document(rng.integers(0, 100, int(lengths.sum()), np.uint16), lengths.tolist())
        builder.finalize(f"{prefix}.idx")
    return prefix


def built(pair: str, cache: str, tmp_path: Path, **how: Any) -> tuple[list[dict[str, Any]], int]:
    """What four ranks on two nodes came to, and how many of them built."""
    (tmp_path / "log").touch()
    asked = {"prefix": pair, "cache": cache, "samples": 20_000, "sequence_length": 8, "log": f"{tmp_path}/log", **how}
    with ranks(4, *BUILD_PROCESS, json.dumps(asked)) as processes:
        found = [json.loads(process.communicate(timeout=900)[0].splitlines()[-1]) for process in processes]
    return found, len((tmp_path / "log").read_text().splitlines())


def test_of_the_ranks_of_two_nodes_one_builds_and_the_other_node_fetches_it_once(
    pair: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_BYTES", "100000000")  # however full the disk is
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        base = s3.fresh()
        for suffix in (".bin", ".idx"):
            with create_object(f"{base}/pair{suffix}") as out:
                out.write(Path(f"{pair}{suffix}").read_bytes())
        proxy.reset()
        found, builders = built(f"{base}/pair", f"{base}/cache", tmp_path)
        log = proxy.log()
    assert len({str(each["digest"]) for each in found}) == 1
    assert builders == 1
    for name in ("document_index.npy", "sample_index.npy", "shuffle_index.npy", "binidx.json"):
        assert sum(each.method == "PUT" and each.path.endswith(name) for each in log) == 1
    for name in ("document_index.npy", "sample_index.npy", "shuffle_index.npy"):
        assert sum(each.method == "GET" and each.path.endswith(name) for each in log) == 1, "the builder's node has it"
    assert sum(each.method == "GET" and each.path.endswith("pair.idx") for each in log) == 2


def test_what_the_building_rank_raises_is_raised_by_all_that_wait_for_it(pair: str, tmp_path: Path) -> None:
    found, builders = built(pair, f"{tmp_path}/cache", tmp_path, fail="no room for an index", slow=3)
    assert builders == 1
    assert sorted(each["error"] for each in found) == ["PeerError"] * 3 + ["ValueError"]
    for each in found:
        assert "no room for an index" in each["text"]
    assert max(each["ended"] for each in found) - min(each["ended"] for each in found) < 200
