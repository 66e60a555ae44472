"""CPU of one ranged request over S3, of the whole process: the direct transport, obstore and bare aiohttp in turns.

No scheduler, no retries: 64 coroutines, each of which asks for the next range. The direct transport checks status,
length, range and ETag of each response. obstore checks the range, and the ETag where `get` reports it; its calls
differ in what a caller learns:

    get             ETag, size and date of the object: what a check of the version needs
    get_range       the bytes alone
    get_ranges      the bytes alone, ten requests at a time, without asyncio

Only where obstore is installed: `pip install obstore`, then `python -m tests.bench transports`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from binidx.storage.interfaces import Range
from binidx.storage.location import Location
from tests.bench.clients import IN_FLIGHT, RANGE_BYTES, ROUNDS, STARTS, fetch_bare
from tests.bench.range_server import LEAST_MS, range_server
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row, interleaved_medians

CONDITIONS = Conditions(cores=0, size="ranges of 16 KiB of one object", cached="open connections")
REGION = "us-east-1"
RANGES = [(start, start + RANGE_BYTES) for start in STARTS]

Fetch = Callable[[Range], Coroutine[Any, Any, object]]


def rows(directory: Path) -> list[Row]:
    with range_server() as endpoint:
        s3 = {"endpoint_url": endpoint, "key": "k", "secret": "s", "client_kwargs": {"region_name": REGION}}
        runs = {"direct": direct(s3), "driver": direct({**s3, "binidx": {"fast": False}}, RANGES[:1000])}
        runs |= obstore_runs(endpoint)
        url = f"{endpoint}/bench/data?" + "X-Amz-Signature=0123456789abcdef" * 10
        runs["bare aiohttp"] = lambda: fetch_bare(url, STARTS, RANGE_BYTES, IN_FLIGHT)
        found = interleaved_medians(*runs.values(), rounds=ROUNDS, clock=time.process_time)
    counts = {"driver": 1000}
    costs = {name: each / counts.get(name, len(RANGES)) * 1e6 for name, each in zip(runs, found, strict=True)}
    ours = costs.pop("direct")
    return [Row("CPU per request, s3, direct", ours, cost, "us", False, "", name) for name, cost in costs.items()]


def direct(options: dict[str, Any], ranges: Sequence[Range] = RANGES) -> Callable[[], object]:
    from fsspec.asyn import get_loop

    store: Any = Location("s3://bench/data", options).store
    loop = get_loop()
    info, _ = asyncio.run_coroutine_threadsafe(store.head("s3://bench/data"), loop).result()
    work = lambda where: store.fetch(info, where)  # noqa: E731

    def run() -> None:
        began = time.perf_counter()
        asyncio.run_coroutine_threadsafe(in_flight(work, ranges), loop).result()
        check_reached("direct", len(ranges), time.perf_counter() - began, LEAST_MS)

    return run


def obstore_runs(endpoint: str) -> dict[str, Callable[[], object]]:
    import obstore

    store = obstore.store.S3Store(
        "bench",
        endpoint=endpoint,
        access_key_id="k",
        secret_access_key="s",
        region=REGION,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )

    async def get(where: Range) -> object:
        response = await obstore.get_async(store, "data", options={"range": where, "if_match": '"x"'})
        assert (response.meta["e_tag"], response.range) == ('"x"', where)
        return checked(where, await response.bytes_async())

    async def get_range(where: Range) -> object:
        return checked(where, await obstore.get_range_async(store, "data", start=where[0], end=where[1]))

    starts, stops = zip(*RANGES, strict=True)
    return {
        "obstore get": lambda: asyncio.run(in_flight(get, RANGES)),
        "obstore get_range": lambda: asyncio.run(in_flight(get_range, RANGES)),
        "obstore get_ranges": lambda: obstore.get_ranges(store, "data", starts=starts, ends=stops, coalesce=0),
    }


def checked(where: Range, body: Any) -> memoryview:
    """Return a body as long as its range."""
    view = memoryview(body)
    assert len(view) == where[1] - where[0]
    return view


async def in_flight(fetch: Fetch, ranges: Sequence[Range]) -> None:
    """Fetch all ranges, IN_FLIGHT at a time."""
    left = iter(ranges)

    async def work() -> None:
        for where in left:
            await fetch(where)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
