"""Merge measured records into the committed results, and write the page of benchmarks, all figures and the charts.

python -m tests.bench.publish bench-results/*.json     merge these, then write the pages and the charts
python -m tests.bench.publish                          write them from the committed results
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.chart import COLOURS, claims_chart, draw_curve, rates_chart
from tests.bench.claims import CLAIMS, CURVES, LIMITS, Claim
from tests.bench.results import Record, Results, find_row, merge, read_committed
from tests.bench.table import figure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
FIGURES = ROOT / "tests" / "bench" / "results" / "figures.md"
BEGIN, END = "<!-- {} by `python -m tests.bench.publish` -->", "<!-- end of {} -->"
CHARTS = {"claims": claims_chart, "rates": rates_chart}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.publish", description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="files of bench-results/")
    merge(json.loads(path.read_text()) for path in parser.parse_args().records)
    results = read_committed()
    PAGE.write_text(with_all(PAGE.read_text(), results))
    FIGURES.write_text(with_rows(FIGURES.read_text(), results))
    for path, text in charts(results).items():
        path.write_text(text)


def with_all(page: str, results: Sequence[Results]) -> str:
    """Return the page with all that is made from the results."""
    made = {
        "claims": claims_table(results, CLAIMS, "against, at its best setting"),
        "curves": "\n\n".join(curve_section(name, row, record) for name, row, record in curves(results)),
        "limits": claims_table(results, LIMITS, "limit"),
    }
    for name, text in made.items():
        page = with_figures(page, text, name)
    return page


def with_rows(page: str, results: Sequence[Results]) -> str:
    """Return the page of all figures with the parts of works and every row."""
    return with_figures(with_figures(page, parts_section(results), "parts"), all_tables(results))


def charts(results: Sequence[Results]) -> dict[Path, str]:
    """Return each chart by its file."""
    bars = {(name, theme): draw(results, theme) for name, draw in CHARTS.items() for theme in COLOURS}
    lines = {
        (name, theme): draw_curve(CURVES[name].title, CURVES[name].subtitle, row["series"], theme)
        for name, row, _ in curves(results)
        for theme in COLOURS
    }
    return {PAGE.parent / f"{name}-{theme}.svg": text for (name, theme), text in {**bars, **lines}.items()}


def curves(results: Sequence[Results]) -> list[tuple[str, dict[str, Any], Record]]:
    """Return name, row and record of each curve that was measured on the first CPU."""
    found = []
    for name, curve in CURVES.items():
        record = results[0]["benches"].get(curve.bench)
        row = find_row(record, curve.row)
        if record and row and "series" in row:
            found.append((name, row, record))
    return found


def curve_section(name: str, row: dict[str, Any], record: Record) -> str:
    """Return a curve, and below it, folded, its conditions and values."""
    images = [f"![{CURVES[name].title}]({name}-{theme}.svg#only-{theme})" for theme in COLOURS]
    lines = row["series"].values()
    values = [f"| | {' | '.join(row['series'])} |", f"|---|{'---:|' * len(lines)}"]
    values += [f"| {' | '.join((point, *(figure(line[point]) for line in lines)))} |" for point in next(iter(lines))]
    fold = ['<details markdown="1">', "<summary>Conditions and values</summary>", ""]
    return "\n".join([*images, "", *fold, measured(record, conditions(row)), "", *values, "", "</details>"])


def parts_section(results: Sequence[Results]) -> str:
    """Return a table of the parts of each work of the bench `parts`, on the first CPU where it ran."""
    record = next((each["benches"]["parts"] for each in results if "parts" in each["benches"]), None)
    if record is None:
        return "Not measured yet: `python -m tests.bench parts`."
    lines = [measured(record, ()), ""]
    for row in record["rows"]:
        [parts] = row["series"].values()
        limit = f"{row['against']}: {figure(row['theirs'])} {row['unit']}"
        lines += [f"| {row['work']} | {row['unit']} | share |", "|---|---:|---:|"]
        lines += [f"| {part} | {figure(value)} | {value / row['ours']:.0%} |" for part, value in parts.items()]
        lines += [f"| **all** ({limit}, {times(row['ratio'])}) | **{figure(row['ours'])}** | |", ""]
    return "\n".join(lines[:-1])


def measured(record: Record, common: Sequence[str]) -> str:
    """Return where and when a bench was measured, and conditions of its rows."""
    here = record["machine"]
    where = f"**{here['cpu']}**, {here['cores']} cores; {record['measured']}, commit `{record['commit']}`, "
    return f"{where}load {here['load_before']} before{''.join(f'; {each}' for each in common if each != ALONE)}."


def with_figures(page: str, figures: str, name: str = "figures") -> str:
    """Return the page with these figures between the markers of this name."""
    begin, end = BEGIN.format(name), END.format(name)
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"page: markers not found, needed {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{figures}\n{end}", page, count=1)


def claims_table(results: Sequence[Results], claims: Sequence[Claim], against: str) -> str:
    """Return a table of claims: a row a claim, a column a CPU."""
    cpus = [f"{each['machine']['cpu']}, {each['machine']['cores']} cores" for each in results]
    lines = [f"| work | {against} | {' | '.join(cpus)} |", f"|---|---|{'---|' * len(cpus)}"]
    for claim in claims:
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
    """Return every row of every bench: a section a bench, in it a table a CPU."""
    names = sorted({name for each in results for name in each["benches"]})
    return "\n\n".join(bench_section(name, results) for name in names)


def bench_section(name: str, results: Sequence[Results]) -> str:
    records = [each["benches"][name] for each in results if name in each["benches"]]
    return "\n\n".join([f"### {name}", purpose(name), *map(machine_table, records)])


def purpose(name: str) -> str:
    """Return the first line of the docstring of a bench."""
    source = (Path(__file__).parent / f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def machine_table(record: Record) -> str:
    """Return the rows of a bench on one machine, by their work; the usual conditions stand above them."""
    works = dict.fromkeys(row["work"] for row in record["rows"])
    rows = [row for work in works for row in record["rows"] if row["work"] == work]
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*map(conditions, rows), strict=True)]
    common = [each for each in notes(rows[0]) if all(each in notes(row) for row in rows)]
    peers = list(dict.fromkeys(row["against"] for row in rows))
    settings = len(peers) > 1 or any(row["setting"] for row in rows)
    names = [*(["against"] if settings else []), "binidx", peers[0] if len(peers) == 1 else "the other", "ratio"]
    lines = [
        f"{measured(record, ())} Unless a row says otherwise: "
        f"{'; '.join(each for each in [*usual, *common] if each != ALONE)}.",
        "",
        f"| work | {' | '.join(names)} |",
        f"|---|{'---|' * settings}---:|---:|---:|",
    ]
    for last, row in zip([None, *rows], rows, strict=False):
        work = "" if last and last["work"] == row["work"] else row["work"]
        own = [each for each, expected in zip(conditions(row), usual, strict=True) if each != expected]
        own += [each for each in notes(row) if each not in common]
        cells = [two_lines(work, [each for each in own if not is_said(each, f"{row['work']}; {row['options']}")])]
        if settings:
            peer = against(row, len(peers) == 1)
            repeats = row["setting"] and row["options"].startswith(peer)
            cells.append(row["options"] if repeats else two_lines(peer, [row["options"]]))
        cells += [f"{figure(row[side])} {row['unit']}".strip() for side in ("ours", "theirs")]
        lines.append(f"| {' | '.join(cells)} | **{times(row['ratio'])}** |")
    return "\n".join(lines)


ALONE = "no workers"


def conditions(row: dict[str, Any]) -> tuple[str, ...]:
    cores = f"{row['cores']} core{'s' * (row['cores'] > 1)}" if row["cores"] else "all cores"
    workers = f"{row['workers']} worker{'s' * (row['workers'] > 1)}" if row["workers"] else ALONE
    return row["size"], cores, workers, f"warm: {row['cached']}"


def notes(row: dict[str, Any]) -> list[str]:
    return list(filter(None, row["note"].split("; ")))


def is_said(text: str, where: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", where))


def two_lines(text: str, small: Sequence[str]) -> str:
    """Return a cell: text, and below it small text."""
    below = "; ".join(filter(None, small))
    return "<br>".join(filter(None, (text, below and f"<small>{below}</small>")))


def against(row: dict[str, Any], known: bool) -> str:
    """Return the peer and the name of its setting; the setting alone where the peer is known."""
    if known and row["setting"]:
        return str(row["setting"])
    return ", ".join(filter(None, (row["against"], row["setting"] if row["setting"] not in row["against"] else "")))


if __name__ == "__main__":
    main()
