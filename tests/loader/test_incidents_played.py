"""Three incidents on real servers, disks and ranks: the line that each logs, and the panel that shows it.

    ON_CALL_PICTURES=docs/how-to python -m pytest -s tests/loader/test_incidents_played.py

plays each for minutes, and draws its panel into that folder, as a Prometheus on the PATH answers it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.panels import scraping
from helpers.ports import free_port
from servers.latency_proxy import latency_proxy

import binidx

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
PICTURES = os.environ.get("ON_CALL_PICTURES", "")
LONG = 80 if PICTURES else 15
"""Seconds of an incident beside the time until its line: a panel has the rates of a minute."""


class Rank:
    """A running `helpers.oncall_rank`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process, self.log, self.port = process, log, int(process.stdout.readline())

    def lines(self) -> list[str]:
        """The lines of incidents, without their logger."""
        found = re.findall(r"^WARNING:binidx\.incidents:(.*)$", self.log.read_text(), re.MULTILINE)
        return [str(line) for line in found]

    def wait_for_line(self, seconds: float) -> str:
        """Wait for the first line; fail after some seconds."""
        deadline = time.monotonic() + seconds
        while not (lines := self.lines()):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"no line within {seconds} s: {self.log.read_text()[-2000:]}"
            time.sleep(0.2)
        return lines[0]

    @contextlib.contextmanager
    def drawn(self, panel: str, tmp_path: Path, *others: Rank) -> Iterator[None]:
        """Let a Prometheus scrape this rank and others in the block; draw a panel at its end, with this rank's line."""
        with scraping([each.port for each in (self, *others)], tmp_path) as panels:
            began = time.time()
            yield
            if panels is not None:
                name = re.sub(r"\W+", "-", panel.lower())
                lines = {self.log.stat().st_mtime: self.lines()[0]}
                panels.draw(panel, began, time.time(), lines, Path(PICTURES or tmp_path) / f"panel-{name}.png")

    def sums(self) -> dict[str, float]:
        """Values of /metrics by name and labels, without rank and node."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
            text = re.sub(r'(node|rank)="[^"]*",?', "", response.read().decode())
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.replace(",}", "}").replace("{}", ""): float(value) for name, _, value in rows}

    def rates(self, seconds: float) -> dict[str, float]:
        """Growth of each value in some seconds: what `increase` returns."""
        before = self.sums()
        time.sleep(seconds)
        return {name: value - before.get(name, 0.0) for name, value in self.sums().items()}


@contextlib.contextmanager
def starting(
    tmp_path: Path, *arguments: str, number: int = 0, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    log = tmp_path / f"log-{number}"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers.oncall_rank", *arguments],
            cwd=TESTS, env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    with process:
        try:
            yield process, log
        finally:
            process.kill()


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: str, number: int = 0, **variables: str) -> Iterator[Rank]:
    with starting(tmp_path, *arguments, number=number, **variables) as started:
        yield Rank(*started)


def write(prefix: str, num_tokens: int) -> str:
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(num_tokens // 8192):
            builder.add_document(np.arange(8192, dtype=np.uint16) % 500, [8192])
        builder.finalize(f"{prefix}.idx")
    return prefix


def test_a_store_that_becomes_slow_is_named_with_its_usual_time(s3: Bucket, tmp_path: Path) -> None:
    prefix = write(f"{s3.fresh()}/en", 24 << 20)  # 48 MB: more than is cached in memory
    with latency_proxy(s3.server.endpoint, delay_ms=30) as proxy, proxy.in_environment():
        with running(tmp_path, prefix) as rank, running(tmp_path, prefix, number=1, LOCAL_RANK="1") as second:
            with rank.drawn("Request time by bucket", tmp_path):
                usual = rank.rates(max(30, LONG))
                assert rank.lines() == []
                proxy.become(delay_ms=2100)
                slow_since = time.monotonic()
                line = rank.wait_for_line(30)
                print(f"{time.monotonic() - slow_since:.1f} s: {line}")
                slow = rank.rates(LONG)
            assert second.lines() == [], "the first process of a node warns of its stores"
        bucket = prefix[: prefix.index("/", 5)]
        assert re.fullmatch(rf"reads of {bucket} take [12]\.\d s \(usual \d+ ms\)", line)
        label = f'{{bucket="{bucket}"}}'
        panel = [each[f"binidx_request_seconds_sum{label}"] / each[f"binidx_request_seconds_count{label}"]
                 for each in (usual, slow)]  # fmt: skip
        print(f"panel: {panel[0]:.3f} s, then {panel[1]:.2f} s")
        assert panel[0] < 0.5 < 1.5 < panel[1]


def test_a_slow_store_is_named_while_the_store_of_the_group_hangs(s3: Bucket, tmp_path: Path) -> None:
    prefix, group = write(f"{s3.fresh()}/en", 24 << 20), process_group(2)
    with (
        latency_proxy(s3.server.endpoint, delay_ms=30) as proxy,
        proxy.in_environment(),
        starting(tmp_path, prefix, "0", "alone", RANK="0", **group) as first,
        running(tmp_path, prefix, "0", "alone", number=1, RANK="1", **group) as rank,
    ):
        Rank(*first).rates(15)
        first[0].send_signal(signal.SIGSTOP)  # the store of the group is in its process
        rank.rates(75)  # until the rank has sent requests to it, and looked again
        proxy.become(delay_ms=2100)
        assert rank.wait_for_line(30).startswith("reads of s3://")


def process_group(size: int) -> dict[str, str]:
    """Return the variables of the ranks of a new process group."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    return {**address, "WORLD_SIZE": str(size)}


