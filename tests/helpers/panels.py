"""Panels of examples/monitoring/dashboard.json as a Prometheus answers them; matplotlib draws in Grafana's stead."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helpers.ports import free_port

DASHBOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "dashboard.json"
SCRAPE_SECONDS = 5
UNITS = {"s": (1, "seconds"), "percentunit": (100, "%"), "Bps": (1e-6, "MB/s")}
"""Unit of a panel -> factor and name of the drawn one."""


@dataclass(frozen=True)
class Panels:
    """Panels of the dashboard over what a Prometheus has scraped at a port."""

    port: int

    def query(self, expression: str, began: float, ended: float) -> list[dict[str, Any]]:
        """Return the series of a PromQL expression: `metric`, and `values` of (time, number)."""
        asked = {"query": expression, "start": began, "end": ended, "step": SCRAPE_SECONDS}
        url = f"http://127.0.0.1:{self.port}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return found

    def series(self, title: str, began: float, ended: float) -> dict[str, list[tuple[float, float]]]:
        """Return the lines of the panel whose title begins so, in its unit, by their legend."""
        panel = find_panel(title)
        factor, _ = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        lines = dict[str, list[tuple[float, float]]]()
        for target in panel["targets"]:
            for found in self.query(target["expr"], began, ended):
                legend = target["legendFormat"]
                for name, label in found["metric"].items():
                    legend = legend.replace(f"{{{{{name}}}}}", label)
                lines[legend] = [(when - began, factor * float(value)) for when, value in found["values"]]
        return lines

    def draw(self, title: str, began: float, ended: float, lines: Mapping[float, str], path: Path) -> None:
        """Draw a panel, with the times at which lines were logged.

        Args:
            lines: log lines by their time.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        panel = find_panel(title)
        with rc_context({"font.size": 8}):
            figure = Figure(figsize=(5.2, 2.8), dpi=120, layout="constrained")
            axes = figure.add_subplot()
            for legend, points in sorted(self.series(title, began, ended).items()):
                axes.plot(*zip(*points, strict=True), label=legend)
            for when, line in lines.items():
                axes.axvline(when - began, color="black", linewidth=0.8, linestyle=":")
                axes.set_xlabel(f"seconds; dotted, after {when - began:.0f} s:\nWARNING:binidx.incidents:{line}")
            axes.set_ylim(bottom=0)
            axes.set_ylabel(UNITS[panel["fieldConfig"]["defaults"]["unit"]][1])
            axes.set_title(panel["title"])
            axes.legend(fontsize=7)
            figure.savefig(path)


def find_panel(title: str) -> Any:
    """Return the panel of the dashboard whose title begins so."""
    [panel] = [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["title"].startswith(title)]
    return panel


@contextlib.contextmanager
def scraping(ports: Sequence[int], folder: Path) -> Iterator[Panels | None]:
    """Let a Prometheus scrape the metrics at some ports of this machine; None: there is no `prometheus` on the PATH."""
    if (prometheus := shutil.which("prometheus")) is None:
        print("prometheus is not on the PATH: panels are not drawn, and their expressions not run here")
        yield None
        return
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    config = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"},
              "scrape_configs": [{"job_name": "binidx", "static_configs": targets}]}  # fmt: skip
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [prometheus, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/prometheus"]
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log) as process,
    ):
        try:
            while process.poll() is None and not is_ready(port):
                time.sleep(0.2)
            yield Panels(port)
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    """Return whether a Prometheus answers."""
    with contextlib.suppress(urllib.error.URLError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready").status == 200)
    return False
