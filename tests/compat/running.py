"""Training scripts in processes of their own: with Megatron's own datasets, and with ours in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.ports import free_port

HERE = Path(__file__).parent
DROP_IN = ("-m", "binidx.compat.megatron")


@dataclass(frozen=True)
class Ranks:
    """The processes of one run."""

    processes: list[subprocess.Popen[str]]
    logs: list[str] = field(default_factory=list)

    def lines(self) -> list[list[dict[str, Any]]]:
        """What each rank printed, once all have ended well."""
        said = [process.communicate(timeout=1200) for process in self.processes]
        for process, (_, errors) in zip(self.processes, said, strict=True):
            assert process.returncode == 0, errors[-3000:]
            self.logs.append(errors)
        return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in said]


def start(arguments: list[str], ranks: int = 1, beside: Path = HERE / "megatron_lm") -> Ranks:
    """`python ARGUMENTS` on each rank of a gloo group; `beside` is the first place of its imports."""
    paths = os.pathsep.join([str(beside), os.environ.get("PYTHONPATH", "")])
    group = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return Ranks(
        [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **group, "RANK": str(rank), "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
    )