SLOW_WRITES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* pwrite of files below SLOW_DIR takes the time of a disk of 2 Mbit/s, while SLOW_FILE exists */
ssize_t pwrite64(int fd, const void *data, size_t count, off_t offset) {
    static ssize_t (*own)(int, const void *, size_t, off_t);
    char link[64], path[4096];
    if (!own) own = dlsym(RTLD_NEXT, "pwrite64");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (strstr(path, getenv("SLOW_DIR")) && !access(getenv("SLOW_FILE"), F_OK)) usleep(count * 5);
    return own(fd, data, count, offset);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return pwrite64(fd, data, count, offset); }
"""


def test_a_slow_disk_of_the_cache_is_named_by_its_rate(s3: Bucket, tmp_path: Path) -> None:
    prefix, source, shim = write(f"{s3.fresh()}/en", 24 << 20), tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_WRITES)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    cache, slow = tmp_path / "cache", tmp_path / "slow"
    disk = {"BINIDX_CACHE_DIR": str(cache), "SLOW_DIR": str(cache), "SLOW_FILE": str(slow), "LD_PRELOAD": str(shim)}
    slow.touch()
    with running(tmp_path, prefix, **disk) as rank, rank.drawn("Disk of cache_dir", tmp_path):
        started = time.monotonic()
        line = rank.wait_for_line(60)
        print(f"{time.monotonic() - started:.1f} s after the start: {line}")
        found = rank.rates(LONG)
        slow.unlink()
        time.sleep(LONG if PICTURES else 0)
    assert re.fullmatch(r"the disk of cache_dir gives 0\.\d MB/s \(waited \d+ s of \d+ s\)", line)
    rate = found["binidx_cache_write_bytes_total"] / found["binidx_cache_write_seconds_sum"]
    print(f"panel: {rate / 1e6:.2f} MB/s")
    assert 0.1e6 < rate < 0.3e6


def test_the_slow_one_of_eight_ranks_is_named_beside_the_others(tmp_path: Path) -> None:
    prefix, group = write(str(tmp_path / "en"), 1 << 20), process_group(8)
    with contextlib.ExitStack() as stack:
        arguments = [(prefix, "0.5") if number == 5 else (prefix,) for number in range(8)]
        starts = [
            stack.enter_context(starting(tmp_path, *arguments[number], number=number, RANK=str(number), **group))
            for number in range(8)
        ]
        ranks = [Rank(process, log) for process, log in starts]
        started = time.monotonic()
        with ranks[5].drawn("Waiting by rank", tmp_path, *ranks[:5], *ranks[6:]):
            line = ranks[5].wait_for_line(60)  # 25 s, on a machine of eight cores
            print(f"{time.monotonic() - started:.1f} s after the last start: {line}")
            shares = [rank.rates(10)["binidx_wait_seconds_total"] / 10 for rank in ranks[4:6]]
            time.sleep(LONG if PICTURES else 0)
        print(f"panel: rank 5 {shares[1]:.1%}, rank 4 {shares[0]:.1%}")
        assert [number for number, rank in enumerate(ranks) if rank.lines()] == [5]
    assert re.fullmatch(r"rank 5 on \S+ waits \d+ %, others \d+\.\d %", line)
    assert shares[1] > 0.7 > 0.2 > shares[0]
