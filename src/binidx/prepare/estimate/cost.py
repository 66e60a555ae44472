"""What the run costs that makes a dataset out of text: time of cores, bytes, requests, dollars at list price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from binidx.prepare.preprocess.engines import available_cores
from binidx.prepare.preprocess.plan import part_bytes_of
from binidx.storage.filesystem import local_path, protocols
from binidx.storage.report import DOLLARS_PER_REQUEST, STORES
from binidx.text.slices import Input
from binidx.text.stored import REQUEST_BYTES

IDX_BYTES = 20
"""Of a document of one sequence."""

WRITES_PER_PART = 5
"""Tokens, index, lineage, record, and the copy into the whole."""

DOLLARS_PER_WRITE = {"s3": 0.005 / 1_000, "gs": 0.05 / 10_000}
"""Of a PUT or a copy: S3 Standard, us-east-1, $0.005 per 1,000; GCS Standard, class A, $0.05 per 10,000. As known in
November 2026, as `storage.report` says of the GETs."""


@dataclass(frozen=True)
class Cost:
    """Of the whole run, about.

    Attributes:
        cpu_hours: of cores like those of this machine, reading text and tokenising it; `cores` it has.
        bytes_in, bytes_out: read as they are stored, and written plain.
        reads, writes: requests, if text and tokens are in a store.
        dollars: of the requests, if both are in the store of the text; 0 where that has no list price.
    """

    cpu_hours: float
    cores: int
    bytes_in: int
    bytes_out: int
    parts: int
    reads: int
    writes: int
    dollars: float


def cost_of(inputs: Sequence[Input], cpu_seconds: float, tokens: float, documents: float, item_bytes: int) -> Cost:
    """Of a run over these inputs, in parts of the size that `preprocess` gives them."""
    bytes_in = sum(each.size for each in inputs)
    parts = -(-bytes_in // part_bytes_of(bytes_in)) if bytes_in else 0
    reads = sum(-(-each.size // REQUEST_BYTES) for each in inputs) + parts
    writes = parts * WRITES_PER_PART
    return Cost(
        cpu_seconds / 3600,
        available_cores(),
        bytes_in,
        int(tokens * item_bytes + documents * IDX_BYTES),
        parts,
        reads,
        writes,
        reads * _price(inputs, DOLLARS_PER_REQUEST) + writes * _price(inputs, DOLLARS_PER_WRITE),
    )


def _price(inputs: Sequence[Input], prices: dict[str, float]) -> float:
    """Of a request to the store of the text."""
    remote = [each.uri for each in inputs if local_path(each.uri) is None]
    return prices.get(STORES.get(protocols(remote[0])[0], ""), 0.0) if remote else 0.0
