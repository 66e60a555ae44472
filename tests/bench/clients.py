"""16 KiB ranges at 25 to 30 ms, one process: ours against bare clients on the same ranges, by rate and by CPU.

A bare client has so many coroutines, each of which asks for the next range, and does nothing else: no bound over
threads, no retries, no length checked. The limit of all is requests in flight / 27.5 ms; what is missing to it is CPU,
the server's among it where there are two cores only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from servers.http_objects import write_certificate

from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from tests.bench.range_server import LEAST_MS, MOST_MS, SIZE, range_server
from tests.bench.remote import remote_seconds
from tests.bench.table import Conditions, Row, interleaved_medians

CONDITIONS = Conditions(cores=1, size="ranges of 16 KiB of one object", cached="open connections")
RANGE_BYTES = 16 << 10
IN_FLIGHT = 64
ROUNDS = 5
# None touches another, so that each is a request.
STARTS = random.Random(1).sample(range(0, SIZE - RANGE_BYTES, 2 * RANGE_BYTES), 4000)
FEW = STARTS[:1000]

Run = Callable[[], object]


def rows(directory: Path) -> list[Row]:
    with range_server(write_certificate(directory / "tls.pem")) as endpoint:
        tls = ours("s3://bench/data", s3_options(endpoint, verify=False), STARTS)
        by_tls = compare("s3 over https, signed URLs", tls, bare_aiohttp(endpoint), STARTS, "aiohttp")
    with range_server() as endpoint:
        s3 = s3_options(endpoint)
        gs = {"endpoint_url": endpoint, "token": "anon", "project": "p"}
        return [
            *by_s3fs(s3),
            *compare("s3, signed URLs", ours("s3://bench/data", s3, STARTS), bare_aiohttp(endpoint), STARTS, "aiohttp"),
            *by_tls,
            *compare("gs, media URLs", ours("gs://bench/data", gs, STARTS), bare_aiohttp(endpoint), STARTS, "aiohttp"),
            *compare("gs by gcsfs", ours("gs://bench/data", gs, FEW, fast=False), gcsfs_ranges(gs), FEW, "gcsfs"),
            in_flight(ours("s3://bench/data", s3, STARTS, concurrency=None)),
        ]


def s3_options(endpoint: str, **client: Any) -> dict[str, Any]:
    return {
        "endpoint_url": endpoint,
        "key": "k",
        "secret": "s",
        "client_kwargs": {"region_name": "us-east-1", **client},
    }


def by_s3fs(options: dict[str, Any]) -> list[Row]:
    run = ours("s3://bench/data", options, FEW, fast=False)
    ours_seconds, theirs_seconds = interleaved_medians(run, s3fs_ranges(options, None), rounds=2)
    work = f"requests, s3 by s3fs, {IN_FLIGHT} in flight"
    rates = per_second(ours_seconds, FEW), per_second(theirs_seconds, FEW)
    as_it_comes = Row(work, *rates, "1/s", True, "", "s3fs as it comes", "as it comes")
    return [as_it_comes, *compare("s3 by s3fs", run, s3fs_ranges(options, IN_FLIGHT), FEW, "s3fs, a pool of 64")]


def compare(name: str, run: Run, bare: Run, starts: list[int], client: str) -> list[Row]:
    """Share of the bare client's rate, and how many times its CPU."""
    walls = interleaved_medians(run, bare, rounds=ROUNDS)
    cores = interleaved_medians(run, bare, rounds=ROUNDS, clock=time.process_time)
    rates, costs = ([per_second(each, starts) for each in walls], [each / len(starts) * 1e6 for each in cores])
    bare_client = f"{client}, bare"
    return [
        Row(f"requests, {name}, {IN_FLIGHT} in flight", *rates, "1/s", True, "", bare_client),
        Row(f"CPU per request, {name}", *costs, "us", False, "", bare_client),
    ]


def in_flight(run: Run) -> Row:
    limit = IN_FLIGHT / (LEAST_MS + MOST_MS) * 2e3
    rate = per_second(interleaved_medians(run, rounds=ROUNDS)[0], STARTS)
    return Row(
        "requests, s3, signed URLs, as it comes", rate, limit, "1/s", True, "128 in flight", "64 in flight: limit"
    )


def per_second(seconds: float, starts: list[int]) -> float:
    return len(starts) / seconds


def ours(uri: str, options: dict[str, Any], starts: list[int], **settings: Any) -> Run:
    settings = {"max_gap": 0, "concurrency": IN_FLIGHT, **settings}
    reader = RemoteObject(Location.of(uri, {**options, "binidx": settings}))
    ranges = [(start, start + RANGE_BYTES) for start in starts]
    return lambda: remote_seconds(uri, LEAST_MS, lambda: reader.read(ranges))


def bare_aiohttp(endpoint: str) -> Run:
    """Its URL is as long as a signed one."""
    url = f"{endpoint}/bench/data?" + "X-Amz-Signature=0123456789abcdef" * 10
    return lambda: fetch_bare(url, STARTS, RANGE_BYTES, IN_FLIGHT)


def fetch_bare(url: str, starts: Sequence[int], num_bytes: int, in_flight: int) -> int:
    """Fetch ranges by aiohttp on a loop of its own in this thread; return the bytes that came."""
    import aiohttp

    async def all_of_them() -> int:
        left = iter(starts)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight, ssl=False)) as session:

            async def work() -> int:
                came = 0
                for start in left:
                    header = {"Range": f"bytes={start}-{start + num_bytes - 1}"}
                    async with session.get(url, headers=header) as response:
                        came += len(await response.read())
                return came

            return sum(await asyncio.gather(*(work() for _ in range(in_flight))))

    return asyncio.run(all_of_them())


def s3fs_ranges(options: dict[str, Any], pool: int | None) -> Run:
    import s3fs

    config = {"config_kwargs": {"max_pool_connections": pool}} if pool else {}
    return cat_ranges(s3fs.S3FileSystem(**options, **config), pool)


def gcsfs_ranges(options: dict[str, Any]) -> Run:
    import gcsfs

    return cat_ranges(gcsfs.GCSFileSystem(**options), IN_FLIGHT)


def cat_ranges(fs: Any, batch_size: int | None) -> Run:
    stops = [start + RANGE_BYTES for start in FEW]
    return lambda: fs.cat_ranges(["bench/data"] * len(FEW), FEW, stops, on_error="raise", batch_size=batch_size)
