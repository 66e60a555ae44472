"""Spans of OpenTelemetry around the slow steps of a run, if the program has imported OpenTelemetry; else nothing.

    binidx.start          `build()` of a builder: opens the data, loads or builds the indices, compares the ranks
    binidx.index.build    one index, with its name; within binidx.start
    binidx.first_batch    the first batch of an iteration over a loader

A program that sets a TracerProvider has imported the API, so no other program pays for its import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def span(name: str, parent: Any = None, **attributes: str) -> Iterator[Any]:
    """Record the time of the block, and an exception that ends it, as a span.

    Args:
        name: of the span.
        parent: what the block of the parent span yielded, if that is one of another thread.
        attributes: of the span; no URI, as it may hold secrets.

    Yields:
        The context of the span, as `parent` of others; None without OpenTelemetry.
    """
    trace, context = (sys.modules.get(f"opentelemetry.{module}") for module in ("trace", "context"))
    if trace is None or context is None:
        yield None
        return
    with trace.get_tracer("binidx").start_as_current_span(name, parent, attributes=attributes):
        yield context.get_current()
