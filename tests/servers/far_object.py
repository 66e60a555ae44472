"""A server of one file, or of the files of a folder, that costs nearly nothing itself, for what a client can do:
`far_object.c`, compiled when asked.

with far_object(path, delay_ms=30) as endpoint:
    open_object("s3://any/key", storage_options={"endpoint_url": endpoint, "key": "k", "secret": "s"})
"""

from __future__ import annotations

import contextlib
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@contextlib.contextmanager
def far_object(path: Path, *, delay_ms: float) -> Iterator[str]:
    """The endpoint, http://127.0.0.1:PORT; the server ends with the block, or when this process dies."""
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/far_object"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()
        subprocess.run([*compiler, "-O2", "-Wall", "-Wextra", "-pthread", "-o", program, str(SOURCE)], check=True)
        with subprocess.Popen(
            [program, str(path), str(delay_ms)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                yield f"http://127.0.0.1:{int(process.stdout.readline())}"
            finally:
                process.kill()
