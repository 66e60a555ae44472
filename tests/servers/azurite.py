"""A real server of Azure's blob protocol: Azurite, in memory, on loopback.

    npm install --global --prefix .venv azurite      186 MB; `make check` does it where there is npm

    with azurite() as server, server.in_environment():
        server.make_container("corpus")
        binidx.IndexedDataset("abfs://corpus/en")

Starts in 2 s; its telemetry is off. Start it from the main thread: Linux kills it with the thread that started it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers.seaweed import LAUNCH, free_ports

ACCOUNT = "binidx"
SECONDS_TO_START = 900.0


@dataclass(frozen=True)
class AzureServer:
    """The running server, and how adlfs finds it."""

    endpoint: str
    key: str

    def connection(self, endpoint: str | None = None) -> str:
        """Return the connection string, of a proxy before the server if its endpoint is given."""
        account = f"AccountName={ACCOUNT};AccountKey={self.key}"
        return f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={endpoint or self.endpoint}/{ACCOUNT};"

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Let adlfs speak to the server, in this process and its children."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", self.connection())
            yield

    def make_container(self, name: str) -> str:
        """Create a container and return its URI."""
        import fsspec

        fsspec.filesystem("abfs", connection_string=self.connection()).mkdir(name)
        return f"abfs://{name}"


def find_azurite() -> str:
    """Return the path of the program; skip the test where it is missing."""
    pytest.importorskip("adlfs", reason="needs adlfs; pip install 'binidx[azure]'")
    found = shutil.which("azurite-blob", path=sysconfig.get_path("scripts")) or shutil.which("azurite-blob")
    if not found:
        pytest.skip("needs the program azurite-blob; npm install --global --prefix .venv azurite@3.35.0")
    return found


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[AzureServer]:
    """Run it in a directory; it ends with the block, or when this thread dies."""
    program, [port], key = find_azurite(), free_ports(1), base64.b64encode(secrets.token_bytes(64)).decode()
    given = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            LAUNCH,
            str(os.getpid()),
            program,
            *given,
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"},
        start_new_session=True,
    ) as process:
        try:
            wait_until_listening(process)
            yield AzureServer(f"http://127.0.0.1:{port}", key)
        finally:
            process.kill()


def wait_until_listening(process: subprocess.Popen[bytes]) -> None:
    """Return when it says so."""
    assert process.stdout is not None
    said = b""
    deadline = time.monotonic() + SECONDS_TO_START
    while b"successfully listens" not in said:
        line = process.stdout.readline()
        said += line
        if not line or time.monotonic() > deadline:
            raise RuntimeError(f"Azurite did not start: {said.decode(errors='replace')[-2000:]}")
