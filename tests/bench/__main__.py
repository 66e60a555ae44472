"""The table of figures, and each bench's own in bench-results/ as soon as it ends."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent.parent)
sys.path.insert(0, TESTS)  # for helpers and servers, here and in child processes
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))

BENCHES = (
    "item_time",
    "from_s3",
    "clients",
    "ceiling",
    "step_wait",
    "local_cold",
    "disk_cache",
    "segments",
    "merge",
    "preprocess",
    "text_to_tokens",
    "shuffle",
    "shuffle_tokens",
    "read_text",
    "blend",
    "document_sample",
    "masked",
    "prefixes",
    "cold_start",
    "nodes",
    "order",
)
# What needs more than `make bench` installs, or many minutes: only when named.
ON_REQUEST = ("peers", "sweep", "billion", "large", "cold_start_large", "trace")
RESULTS = Path("bench-results")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "benches",
        nargs="*",
        choices=[*BENCHES, *ON_REQUEST, []],
        help=f"which of {', '.join(BENCHES)}, all by default; or {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    arguments = parser.parse_args()
    from tests.bench.table import show

    rows, failed = [], []
    for name in arguments.benches or BENCHES:
        began = time.monotonic()
        try:
            found = run(name)
        except Exception:  # the others shall run: it may be the middle of the night
            traceback.print_exc()
            failed.append(name)
            continue
        rows += found
        (RESULTS / f"{name}.json").write_text(show(found, as_json=True))
        print(f"{name}: {time.monotonic() - began:,.0f} s", file=sys.stderr)
    print(show(rows, arguments.json))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str) -> list[Any]:
    """The rows of one bench; what it wrote is gone after it."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        found: list[Any] = import_module(f"tests.bench.{name}").rows(Path(directory))
    return found


if __name__ == "__main__":
    main()
