"""The table of figures, and each bench's record in bench-results/ as soon as it ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
PATHS = [str(TESTS), str(TESTS.parent / "examples")]
sys.path[:0] = PATHS  # for helpers, servers and the demo's corpus, here and in child processes
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")]))

BENCHES = (
    "item_time",
    "parts",
    "from_s3",
    "clients",
    "ceiling",
    "step_wait",
    "local_cold",
    "disk_cache",
    "segments",
    "merge",
    "convert",
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
    "restart",
    "nodes",
    "order",
    "trace_s3",
    "bake",
)
# What needs more than `make bench` installs, or many minutes: only when named.
ON_REQUEST = (
    "peers",
    "peers_long",
    "sweep",
    "billion",
    "large",
    "cold_start_large",
    "trace",
    "transports",
    "read_plan",
    "short_documents",
    "rates",
    "engines",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "benches",
        nargs="*",
        choices=[*BENCHES, *ON_REQUEST, []],
        help=f"which of {', '.join(BENCHES)}, all by default; or {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list of the benches' records instead of a table")
    arguments = parser.parse_args()
    from tests.bench import machine
    from tests.bench.results import MEASURED, record_of
    from tests.bench.table import show

    MEASURED.mkdir(exist_ok=True)
    here, versions = machine.describe_machine(), machine.describe_versions()
    print(describe(here, versions), file=sys.stderr)
    rows, records, failed = [], [], []
    for name in arguments.benches or BENCHES:
        began, before = time.monotonic(), machine.load()
        try:
            found = run(name)
        except Exception:  # the others shall run: it may be the middle of the night
            traceback.print_exc()
            failed.append(name)
            continue
        rows += found
        taken = time.monotonic() - began
        records.append(record_of(name, found, here, versions, taken, (before, machine.load())))
        (MEASURED / f"{name}.json").write_text(json.dumps(records[-1], indent=1) + "\n")
        print(f"{name}: {taken:,.0f} s; load {before} before, {machine.load()} after", file=sys.stderr)
    print(json.dumps(records, indent=1) if arguments.json else show(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def describe(here: dict[str, Any], versions: dict[str, str]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, Linux {here['kernel']}, "
        f"load {os.getloadavg()[0]:.2f}\n{packages}"
    )


def run(name: str, rows: str = "rows") -> list[Any]:
    """Return the rows of one bench, with its conditions; its files are removed after it."""
    module = import_module(f"tests.bench.{name}")
    with tempfile.TemporaryDirectory() as directory:
        found: list[Any] = getattr(module, rows)(Path(directory))
    return [row if row.conditions else replace(row, conditions=module.CONDITIONS) for row in found]


if __name__ == "__main__":
    main()
