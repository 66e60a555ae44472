"""Programs of other processes: what a world prints must depend on its seed alone."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_elsewhere(program: str, hash_seed: str) -> str:
    """Return what a program prints in a new process with a hash seed."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
