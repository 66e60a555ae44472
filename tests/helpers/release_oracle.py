"""Releases of Megatron Core beside the installed one: each in a process of its own, over cases that ours get, too."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INSTALLED = "0.16.1"
ORACLES = Path(sys.prefix) / "oracles"
"""Folder of the others; `make .venv/.test` puts 0.19.2 there."""


TREE = "tree"
"""The tree of Megatron-LM that MEGATRON_TREE names."""


@dataclass(frozen=True)
class Case:
    """A dataset to build, and which samples of it to compare.

    Args:
        kind: name of the class, the same in both libraries.
        blend: prefixes and weights.
        sizes: least number of samples of each split.
        options: of the config.
        cache: folder of index caches of the oracle.
        seed: of the choice of samples.
    """

    kind: str
    blend: tuple[list[str], list[float] | None]
    sizes: Sequence[int | None]
    options: dict[str, Any]
    cache: str
    seed: int = 0

    def choose(self, size: int, count: int = 8) -> list[int]:
        """Numbers of some samples of `size`, the last among them."""
        if not size:
            return []
        return [*np.random.default_rng(self.seed).integers(0, size, count).tolist(), size - 1]


@dataclass(frozen=True)
class Found:
    """What a release makes of a split."""

    num_samples: int
    samples: list[dict[str, Any]]


class Release:
    """A release in a process of its own, which is kept, as its imports take 5 s of CPU time."""

    def __init__(self, version: str, folder: Path) -> None:
        """Start the process, with files of its own in a folder; skip the test if the release is not there."""
        self.version, self._errors = version, folder / "errors"
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "helpers.release_process", find_release(version)]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def make_samples(self, cases: Sequence[Case], folder: Path) -> list[list[Found | None]]:
        """Return the splits of all cases, as the release makes them; files of this call go to a folder."""
        assert self._process.stdin
        assert self._process.stdout
        given, found = folder / "cases", folder / "found"
        given.write_bytes(pickle.dumps([*cases]))
        print(given, found, sep="\t", file=self._process.stdin, flush=True)
        assert f"{found}\n" in self._process.stdout, self._last_errors()  # reads until this line, or the end
        splits: list[list[Found | None]] = pickle.loads(found.read_bytes())
        return splits

    def close(self) -> None:
        """End the process; a crash at its end is an error, too."""
        with self._process as process:
            assert process.stdin
            process.stdin.close()
        assert process.returncode == 0, self._last_errors()

    def _last_errors(self) -> str:
        """Return the end of what the process wrote to stderr."""
        return self._errors.read_text()[-4000:]


def find_release(version: str) -> str:
    """Folder of a release, which is installed if a package index is at hand; else the test is skipped."""
    if version == INSTALLED:
        return "installed"
    if version == TREE:
        return os.environ.get("MEGATRON_TREE") or pytest.skip("MEGATRON_TREE names no tree of Megatron-LM")
    folder = ORACLES / version
    if not folder.is_dir() and not install(version, folder):
        pytest.skip(f"megatron-core {version} is not in {folder}, and could not be installed")
    return str(folder)


@functools.cache
def install(version: str, folder: Path) -> bool:
    """Install a release into a folder, as other processes may do; return whether it is there. It has no syntax of 3.12,
    which releases from 0.17 on ask for."""
    folder.parent.mkdir(exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    options = ["--quiet", "--retries", "0", "--no-deps", "--ignore-requires-python", "--target", str(new)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, f"megatron-core=={version}"])
    if done.returncode == 0 and not folder.is_dir():
        with contextlib.suppress(OSError):  # another process was first
            os.rename(new, folder)
    shutil.rmtree(new, ignore_errors=True)
    return folder.is_dir()


def name_release(version: str) -> str:
    """`megatron_samples` of a release or of the tree."""
    if version != TREE:
        return version
    from binidx.compat.megatron.serve import read_release

    return read_release(Path(find_release(version)) / "megatron/core")
