"""Spans of OpenTelemetry around a start, its index builds and the first batch; none without OpenTelemetry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.random_datasets import Document, build_ours

STARTED = """
import json, sys
import binidx
from binidx.storage.stats import span

if sys.argv[2] == "traced":
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

for _ in range(2):
    dataset = binidx.load_dataset(
        [sys.argv[1], sys.argv[1] + "2"], 16, num_samples=40, cache_small_indices=True,
        path_to_cache=sys.argv[1] + "-cache", num_dataset_builder_threads=2,
    )
    assert len([*dataset.loader(batch_size=8)]) > 1
with span("outer") as context:
    pass
if sys.argv[2] == "traced":
    spans = exporter.get_finished_spans()
    names = {each.context.span_id: each.name for each in spans}
    print(json.dumps([
        [each.name, names.get(each.parent.span_id) if each.parent else None, dict(each.attributes)] for each in spans
    ]))
else:
    print(json.dumps([context, "opentelemetry" in sys.modules]))
"""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    documents = [Document(np.ones(50, np.uint16), [50], [0]) for _ in range(30)]
    build_ours(tmp_path / "en2", documents, np.uint16, multimodal=False)
    return str(build_ours(tmp_path / "en", documents, np.uint16, multimodal=False))


def start(prefix: str, how: str) -> list[list[object]]:
    result = subprocess.run([sys.executable, "-c", STARTED, prefix, how], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: list[list[object]] = json.loads(result.stdout)
    return found


def test_a_start_its_builds_and_the_first_batch_have_spans(prefix: str) -> None:
    spans = start(prefix, "traced")
    names = [name for name, *_ in spans]
    assert names.count("binidx.start") == names.count("binidx.first_batch") == 2
    builds = [(parent, attributes) for name, parent, attributes in spans if name == "binidx.index.build"]
    assert {parent for parent, _ in builds} == {"binidx.start"}, "also of builds in other threads"
    indices = [str(attributes["index"]) for _, attributes in builds if isinstance(attributes, dict)]
    assert len(indices) == len({*indices}), "the second start finds them"
    assert {index.split("-")[1] for index in indices} == {"GPTDataset", "BlendedDataset"}


def test_without_opentelemetry_nothing_is_imported(prefix: str) -> None:
    assert start(prefix, "untraced") == [None, False]
