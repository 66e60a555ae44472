"""How many samples a second one process gets from afar: latency by requests in flight, both ways to ask, and the limit.

A sample is one range of 16 KiB: 4,096 tokens of int32 in one piece. The limit is requests in flight / latency, until
the reader's CPU binds: a request costs s3fs some 600 us, the fast path 60. The server is one that costs nearly nothing
(`servers/far_object.c`): a real one on the same cores would draw its own limit instead.

Medians of runs in turns. The picture goes to bench-results/sweep.png, the points it is drawn from beside it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from servers.far_object import far_object

from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import open_object
from tests.bench.remote import remote_seconds
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="samples of one range of 16 KiB", cached="nothing")
LATENCIES_MS = (1, 10, 30, 100)
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128)
WAYS = {"fsspec": False, "fast": True}
SAMPLE_BYTES = 16 << 10
OBJECT_BYTES = 1 << 30
SECONDS = 1.5
MOST = 6000
ROUNDS = 3
RESULTS = Path("bench-results")


@dataclass(frozen=True)
class Point:
    """Samples a second of one way to ask, and the limit."""

    latency_ms: float
    in_flight: int
    way: str
    per_second: float

    @property
    def limit(self) -> float:
        return self.in_flight / self.latency_ms * 1e3


def rows(directory: Path) -> list[Row]:
    """Every point of the picture."""
    path = directory / "object.bin"
    with path.open("wb") as file:
        file.truncate(OBJECT_BYTES)
    points = [point for latency in LATENCIES_MS for point in points_at(path, latency)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sweep-points.json").write_text(json.dumps([asdict(point) for point in points], indent=1))
    draw(points, RESULTS / "sweep.png")
    return [row_of(point) for point in points]


def row_of(point: Point) -> Row:
    work = f"16 KiB samples, {point.latency_ms} ms away, {point.in_flight} in flight, {point.way}"
    speed = f"{point.per_second * SAMPLE_BYTES / 1e6:,.1f} MB/s"
    return Row(work, point.per_second, point.limit, "samples/s", True, speed, "in flight / latency")


def points_at(path: Path, latency_ms: float) -> list[Point]:
    """All ways and numbers in flight at one latency."""
    cells = [(way, in_flight) for in_flight in IN_FLIGHT for way in WAYS]
    with far_object(path, delay_ms=latency_ms) as endpoint:
        readers = {(way, count): open_reader(endpoint, way, count) for way, count in cells}
        runs = [
            [per_second(readers[cell], cell[1], latency_ms, np.random.default_rng(place)) for cell in cells]
            for place in range(ROUNDS)
        ]
    medians = map(statistics.median, zip(*runs, strict=True))
    return [Point(latency_ms, count, way, rate) for (way, count), rate in zip(cells, medians, strict=True)]


def open_reader(endpoint: str, way: str, in_flight: int) -> RangeReader:
    """Not a byte in vain, none kept."""
    settings = {"fast": WAYS[way], "concurrency": in_flight, "max_gap": 0}
    options: dict[str, Any] = {"endpoint_url": endpoint, "key": "any", "secret": "any", "binidx": settings}
    reader = open_object("s3://any/object.bin", storage_options=options, cache=False)
    reader.read(samples_of(in_flight, np.random.default_rng(0)))  # its connections are open
    return reader


def per_second(reader: RangeReader, in_flight: int, latency_ms: float, rng: np.random.Generator) -> float:
    """Samples a second of one read of many."""
    count = int(min(MOST, max(2 * in_flight, in_flight / latency_ms * 1e3 * SECONDS)))
    wanted = samples_of(count, rng)
    return count / remote_seconds(f"{count} samples", latency_ms, lambda: reader.read(wanted))


def samples_of(count: int, rng: np.random.Generator) -> list[Range]:
    """Samples anywhere, none beside another."""
    slots = rng.permutation(OBJECT_BYTES // SAMPLE_BYTES // 2)[:count].tolist()
    return [(2 * slot * SAMPLE_BYTES, (2 * slot + 1) * SAMPLE_BYTES) for slot in slots]


def draw(points: Sequence[Point], path: Path) -> None:
    """A panel for each latency: the limit, and both ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for panel, latency in zip(panels.flat, LATENCIES_MS, strict=True):
        draw_panel(panel, [point for point in points if point.latency_ms == latency])
        panel.set_title(f"{latency} ms to the first byte")
    panels[0, 0].legend(loc="upper left", frameon=False)
    for panel in panels[:, 1]:
        panel.secondary_yaxis("right", functions=(to_megabytes, to_samples)).set_ylabel("MB/s")
    figure.supxlabel("requests in flight")
    figure.supylabel("samples of 16 KiB per second, one process")
    figure.savefig(path, dpi=150)


def draw_panel(panel: Any, points: Sequence[Point]) -> None:
    counts = sorted({point.in_flight for point in points})
    limits = {point.in_flight: point.limit for point in points}
    panel.loglog(counts, [limits[count] for count in counts], "--", color="0.55", label="limit: in flight / latency")
    for way, color in (("fast", "tab:blue"), ("fsspec", "tab:orange")):
        rates = {point.in_flight: point.per_second for point in points if point.way == way}
        panel.loglog(counts, [rates[count] for count in counts], "o-", color=color, markersize=4, label=way)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.minorticks_off()
    panel.grid(True, which="major", color="0.9")


def to_megabytes(samples: Any) -> Any:
    return np.asarray(samples) * SAMPLE_BYTES / 1e6


def to_samples(megabytes: Any) -> Any:
    return np.asarray(megabytes) * 1e6 / SAMPLE_BYTES
