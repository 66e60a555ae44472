"""Metrics of a process for Prometheus, over HTTP, and a thread that logs incidents.

    WARNING:binidx.incidents:reads of s3://b take 2.1 s (usual 31 ms)

`serve_metrics` needs prometheus_client, of the extra `telemetry`; `watch_process` needs nothing, and begins with the
first iteration over a loader. `incidents` decides, by the counters and the sum of the ranks' shares in the store of the
process group.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from binidx.dataset.torch_bridge import group_store
from binidx.errors import MissingDriverError
from binidx.loader.incidents import TICK_SECONDS, OddRank, SlowReads
from binidx.storage.settings import leading_number
from binidx.storage.stats import BOUNDS, usage
from binidx.storage.threads import background

logger = logging.getLogger("binidx.incidents")

WAITS = dict[object, float]()
"""Iteration whose trainer waits for a batch -> since when, by `time.perf_counter`."""

LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables of torchrun, MPI and Slurm with the number of a process on its node. The lines of stores and disks are
warnings of process 0, else there are as many as ranks; the others log them at the level INFO."""


class MetricsServer(AbstractContextManager["MetricsServer"]):
    """Running HTTP server of the metrics of a loader, in a daemon thread; ends with its block, `close` or the process.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Collector:
    """Metrics of a loader when they are scraped: sums as counters, and histograms, labelled by rank and node."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        group, sampler = group_store("binidx-waits"), self._loader.batch_sampler
        labels = {"rank": str(group[1] if group else sampler.data_parallel_rank), "node": socket.gethostname()}
        for name, value in self._loader.metrics().items():
            kind: Any = GaugeMetricFamily if name == "samples_ahead" else CounterMetricFamily
            family = kind(f"binidx_{name}", f"{name} of the loader", labels=labels)
            family.add_metric([*labels.values()], value)
            yield family
        families = dict[str, tuple[Any, Any]]()
        for (kind, bucket), found in self._loader.histograms().items():
            names, values = [*labels, *["bucket"] * bool(bucket)], [*labels.values(), *[bucket] * bool(bucket)]
            if kind not in families:
                family = HistogramMetricFamily(f"binidx_{kind}_seconds", f"seconds of {kind}", labels=names)
                families[kind] = family, CounterMetricFamily(f"binidx_{kind}_bytes", f"bytes of {kind}", labels=names)
            ends = ["+Inf" if bound == BOUNDS[-1] else str(bound) for bound in BOUNDS]
            families[kind][0].add_metric(values, [*zip(ends, found.counts, strict=True)], found.seconds)
            families[kind][1].add_metric(values, found.bytes)
        for both in families.values():
            yield from both


def serve_metrics(loader: Any, port: int = 9100, *, address: str = "0.0.0.0") -> MetricsServer:
    """Serve the metrics of a loader to Prometheus at `http://{address}:{port}/metrics`, until the process ends.

    Args:
        loader: a loader of `build_pretraining_data_loader` or `load_dataset`.
        port: of this process: ranks of one node need different ones, such as 9100 + local rank; 0 for any free port.
        address: on which the server listens; "127.0.0.1" for this machine alone.

    Returns:
        The server, which also ends with its `with` block.

    Raises:
        MissingDriverError: prometheus_client is not installed.
        OSError: the port is in use.

    Example:
        >>> server = binidx.serve_metrics(loader, 9100 + local_rank)

    Source: ours; the names are `binidx_` and those of `loader.metrics()`, counters with `_total`, and of
    `loader.histograms()`, with `_seconds`. Labels: rank (in the process group, else the data-parallel one), node (host
    name), bucket. A process has some 80 time series, and 28 for each bucket: four, and "other" for the rest.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingDriverError("serve_metrics: needs prometheus_client; pip install 'binidx[telemetry]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(loader))
    return MetricsServer(*start_http_server(port, address, registry))


class ProcessWatch:
    """Watch of the incidents of this process."""

    def __init__(self) -> None:
        self._looked_at, self._share = time.perf_counter(), 1.0
        self._reads, self._odd = SlowReads(), OddRank(self._looked_at)

    def look(self) -> None:
        """Log the incidents of stores and disks that begin; another thread looks at the ranks."""
        now = time.perf_counter()
        if now - self._looked_at < TICK_SECONDS / 2:  # the process ends
            return
        self._looked_at, used = now, usage()
        used["wait_seconds"] += sum([now - began for began in [*WAITS.values()]])
        lines, self._share = self._reads.look(used, now)
        level = logging.INFO if any(map(leading_number, LOCAL_RANKS)) else logging.WARNING
        for line in lines:
            logger.log(level, "%s", line)
        background("binidx-ranks").tokens.put(self.look_at_ranks)  # their store may be on a host that does not answer

    def look_at_ranks(self) -> None:
        """Log that this rank waits and others do not, if that begins."""
        share, now = self._share, time.perf_counter()
        with contextlib.suppress(Exception):  # of the store of a group that has ended
            if group := group_store("binidx-waits"):
                store, rank, _ = group
                addition = self._odd.look(share, now)
                if addition is not None and (found := self._odd.answered(store.add("sum", addition), now)):
                    logger.warning("rank %d on %s %s", rank, socket.gethostname(), found)


@functools.cache
def _watch(pid: int) -> ProcessWatch:
    watch = ProcessWatch()
    background("binidx-incidents").add(watch, watch.look, TICK_SECONDS)
    return watch


def watch_process() -> None:
    """Log incidents of this process from now on, to the logger `binidx.incidents`."""
    _watch(os.getpid())
