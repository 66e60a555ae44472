"""Nodes of one machine: processes in network, host-name and mount namespaces of their own, forked from this process.

    with open_cluster(16, directory) as cluster:
        process = cluster.nodes[3].start(work, {"WORLD_SIZE": "16"})     # `work(record)` runs in a fork, in node 3
        process.kill()
        process.records("step")                                         # what it recorded until then

This process leaves the network of the machine: a bridge joins its own address, for servers that it starts, with one
address of each node. A node has its own host name and /dev/shm, so its processes share rates with one another only.
All namespaces end with this process. Without the right to make them (root), nodes are directories of their own, and
`is_isolated` is False.

Requires Linux. Whoever opens a cluster has no threads, as the forks would lack them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from binidx.storage.requests import node_rates

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_HOST_NAME, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
"""CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWNET of <sched.h>."""
PRIVATE_MOUNTS, DIE_WITH_PARENT = 0x44000, 1
"""MS_REC | MS_PRIVATE of <sys/mount.h>, and PR_SET_PDEATHSIG of <sys/prctl.h>."""
BRIDGE, ADDRESS = "nodes", "10.77.0.1"
LEAD_SECONDS = 0.5
"""Time from the moment at which all processes are ready to time 0."""

Record = Callable[..., object]
"""Writes a line of a kind, with values: `record("step", seconds)`. A kill cuts no line in two."""


@dataclass
class NodeProcess:
    """Process of a node, a child of this one."""

    pid: int
    file: Path
    status: int | None = None

    def kill(self) -> None:
        """Kill it with SIGKILL, unless it has ended."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def has_ended(self) -> bool:
        if self.status is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.wait()
        return self.status is not None

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def records(self, kind: str) -> list[list[Any]]:
        """Return the values of each line of a kind that it recorded."""
        lines = map(json.loads, self.file.read_text().splitlines())
        return [values for found, *values in lines if found == kind]


@dataclass
class Node:
    """Node of a cluster.

    Attributes:
        holder: process that keeps its namespaces; None without them.
    """

    number: int
    directory: Path
    holder: int | None = None
    processes: list[NodeProcess] = field(default_factory=list)

    def start(self, work: Callable[[Record], object], environment: Mapping[str, str]) -> NodeProcess:
        """Fork a process that enters the node, and does some work; its standard error goes to a file."""
        file = self.directory / f"process{len(self.processes)}"
        file.touch()
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
                os.dup2(os.open(f"{file}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
                self._enter()
                os.environ.update(environment)
                descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
                work(lambda *values: os.write(descriptor, json.dumps(values).encode() + b"\n"))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.processes.append(NodeProcess(pid, file))
        return self.processes[-1]

    def _enter(self) -> None:
        if self.holder is None:
            shared = str(self.directory / "shared" / "request-rates")
            node_rates.default_path = lambda: shared
            return
        for name in ("net", "uts", "mnt"):
            namespace = os.open(f"/proc/{self.holder}/ns/{name}", os.O_RDONLY)
            check(LIBC.setns(namespace, 0), f"setns {name}")
            os.close(namespace)


@dataclass
class Cluster:
    """Nodes, and the address under which they reach servers of this process."""

    nodes: list[Node]
    address: str
    is_isolated: bool

    @property
    def processes(self) -> list[NodeProcess]:
        return [process for node in self.nodes for process in node.processes]

    def check_ended(self, *, killed: bool = False) -> None:
        """Wait for all processes; raise RuntimeError with the errors of one that failed.

        Args:
            killed: whether kills are allowed.
        """
        for process in self.processes:
            if (status := process.wait()) and not (killed and status == -signal.SIGKILL):
                raise RuntimeError(f"{process.file}: ended with {status}\n" + Path(f"{process.file}.log").read_text())


class StartGate:
    """Time 0 of a scenario, which processes wait for when they are ready."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)  # shared with forks

    def open(self, processes: Sequence[NodeProcess]) -> float:
        """Wait until processes are ready; return a moment soon, by `time.monotonic`, at which they begin."""
        while waiting := [process for process in processes if not process.records("ready")]:
            for process in waiting:
                if process.has_ended():
                    raise RuntimeError(f"{process.file}: ended\n" + Path(f"{process.file}.log").read_text())
            time.sleep(0.02)
        begin = time.monotonic() + LEAD_SECONDS
        self._memory[:] = struct.pack("d", begin)
        return begin

    def wait(self, record: Record) -> float:
        """Record that this process is ready; return time 0 when it is known."""
        record("ready")
        while (begin := struct.unpack("d", self._memory[:])[0]) == 0.0:
            time.sleep(0.01)
        return float(begin)


def check(result: int, what: str) -> None:
    """Raise the error of a failed call of libc."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def leave_network() -> bool:
    """Move this process into a network of its own, with a bridge; return whether that was allowed."""
    if LIBC.unshare(NEW_NETWORK) != 0:
        return False
    ip(
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {ADDRESS}/16 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )
    return True


def ip(*commands: str) -> None:
    """Run commands of iproute2."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def hold_namespaces(number: int) -> int:
    """Fork a process that makes the namespaces of a node, and keeps them until it is killed; return its ID."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            check(LIBC.unshare(NEW_NETWORK | NEW_HOST_NAME | NEW_MOUNTS), "unshare")
            socket.sethostname(f"node{number}")
            check(LIBC.mount(b"none", b"/", None, PRIVATE_MOUNTS, None), "mount")
            check(LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mount /dev/shm")
            theirs.send(b"made")
            theirs.recv(1)
            ip("link set lo up", f"addr add 10.77.1.{number + 1}/16 dev eth0", "link set eth0 up")
            theirs.send(b"up")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    with ours, theirs:
        if ours.recv(4) != b"made":
            raise RuntimeError(f"node {number}: its namespaces were not made")
        name = f"node{number}"
        ip(f"link add {name} type veth peer name eth0 netns {pid}", f"link set {name} master {BRIDGE} up")
        ours.send(b".")
        if ours.recv(2) != b"up":
            raise RuntimeError(f"node {number}: its network was not set up")
    return pid


IS_ISOLATED: list[bool] = []
"""Whether this process is in a network of its own; empty before the first cluster."""


@contextlib.contextmanager
def open_cluster(num_nodes: int, directory: Path) -> Iterator[Cluster]:
    """Make nodes, with a directory for each; kill their processes at the end of the block."""
    if not IS_ISOLATED:
        IS_ISOLATED.append(leave_network())
    is_isolated, nodes = IS_ISOLATED[0], list[Node]()
    try:
        for number in range(num_nodes):
            (place := directory / f"node{number}").mkdir(parents=True)
            nodes.append(Node(number, place, hold_namespaces(number) if is_isolated else None))
        yield Cluster(nodes, ADDRESS if is_isolated else "127.0.0.1", is_isolated)
    finally:
        for node in nodes:
            for process in node.processes:
                process.kill()
            if node.holder is not None:
                os.kill(node.holder, signal.SIGKILL)
                os.waitpid(node.holder, 0)


def sleep_until(moment: float) -> None:
    """Sleep until a time of `time.monotonic`."""
    time.sleep(max(0.0, moment - time.monotonic()))
