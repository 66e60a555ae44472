"""The table of figures."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests import their helpers by name

BENCHES = (
    "item_time",
    "from_s3",
    "clients",
    "ceiling",
    "local_cold",
    "disk_cache",
    "segments",
    "shuffle",
    "blend",
    "document_sample",
    "prefixes",
    "order",
)
# What needs more than `make bench` installs, or many minutes: only when named.
ON_REQUEST = ("peers", "sweep", "billion", "large")


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

    rows = []
    for name in arguments.benches or BENCHES:
        with tempfile.TemporaryDirectory() as directory:
            rows += import_module(f"tests.bench.{name}").rows(Path(directory))
    print(show(rows, arguments.json))


if __name__ == "__main__":
    main()
