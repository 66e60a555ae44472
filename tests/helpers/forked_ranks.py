"""Ranks of process groups, forked from one process that has imported torch: each costs a tenth of one of its own.

    python -m helpers.forked_ranks

Reads requests, one JSON object a line, and answers each with a line when all its ranks have ended:

    {"main": "helpers.rank_process", "imports": [], "how": {...}, "ranks": [{"RANK": "0"}, ...]}
    [{"out": "...", "log": "...", "status": 0}, ...]

`imports` are modules that are imported before the forks, `ranks` the variables of each rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STREAMS = {1: "out", 2: "log"}


class ForkedRanks:
    """The process from which ranks are forked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, main: str, how: dict[str, Any], ranks: list[dict[str, str]], imports: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """Call `main(how)` of a module on ranks with these variables; what each wrote, and how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        full = [{**os.environ, **rank} for rank in ranks]
        request = {"main": main, "imports": imports, "how": how, "ranks": full}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return found


@contextlib.contextmanager
def forked_ranks() -> Iterator[ForkedRanks]:
    """The process, ended afterwards with all ranks that hang."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'")
    command = [sys.executable, "-m", "helpers.forked_ranks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    try:
        yield ForkedRanks(process)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def start(main: Any, how: dict[str, Any], environment: dict[str, str], place: str) -> int:
    """Fork a rank whose output goes to files; its process."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        for stream, end in STREAMS.items():
            os.dup2(os.open(f"{place}.{end}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        os.environ.update(environment)
        gc.enable()
        main(how)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    gc.disable()  # while it imports; what it has imported, no collection of a rank looks at and copies
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            importlib.import_module(name)
        main = importlib.import_module(request["main"]).main
        gc.freeze()
        with TemporaryDirectory() as folder:
            places = [f"{folder}/{rank}" for rank in range(len(request["ranks"]))]
            started = [
                start(main, request["how"], environment, place)
                for environment, place in zip(request["ranks"], places, strict=True)
            ]
            statuses = [os.waitpid(pid, 0)[1] for pid in started]
            found = [
                {"status": status, **{end: Path(f"{place}.{end}").read_text() for end in STREAMS.values()}}
                for status, place in zip(statuses, places, strict=True)
            ]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    serve()
