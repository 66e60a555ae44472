"""Bar charts of the committed results as SVG: for README and the page of figures, in light and in dark.

A row is a label above its bar, so that a chart can be read on a screen of 390 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tests.bench.claims import CLAIMS
from tests.bench.results import Results, find_row
from tests.bench.table import figure

WIDTH, ROW, BAR, TOP, MARGIN = 480, 40, 13, 58, 10
COLOURS = {
    "light": {"text": "#1f2328", "small": "#59636e", "ahead": "#3f51b5", "behind": "#c0662b", "line": "#d1d9e0"},
    "dark": {"text": "#f0f6fc", "small": "#9198a1", "ahead": "#8c9eff", "behind": "#e8a26a", "line": "#3d444d"},
}


@dataclass(frozen=True)
class BarRow:
    """A bar.

    Args:
        label, small: text above it, and more text behind that.
        value: length of the bar on the logarithmic scale.
        shown: text behind the bar.
        ahead: whether it has the first colour.
    """

    label: str
    small: str
    value: float
    shown: str
    ahead: bool


def claims_chart(results: Sequence[Results], theme: str) -> str:
    """Return the chart of the claims that have a short name, on the first CPU: the ratio to the peer at its best."""
    rows = []
    for claim in CLAIMS:
        row = find_row(results[0]["benches"].get(claim.bench), claim.row, claim.setting)
        if row and claim.short:
            ratio = row["ratio"]
            rows.append(BarRow(claim.short, claim.peer, ratio, f"{ratio:.2g}x", ratio >= 1))
    title = "binidx against each peer at its best, times better"
    return draw(
        title,
        f"{results[0]['machine']['cpu']}, {results[0]['machine']['cores']} cores; scale is logarithmic",
        rows,
        theme,
    )


READ = "first 25,000 samples, uint16, "


def rates_chart(results: Sequence[Results], theme: str) -> str:
    """Return the chart of rates over 25,000 samples from S3, 30 ms away."""
    found = [row for row in results[0]["benches"]["peers_long"]["rows"] if row["work"].startswith(READ)]
    ours = {row["work"].removeprefix(READ): row["ours"] for row in found}
    theirs = {row["against"]: row["theirs"] for row in found}
    rates = [(f"binidx, {work}, global order", rate, True) for work, rate in ours.items()]
    rates += [(f"{peer}, its own order", rate, False) for peer, rate in theirs.items()]
    rates.sort(key=lambda rate: -rate[1])
    rows = [BarRow(label, "", rate, f"{figure(rate)}/s", ahead) for label, rate, ahead in rates]
    return draw("Samples of 4,096 tokens a second, 25,000 from S3", "30 ms to the first byte, one process", rows, theme)


def draw(title: str, subtitle: str, rows: Sequence[BarRow], theme: str) -> str:
    """Return a chart as SVG; bars begin at 1 if a value is below it, else at a tenth of the least."""
    colour, height = COLOURS[theme], TOP + ROW * len(rows) + MARGIN
    least, most = min(row.value for row in rows), max(row.value for row in rows)
    base = 1.0 if least < 1 else least / 3
    low, high = math.log(min(least, base)), math.log(max(most, base))

    def place(value: float) -> float:
        return MARGIN + (math.log(value) - low) / (high - low) * (WIDTH - 2 * MARGIN - 60)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<text x="{MARGIN}" y="20" font-size="15" font-weight="600" fill="{colour["text"]}">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="38" font-size="12" fill="{colour["small"]}">{escape(subtitle)}</text>',
    ]
    if least < 1:
        lines.append(f'<path d="M{place(1):.1f} {TOP - 8}V{height - MARGIN}" stroke="{colour["line"]}"/>')
    for number, row in enumerate(rows):
        y, ends = TOP + ROW * number, sorted((place(base), place(row.value)))
        small = f' <tspan font-size="12" fill="{colour["small"]}">{escape(row.small)}</tspan>' if row.small else ""
        lines += [
            f'<text x="{MARGIN}" y="{y + 8}" font-size="13" fill="{colour["text"]}">{escape(row.label)}{small}</text>',
            f'<rect x="{ends[0]:.1f}" y="{y + 14}" width="{max(ends[1] - ends[0], 1):.1f}" height="{BAR}" rx="2" '
            f'fill="{colour["ahead" if row.ahead else "behind"]}"/>',
            f'<text x="{ends[1] + 6:.1f}" y="{y + 25}" font-size="13" font-weight="600" fill="{colour["text"]}">'
            f"{escape(row.shown)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])
