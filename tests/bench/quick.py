"""Ratios of the short benches beside the last committed ones: `make bench-quick`, under three minutes on two cores.

Each ratio is of both sides in one run, so it says more than seconds do on another machine or a busy one. One round of
most: a ratio that moved by more than NOISE is marked; run its bench whole before you believe it.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

from tests.bench import __main__ as bench
from tests.bench.machine import describe_machine, describe_versions
from tests.bench.results import change, find_row, nearest, read_committed

BENCHES = ("item_time", "blend", "shuffle", "document_sample", "prefixes", "merge", "text_to_tokens", "from_s3")
ROUNDS = {"blend": 3}
"""Rounds of a bench that does not warm up by itself: its first one touches new memory. 1 of all others."""
NOISE = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quick", description=__doc__)
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help=f"which of {', '.join(BENCHES)}")
    names = parser.parse_args().benches or BENCHES
    here = describe_machine()
    committed = nearest(here, read_committed())
    print(bench.describe(here, describe_versions()), file=sys.stderr)
    there = committed["machine"] if committed else None
    print(f"committed: {there['cpu']}, {there['cores']} cores" if there else "committed: no results", file=sys.stderr)
    print(f"{'committed':>10} {'today':>8}   work")
    for name in names:
        began = time.monotonic()
        import_module(f"tests.bench.{name}").__dict__["ROUNDS"] = ROUNDS.get(name, 1)
        for row in bench.run(name, "quick_rows"):
            record = committed["benches"].get(name) if committed else None
            before = find_row(record, row.work, row.setting)
            print(line(f"{name}: {row.work}, {row.options or row.against}", row.ratio, before and before["ratio"]))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)


def line(work: str, now: float, before: float | None) -> str:
    """Return a line of the table, marked if the ratio moved by more than the noise."""
    if before is None:
        return f"{'-':>10} {now:>7.2f}x   {work}"
    mark = f"  <- {'better' if now > before else 'WORSE'}, {change(now, before):.2f}x" if moved(now, before) else ""
    return f"{before:>9.2f}x {now:>7.2f}x   {work}{mark}"


def moved(now: float, before: float) -> bool:
    return change(now, before) > NOISE


if __name__ == "__main__":
    main()
