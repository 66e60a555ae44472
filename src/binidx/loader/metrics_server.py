"""Metrics of a loader for Prometheus, over HTTP; needs prometheus_client, of the extra `telemetry`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from binidx.errors import MissingDriverError
from binidx.storage.usage_report import rates

GAUGES = {"samples_ahead", *rates(defaultdict(float))}
"""Metrics that rise and fall; the others are sums."""


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
    """Metrics of a loader when they are scraped: sums as counters, the others as gauges."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._loader.metrics().items():
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(f"binidx_{name}", f"{name} of the loader", value=value)


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

    Source: ours; the names are `binidx_` and those of `loader.metrics()`, counters end in `_total`.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingDriverError("serve_metrics: needs prometheus_client; pip install 'binidx[telemetry]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(loader))
    return MetricsServer(*start_http_server(port, address, registry))
