"""A wheel in fresh environments, with core dependencies alone and with each extra: `make test-install`.

    python tests/install_matrix.py WHEEL [EXTRA ...]

Each environment runs every command (`helpers/installs.py`); one with s3 and torch also uses the package of
how-to/publish-a-package from its wheel. Minutes, and 6 GB of disk at most: an environment is removed before the next
one, and torch is installed once, with the extras that need it added to it one by one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.installs import COMMANDS, EXTRAS, check_api, check_commands, expand, write_data  # noqa: E402
from helpers.published import check_published  # noqa: E402
from servers.seaweed import s3_server  # noqa: E402

NOT_INSTALLED = {"test", "demo"}
"""Extras for a clone."""
ROW = "{:40} {:>8} {:>9} {:>8} {:>6}"
Asked = dict[str, tuple[str, ...]]


def groups() -> list[list[str]]:
    """Return the extras of each environment, in the order in which they are added to it; the first has none."""
    installed = [extra for extra in EXTRAS if extra not in NOT_INSTALLED]
    heavy = [extra for extra in installed if "torch" in expand([extra])]
    return [[], *([extra] for extra in installed if extra not in heavy), heavy]


def call(command: Sequence[str]) -> None:
    """Run a command; an error shows its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")


def check(python: Path, wheel: Path, extras: list[str], data: dict[str, str], folder: Path) -> Asked:
    """Install the wheel with some extras, check it and print its row; return the extras that each command names."""
    began, target = time.monotonic(), f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    call([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", target])
    installed = time.monotonic()
    asked = check_commands(python, extras, data, folder)
    check_api(python, expand(extras), data, folder)
    if {"s3", "torch"} <= expand(extras):
        with s3_server(folder / "s3") as server, server.in_environment():
            check_published(python, folder / "published", f"{server.make_bucket('published')}/{len(extras)}")
    site = python.parents[1]
    size = int(subprocess.run(["du", "-sm", site], capture_output=True, text=True, check=True).stdout.split()[0])
    count = len([*site.glob("lib/python*/site-packages/*.dist-info")])
    seconds = [f"{each:.0f} s" for each in (installed - began, time.monotonic() - installed)]
    print(ROW.format(", ".join(extras) or "core", count, f"{size:,} MB", *seconds), flush=True)
    return asked


def table(found: dict[str, Asked]) -> str:
    """Return the table of commands: what each asks for with core dependencies alone, and the extras it works with."""
    rows = [("command", "core alone", "works with")]
    for command in found["core"]:
        core, *others = (each.get(command) for each in found.values())
        works = [name for name, asked in zip([*found][1:], others, strict=True) if asked == ()]
        said = f"asks for {' or '.join(core)}" if core else "works"
        needed = ", ".join(works) or " + ".join(dict(COMMANDS)[command].split())
        rows.append((command.replace("{", "").replace("}", ""), said, needed if core else "all"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def main(wheel: str, *only: str) -> int:
    """Print a row for each environment: extras, packages, size, seconds to install and to check; then the commands."""
    found: dict[str, Asked] = {}
    print(ROW.format("extras", "packages", "size", "install", "check"), flush=True)
    with tempfile.TemporaryDirectory(prefix="binidx-install-") as text:
        folder = Path(text)
        (folder / "data").mkdir()
        data = write_data(folder / "data")
        for group in groups():
            if only and group and not {*only} & {*group}:
                continue
            venv.EnvBuilder(symlinks=True).create(folder / "venv")
            for number in range(len(group) or 1):
                extras = group[: number + 1]
                place = folder / f"{number}-{len(group)}"
                name = extras[-1] if extras else "core"
                found[name] = check(folder / "venv/bin/python", Path(wheel).resolve(), extras, data, place)
                shutil.rmtree(place)
            shutil.rmtree(folder / "venv")
    print("", table(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
