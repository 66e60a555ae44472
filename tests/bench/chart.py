"""Bar charts and curves of the committed results as SVG: for README and the page of figures, in light and in dark.

Labels stand above bars and lines, so that a chart can be read on a screen of 390 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tests.bench.claims import CLAIMS
from tests.bench.results import Results, find_row
from tests.bench.table import figure

WIDTH, ROW, BAR, TOP, MARGIN = 480, 40, 13, 58, 10
PLOT_LEFT, PLOT_HEIGHT, TICKS = 52, 160, 5
COLOURS = {
    "light": {"text": "#1f2328", "small": "#59636e", "ahead": "#3f51b5", "behind": "#c0662b"},
    "dark": {"text": "#f0f6fc", "small": "#9198a1", "ahead": "#8c9eff", "behind": "#e8a26a"},
}


@dataclass(frozen=True)
class BarRow:
    """A bar.

    Args:
        label, small: text above it, and more text behind that.
        value: where the bar ends.
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
    machine = results[0]["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores; logarithmic, the line is 1x"
    return draw("binidx against each peer at its best, times better", where, rows, theme, 1.0)


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


def draw(title: str, subtitle: str, rows: Sequence[BarRow], theme: str, base: float = 0.0) -> str:
    """Return a chart as SVG.

    Args:
        base: value at which bars begin. The scale is logarithmic unless this is 0.
    """
    colour, height = COLOURS[theme], TOP + ROW * len(rows) + MARGIN
    scale = math.log if base else float
    values = [scale(value) for value in (base, *(row.value for row in rows))]
    low, high = min(values), max(values)

    def place(value: float) -> float:
        return MARGIN + (scale(value) - low) / (high - low) * (WIDTH - 2 * MARGIN - 60)

    lines = begin(title, subtitle, height, theme)
    for number, row in enumerate(rows):
        y, ends = TOP + ROW * number, sorted((place(base), place(row.value)))
        small = f' <tspan font-size="12" fill="{colour["small"]}">{escape(row.small)}</tspan>' if row.small else ""
        lines += [
            f'<path d="M{place(base):.1f} {y + 12}v17" stroke="{colour["small"]}"/>',
            f'<text x="{MARGIN}" y="{y + 8}" font-size="13" fill="{colour["text"]}">{escape(row.label)}{small}</text>',
            f'<rect x="{ends[0]:.1f}" y="{y + 14}" width="{max(ends[1] - ends[0], 1):.1f}" height="{BAR}" rx="2" '
            f'fill="{colour["ahead" if row.ahead else "behind"]}"/>',
            f'<text x="{ends[1] + 6:.1f}" y="{y + 25}" font-size="13" font-weight="600" fill="{colour["text"]}">'
            f"{escape(row.shown)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def draw_curve(title: str, subtitle: str, series: Mapping[str, Mapping[str, float]], theme: str) -> str:
    """Return lines over the same points as SVG: points are equally far apart, values begin at 0."""
    colour, points = COLOURS[theme], list(next(iter(series.values())))
    top = TOP + 18 * len(series)
    bottom, most = top + PLOT_HEIGHT, max(value for line in series.values() for value in line.values())
    step = tick(most)
    most = step * math.ceil(most / step)

    def across(number: int) -> float:
        return PLOT_LEFT + (WIDTH - MARGIN - 30 - PLOT_LEFT) * number / max(len(points) - 1, 1)

    def up(value: float) -> float:
        return bottom - PLOT_HEIGHT * value / most

    def text(x: float, y: float, content: str, anchor: str, fill: str = "small") -> str:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} font-size="12" fill="{colour[fill]}">{content}</text>'

    lines = begin(title, subtitle, bottom + 30, theme)
    for number in range(round(most / step) + 1):
        y = up(number * step)
        lines.append(
            f'<path d="M{PLOT_LEFT} {y:.1f}H{WIDTH - MARGIN}" stroke="{colour["small"]}" stroke-opacity="0.3"/>'
        )
        lines.append(text(PLOT_LEFT - 6, y + 4, f"{number * step:,g}", "end"))
    every = math.ceil(len(points) / 7)
    lines += [text(across(at), bottom + 18, escape(points[at]), "middle") for at in range(0, len(points), every)]
    for number, (name, line) in enumerate(series.items()):
        stroke, y = colour[("ahead", "behind")[number % 2]], TOP + 18 * number
        path = " ".join(f"{across(points.index(point)):.1f},{up(value):.1f}" for point, value in line.items())
        first, *_, last = line.values()
        lines += [
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2.5"/>',
            f'<path d="M{MARGIN} {y - 4}h22" stroke="{stroke}" stroke-width="4"/>',
            text(MARGIN + 30, y, f"{escape(name)}: {figure(first)} to {figure(last)}", "start", "text"),
        ]
    return "\n".join([*lines, "</svg>", ""])


def tick(most: float) -> float:
    """Return the distance of the lines of a scale: 1, 2, 2.5 or 5 times a power of ten, at most TICKS of them."""
    power = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(power * size for size in (1, 2, 2.5, 5, 10) if most <= TICKS * power * size)


def begin(title: str, subtitle: str, height: float, theme: str) -> list[str]:
    """Return the first lines of a chart."""
    colour = COLOURS[theme]
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<text x="{MARGIN}" y="20" font-size="15" font-weight="600" fill="{colour["text"]}">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="38" font-size="12" fill="{colour["small"]}">{escape(subtitle)}</text>',
    ]
