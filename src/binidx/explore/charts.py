"""Paths of charts in a box of 1000 x 100, whose width follows the page: bins side by side, each of one value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from binidx.explore.loss_curve import LossCurve
from binidx.run.display.timeline import Timeline

WIDTH, HEIGHT = 1000, 100


@dataclass(frozen=True)
class Mark:
    """Path of a chart.

    Attributes:
        path: data of an SVG path.
        kind: class of its style: "area", "band", "line", "planned", "seam" or "start".
        colour: number of its colour; None: the accent.
        title: its name, for a pointer at rest.
    """

    path: str
    kind: str
    colour: int | None = None
    title: str = ""


@dataclass(frozen=True)
class Panel:
    """Chart over the steps of a run.

    Attributes:
        title: its name.
        low, high: texts at its lower and upper end.
        marks: its paths, the first below the others.
    """

    title: str
    low: str
    high: str
    marks: Sequence[Mark]


def area(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> str:
    """Return the path between two rows of values from 0 to 1, one for each bin."""
    edges = np.linspace(0, WIDTH, len(upper) + 1)
    there = [f"{a:.1f},{_y(value)} {b:.1f},{_y(value)}" for a, b, value in zip(edges, edges[1:], upper, strict=False)]
    back = [f"{b:.1f},{_y(value)} {a:.1f},{_y(value)}" for a, b, value in zip(edges, edges[1:], lower, strict=False)]
    return f"M{' '.join(there)} {' '.join(reversed(back))}Z"


def line(values: Sequence[float | None], *, at_bounds: bool = False) -> str:
    """Return the path through values from 0 to 1 in the middle of each bin, or at its bounds; None leaves a gap."""
    count = max(len(values) - at_bounds, 1)
    shift = 0 if at_bounds else 0.5
    points = [(f"{(place + shift) * WIDTH / count:.1f}", value) for place, value in enumerate(values)]
    runs = [list(run) for known, run in groupby(points, lambda point: point[1] is not None) if known]
    return " ".join(f"M{' '.join(f'{x},{_y(value or 0)}' for x, value in run)}" for run in runs)


def _y(value: float) -> str:
    return f"{HEIGHT * (1 - value):.1f}"


def draw_timeline(timeline: Timeline, losses: LossCurve | None, colours: Sequence[int]) -> Iterator[Panel]:
    """Yield the charts of a timeline: loss, shares, epochs, and sizes that change; each shows where runs begin.

    Args:
        timeline: the timeline.
        losses: the losses; None: no chart of them.
        colours: number of the colour of each source.
    """
    starts = [_upright(timeline, start.step, "start", title=start.kind) for start in timeline.starts]
    if losses and (known := [bin for bin in losses.of_bins(timeline.bounds) if bin]):
        low, high = min(least for least, _, _ in known), max(most for _, _, most in known)
        bins = [bin and [(value - low) / (high - low or 1) for value in bin] for bin in losses.of_bins(timeline.bounds)]
        least, most = (np.array([bin[place] if bin else 0.0 for bin in bins]) for place in (0, 2))
        marks = [Mark(area(least, most), "band"), Mark(line([bin[1] if bin else None for bin in bins]), "line")]
        yield Panel("loss", f"{low:.4g}", f"{high:.4g}", marks + starts)
    tops = np.cumsum(timeline.shares, axis=1)
    marks = [
        Mark(area(tops[:, source] - timeline.shares[:, source], tops[:, source]), "area", colours[source], name)
        for source, name in enumerate(timeline.names)
    ]
    if timeline.planned is not None:
        planned = np.cumsum(timeline.planned, axis=1)[:, :-1].T
        marks += [Mark(line(row.tolist()), "planned", title="planned") for row in planned]
    yield Panel("share of samples", "0 %", "100 %", marks + starts)
    epochs = timeline.epochs
    low, high = float(np.floor(epochs.min())), float(epochs.max())
    scaled = (epochs - low) / (high - low or 1)
    marks = [
        Mark(line(scaled[:, source].tolist(), at_bounds=True), "line", colours[source], name)
        for source, name in enumerate(timeline.names)
    ]
    marks += [_upright(timeline, seam.step + 1, "seam", colours[seam.source]) for seam in timeline.seams]
    yield Panel("epochs", f"{low:.3g}", f"{high:.3g}", marks + starts)
    for title, sizes in (("batch size", timeline.batch_sizes), ("tokens a sample", timeline.sequence_lengths)):
        if sizes.min() < sizes.max():
            mark = Mark(area(np.zeros(len(sizes)), sizes / sizes.max()), "band")
            yield Panel(title, "0", f"{sizes.max():,}", [mark, *starts])


def _upright(timeline: Timeline, step: int, kind: str, colour: int | None = None, title: str = "") -> Mark:
    """Return a line from top to bottom at the start of a step."""
    place = np.interp(step, timeline.bounds, np.linspace(0, WIDTH, len(timeline.bounds)))
    return Mark(f"M{place:.1f},0V{HEIGHT}", kind, colour, title)
