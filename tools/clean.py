"""Staging files that killed processes left on disks, in directories and all below: list them, or remove them.

Commands and runs write a file NAME under NAME.<32 hex digits>.tmp first. The next one that writes to the same directory
removes what a killed one left there; this is for directories to which nothing is written any more. A file that a
process of this node is writing is kept, and a file of another node is left out until it has not changed for a day.

exit status: 0 done, 2 the call is wrong

example:
  binidx clean /data/corpus
  binidx clean /data/corpus --remove
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

from binidx.errors import ObjectNotFoundError
from binidx.storage.cache.block_files import remove_unlocked
from binidx.storage.writing.staging import list_staging_files

from ._command import command, print_result
from ._display import counts, human_bytes, human_seconds


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("directories", nargs="+", metavar="DIR", help="a directory of this machine")
    options.add_argument("--remove", action="store_true", help="remove those that no process writes")


def clean(arguments: argparse.Namespace) -> None:
    """List the staging files below the directories, or remove them; print them."""
    files: list[dict[str, Any]] = []
    now = time.time()
    for directory in arguments.directories:
        if not os.path.isdir(directory):
            raise ObjectNotFoundError(f"{directory}: no such directory")
        for folder, _, _ in os.walk(directory):
            for path, _ in list_staging_files(folder, now):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)
                    removed = arguments.remove and remove_unlocked(path)
                    age = max(0.0, now - status.st_mtime)
                    files.append({"path": path, "num_bytes": status.st_size, "age_seconds": age, "removed": removed})
    lines = []
    for file in files:
        state = "removed" if file["removed"] else "in use" if arguments.remove else "left"
        written = f"written {human_seconds(file['age_seconds'])} ago"
        lines.append(f"{file['path']}\n  {human_bytes(file['num_bytes'])}, {written}, {state}")
    lines.append(f"{counts(files=len(files))}, {human_bytes(sum(file['num_bytes'] for file in files))}")
    print_result({"files": files}, "\n".join(lines), arguments)


main = command("clean", __doc__, add_options, clean)
