"""What a user installs: an sdist that builds, and the wheel it builds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE_IT = """
import binidx, binidx.native.permutations, binidx.tools, numpy, sys
assert binidx.__file__.startswith(sys.argv[1]), binidx.__file__
array = numpy.arange(10, dtype=numpy.int32)
binidx.native.permutations.RandomState(1234).shuffle(array)
expected = numpy.arange(10, dtype=numpy.int32)
numpy.random.RandomState(1234).shuffle(expected)
assert (array == expected).all()
sys.exit(binidx.tools.main(["inspect", "--help"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel built from it, with no file that git does not know."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_the_wheel_serves_every_later_python(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name


def test_the_wheel_works_by_itself(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"}
    assert names == {"binidx"}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE_IT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "binidx inspect" in result.stdout
