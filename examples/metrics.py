"""Metrics of a loader in a dashboard: TensorBoard, Weights & Biases and OpenTelemetry.

show = to_tensorboard(loader, SummaryWriter("runs/1"))      # or to_wandb(loader, wandb.init(project="tokens"))
for step, batch in enumerate(loader):
    ...
    if step % 100 == 0:
        show(step)

to_opentelemetry(loader, opentelemetry.metrics.get_meter("binidx"))
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from binidx.storage.stats import BOUNDS


def since_the_last_call(loader: Any) -> Callable[[], dict[str, float]]:
    """Return a function that returns the metrics of the time since it was called last."""
    last = loader.metrics()

    def interval() -> dict[str, float]:
        nonlocal last
        before, last = last, loader.metrics()
        return loader.metrics(since=before)  # type: ignore[no-any-return]

    return interval


def to_tensorboard(loader: Any, writer: Any) -> Callable[[int], None]:
    """Return a function that writes the metrics at a step to a `torch.utils.tensorboard.SummaryWriter`."""
    interval = since_the_last_call(loader)

    def show(step: int) -> None:
        for name, value in interval().items():
            writer.add_scalar(f"data/{name}", value, step)

    return show


def to_wandb(loader: Any, run: Any) -> Callable[[int], None]:
    """Return a function that logs the metrics at a step to the run that `wandb.init` returned."""
    interval = since_the_last_call(loader)

    def show(step: int) -> None:
        run.log({f"data/{name}": value for name, value in interval().items()}, step=step)

    return show


def to_opentelemetry(loader: Any, meter: Any) -> None:
    """Make observable counters in a meter of OpenTelemetry, read when they are exported: as Prometheus gets them.

    The counters of histograms, which OpenTelemetry cannot observe, have the attribute `le`.
    """
    from opentelemetry.metrics import Observation

    rank = {"rank": str(loader.batch_sampler.data_parallel_rank), "node": socket.gethostname()}

    def seconds(kind: str) -> Iterator[Any]:
        for (found, bucket), histogram in loader.histograms().items():
            if found == kind:
                yield Observation(histogram.seconds, rank | {"bucket": bucket})

    def counts(kind: str) -> Iterator[Any]:
        for (found, bucket), histogram in loader.histograms().items():
            if found == kind:
                for bound, count in zip(BOUNDS, histogram.counts, strict=True):
                    yield Observation(count, rank | {"bucket": bucket, "le": str(bound)})

    for name in loader.metrics():
        make = meter.create_observable_gauge if name == "samples_ahead" else meter.create_observable_counter
        make(f"binidx.{name}", callbacks=[lambda _, name=name: [Observation(loader.metrics()[name], rank)]])
    for kind in sorted({kind for kind, _ in loader.histograms()}):
        for end, observe in (("sum", seconds), ("bucket", counts)):
            make = meter.create_observable_counter
            make(f"binidx.{kind}_seconds_{end}", callbacks=[lambda _, kind=kind, observe=observe: observe(kind)])
