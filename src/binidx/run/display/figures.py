"""Figures of a run at the size of a paper's column: blend and epochs over steps, lengths of sequences.

They need matplotlib, of the extra `plot`, and are its `Figure`s: `figure.savefig("blend.pdf")`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.errors import MissingDriverError, redacted
from binidx.run.display.timeline import Timeline

COLUMN_INCHES = 3.3
"""Width of a column of most conferences."""

FORMATS = ("pdf", "png", "svg")
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 300,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "lines.linewidth": 1,
}


def draw_blend(timeline: Timeline, width: float = COLUMN_INCHES) -> Any:
    """Return a figure of the share of each source over steps; dashed lines are planned shares.

    Args:
        timeline: the course of the run.
        width: width in inches.
    """

    def draw(axes: Any) -> None:
        steps, shares = timeline.bounds, timeline.shares
        bottom = np.zeros(len(shares))
        for source, name in enumerate(timeline.names):
            axes.stairs(bottom + shares[:, source], steps, baseline=bottom, fill=True, label=short_name(name))
            bottom += shares[:, source]
        if timeline.planned is not None:
            for row in np.cumsum(timeline.planned, axis=1)[:, :-1].T:
                axes.stairs(row, steps, color="black", linewidth=0.6, linestyle="--", baseline=None)
        axes.set(xlabel="step", ylabel="share of samples", xlim=(steps[0], steps[-1]), ylim=(0, 1))

    return draw_figure(draw, width)


def draw_epochs(timeline: Timeline, width: float = COLUMN_INCHES) -> Any:
    """Return a figure of the epochs of each source over steps.

    Args:
        timeline: the course of the run.
        width: width in inches.
    """

    def draw(axes: Any) -> None:
        for source, name in enumerate(timeline.names):
            axes.plot(timeline.bounds, timeline.epochs[:, source], label=short_name(name))
        axes.set(xlabel="step", ylabel="epochs", xlim=(timeline.bounds[0], timeline.bounds[-1]), ylim=(0, None))

    return draw_figure(draw, width)


def draw_lengths(bars: Mapping[str, Sequence[tuple[int, int, int]]], width: float = COLUMN_INCHES) -> Any:
    """Return a figure of the share of the sequences of each source by length.

    Args:
        bars: source -> (shortest, longest, number of sequences) of each bar.
        width: width in inches.
    """

    def draw(axes: Any) -> None:
        for name, own in bars.items():
            counts = np.array([count for _, _, count in own]) / max(sum(count for _, _, count in own), 1)
            edges = [low for low, _, _ in own] + [high + 1 for _, high, _ in own[-1:]]
            axes.stairs(counts, edges, label=short_name(name))
        axes.set(xlabel="tokens in a sequence", ylabel="share of sequences", xscale="symlog")

    return draw_figure(draw, width)


def figure_bytes(figure: Any, kind: str) -> bytes:
    """Return a figure as the bytes of a file.

    Args:
        figure: a matplotlib figure.
        kind: one of FORMATS.
    """
    out = io.BytesIO()
    # Without the date, so that equal figures are equal files.
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with _style():
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def _style() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingDriverError("plot: needs matplotlib; pip install 'binidx[plot]'") from error
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": "binidx"})


def draw_figure(draw: Callable[[Any], None], width: float) -> Any:
    """Return a figure with a legend of what `draw` draws on its axes.

    Args:
        draw: draws on matplotlib's axes.
        width: width in inches.

    Raises:
        MissingDriverError: matplotlib is not installed.
    """
    with _style():
        from matplotlib.figure import Figure

        class NotebookFigure(Figure):  # notebooks show figures of pyplot alone
            def _repr_svg_(self) -> str:
                return figure_bytes(self, "svg").decode()

        figure = NotebookFigure(figsize=(width, width * 0.62), layout="constrained")
        draw(axes := figure.subplots())
        if labels := axes.get_legend_handles_labels()[1]:
            widest = 0.45 + 0.058 * max(map(len, labels))  # inches, of 7 points
            figure.legend(loc="outside upper center", ncols=max(int(width / widest), 1))
    return figure


def short_name(prefix: str) -> str:
    """Return the last part of the prefix of a source, for a label."""
    return redacted(prefix).rstrip("/").rpartition("/")[2].removesuffix("_text_document")
