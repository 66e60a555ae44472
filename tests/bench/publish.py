"""Merge measured records into the committed results, and write the figures of README.md and of the benchmarks page.

python -m tests.bench.publish bench-results/*.json     merge these, then write both pages
python -m tests.bench.publish                          write both pages from the committed results
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.claims import CLAIMS, Claim
from tests.bench.results import Record, Results, find_row, merge, read_committed
from tests.bench.table import figure

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "explanation" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by `python -m tests.bench.publish` -->", "<!-- end of figures -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.publish", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="files of bench-results/")
    merge(json.loads(path.read_text()) for path in parser.parse_args().records)
    results = read_committed()
    for path, text in ((README, claims_table(results)), (PAGE, all_tables(results))):
        path.write_text(with_figures(path.read_text(), text))


def with_figures(page: str, figures: str) -> str:
    """Return the page with these figures between its markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"page: markers not found, needed {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", page, count=1)


def claims_table(results: Sequence[Results]) -> str:
    """Return the table of README.md: a row a claim, a column a CPU."""
    cpus = [f"{each['machine']['cpu']}, {each['machine']['cores']} cores" for each in results]
    lines = [f"| work | against, at its best setting | {' | '.join(cpus)} |", f"|---|---|{'---|' * len(cpus)}"]
    for claim in CLAIMS:
        cells = [claim_cell(claim, each["benches"].get(claim.bench)) for each in results]
        if any(cells):
            lines.append(f"| {claim.work} | {claim.against} | {' | '.join(cell or 'not measured' for cell in cells)} |")
    return "\n".join(lines)


def claim_cell(claim: Claim, record: Record | None) -> str:
    """Return the ratio at the peer's best setting, both values, the peer's options, and the ratio at its default."""
    row = find_row(record, claim.row, claim.setting)
    if row is None:
        return ""
    parts = [f"{figure(row['ours'])} / {figure(row['theirs'])} {row['unit']}", row["options"]]
    default = find_row(record, claim.row, "default")
    if default and default is not row:
        parts.append(f"its default {figure(default['theirs'])}: {times(default['ratio'])}")
    return f"**{times(row['ratio'])}** ({'; '.join(filter(None, parts))})"


def times(ratio: float) -> str:
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:,.0f}x"


def all_tables(results: Sequence[Results]) -> str:
    """Return every row of every bench: a section a bench, a column a CPU."""
    names = sorted({name for each in results for name in each["benches"]})
    return "\n\n".join(bench_table(name, results) for name in names)


def bench_table(name: str, results: Sequence[Results]) -> str:
    records = [(each["machine"]["cpu"], each["benches"][name]) for each in results if name in each["benches"]]
    lines = [f"### {name}", "", *(f"- {run_of(cpu, record)}" for cpu, record in records), ""]
    lines += [f"| work, its conditions | against | {' | '.join(cpu for cpu, _ in records)} |"]
    lines += [f"|---|---|{'---|' * len(records)}"]
    keys = {(row["work"], row["setting"]): row for _, record in reversed(records) for row in record["rows"]}
    for key in dict.fromkeys((row["work"], row["setting"]) for _, record in records for row in record["rows"]):
        row = keys[key]
        cells = " | ".join(cell(find_row(record, *key)) for _, record in records)
        lines.append(f"| {row['work']} ({conditions(row)}) | {against(row)} | {cells} |")
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    """Return the ratio, both values and the note of a row."""
    if row is None:
        return "not measured"
    values = f"{figure(row['ours'])} / {figure(row['theirs'])} {row['unit']}".strip()
    return f"**{times(row['ratio'])}** {'; '.join(filter(None, (values, row['options'], row['note'])))}"


def against(row: dict[str, Any]) -> str:
    """Return the peer and the name of its setting, where the peer's name does not have it."""
    return row["against"] if row["setting"] in row["against"] else f"{row['against']}, {row['setting']}"


def run_of(cpu: str, record: Record) -> str:
    here = record["machine"]
    load = f"load {here['load_before']} before"
    return f"{cpu}, {here['cores']} cores, {record['measured']}, commit {record['commit']}, {load}"


def conditions(row: dict[str, Any]) -> str:
    cores = f"{row['cores']} core{'s' * (row['cores'] > 1)}" if row["cores"] else "all cores"
    workers = f", {row['workers']} workers" if row["workers"] else ""
    return f"{row['size']}; {cores}{workers}; warm: {row['cached']}"


if __name__ == "__main__":
    main()
