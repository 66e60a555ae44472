"""Description of the machine and the versions of a run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("binidx", "numpy", "torch", "megatron-core", "fsspec", "s3fs", "tokenizers", "gigatoken", "transformers")
PEERS = ("mosaicml-streaming", "litdata", "ai2-olmo-core", "pylance", "lancedb", "numpy", "torch")
PEERS_PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
GENERATIONS = {("AuthenticAMD", 25): "Zen 3 or 4", ("AuthenticAMD", 26): "Zen 5"}
"""By vendor and family of a CPU whose model name does not tell them, as in a virtual machine."""


def describe_machine() -> dict[str, Any]:
    """Return CPU, cores, memory and kernel."""
    fields = cpu_fields()
    family = int(fields.get("cpu family", 0))
    generation = GENERATIONS.get((fields.get("vendor_id", ""), family))
    name = re.sub(r"\((R|TM)\)|\s+", " ", fields.get("model name", platform.machine())).strip()
    return {
        "cpu": f"{name} ({generation})" if generation else name,
        "vendor": fields.get("vendor_id", ""),
        "family": family,
        "model": int(fields.get("model", 0)),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
    }


def cpu_fields() -> dict[str, str]:
    """Return the fields of the first core of /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version(), **installed(PACKAGES)}
    return {**found, **{f"{name} (peers)": version for name, version in peers().items()}}


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def peers() -> dict[str, str]:
    """Return the versions in the environment of `make bench-peers`, if there is one."""
    if not PEERS_PYTHON.exists():
        return {}
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PEERS}}}))"
    done = subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def describe_commit() -> str:
    """Return the commit of the working tree; "+" follows it if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def load() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def slug(machine: dict[str, Any]) -> str:
    """Return the file name of a CPU's results, without its end."""
    words = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")
    return f"{words}-{machine['cores']}-cores"
