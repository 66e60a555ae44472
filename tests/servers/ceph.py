"""A second real S3 server: Ceph's radosgw over one monitor and one OSD in memory, on loopback.

    apt install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common        61 MB, Debian or Ubuntu
    make test-ceph                                                                   the tests of storage against it

    with ceph_server(directory) as server, server.in_environment(): ...

It is what many clusters run, and differs from SeaweedFS in ways that clients meet: it takes `If-None-Match` on single
PUTs only, and its frontend answers in 44 ms instead of 1 unless it is told not to wait for more (`tcp_nodelay`). The
programs run as whoever starts them, without keys between them, and keep everything in `directory`. Starts in 12 s; not
part of every run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from servers.seaweed import LAUNCH, S3Server, answers, free_ports, s3_client

SECONDS_TO_START = 120.0

CONFIGURATION = """
# The map as a file, so that clients know the cluster's fsid before they ask: else some are refused, "wrong fsid".
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon}/0]
monmap = {directory}/monmap
auth cluster required = none
auth service required = none
auth client required = none
run dir = {directory}
log file = {directory}/$name.log
admin socket = {directory}/$name.asok
pid file =
crash dir = {directory}
setuser =
setgroup =
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon warn on insecure global id reclaim = false
mon warn on insecure global id reclaim allowed = false
osd objectstore = memstore
memstore device bytes = 4294967296
osd max object name len = 256
osd max object namespace len = 64
osd class default list = *
osd class load list = *

[mon.a]
mon data = {directory}/mon
public addr = 127.0.0.1:{mon}

[osd.0]
osd data = {directory}/osd

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw enable usage log = false
rgw enable ops log = false
"""


@contextlib.contextmanager
def ceph_server(directory: Path) -> Iterator[S3Server]:
    """Run it; every program ends with the block, or when this thread dies."""
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    mon, rgw = free_ports(2)
    cluster = Cluster(directory)
    cluster.configure(mon, rgw)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start_monitor(mon)
        cluster.start_osd()
        key, secret = secrets.token_hex(8), secrets.token_hex(16)
        cluster.make_user(key, secret)
        process = cluster.start("radosgw", "--name=client.rgw")
        server = S3Server(f"http://127.0.0.1:{rgw}", key, secret, process.pid)
        wait_for(server, cluster)
        yield server


class Cluster:
    """The programs that run, and their configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "ceph.conf"
        self.fsid = str(uuid.uuid4())
        self.running: list[subprocess.Popen[bytes]] = []

    def configure(self, mon: int, rgw: int) -> None:
        for name in ("mon", "osd"):
            (self.directory / name).mkdir()
        self.file.write_text(CONFIGURATION.format(fsid=self.fsid, mon=mon, rgw=rgw, directory=self.directory))

    def start_monitor(self, port: int) -> None:
        monmap = str(self.directory / "monmap")
        address = f"[v1:127.0.0.1:{port}]"
        self.run("monmaptool", "--create", "--clobber", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self.start("ceph-mon", "-i", "a")

    def start_osd(self) -> None:
        self.run("ceph", "--connect-timeout=60", "osd", "new", self.fsid)
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", self.fsid)
        self.start("ceph-osd", "-i", "0")

    def make_user(self, key: str, secret: str) -> None:
        given = ["--uid=binidx", "--display-name=binidx", f"--access-key={key}", f"--secret-key={secret}"]
        self.run("radosgw-admin", "--name=client.rgw", "user", "create", *given)

    def run(self, program: str, *arguments: str) -> str:
        """Its output, when it has ended well."""
        command = [program, f"--conf={self.file}", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_START, check=False)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: ended with {ended.returncode}\n{ended.stderr[-2000:]}")
        return ended.stdout

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCH, str(os.getpid()), f"/usr/bin/{program}", f"--conf={self.file}"]
        with (self.directory / f"{program}.out").open("wb") as output:
            process = subprocess.Popen(
                [*command, "--foreground", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.running):
            process.kill()
            process.wait()


def wait_for(server: S3Server, cluster: Cluster) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    client = s3_client(server.endpoint, server.key, server.secret)
    try:
        while not answers(client):
            if time.monotonic() > deadline or any(each.poll() is not None for each in cluster.running):
                status = cluster.run("ceph", "--connect-timeout=5", "status")
                raise RuntimeError(f"radosgw does not answer at {server.endpoint}; {status}")
            time.sleep(0.2)
    finally:
        client.close()
