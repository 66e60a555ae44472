"""A store behind a proxy: objects are put where they lie, and read from afar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.reader_stacks import STORES, Shelf
from servers.latency_proxy import Proxy, latency_proxy
from servers.log import Counts

from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object

TRANSPORTS = ["s3", "s3 fast", "gs", "gs fast", "http", "http fast"]
"""All that read from a server, in `reader_stacks.STORES`."""


@dataclass
class Distant:
    shelf: Shelf
    proxy: Proxy

    @property
    def base(self) -> str:
        """The URI under which objects are found through the proxy."""
        return self.proxy.endpoint if self.shelf.web is not None else self.shelf.base

    def put(self, name: str, data: bytes) -> str:
        """The URI of an object with this content."""
        self.shelf.put(data, name)
        return f"{self.base}/{name}"

    def options(self, **settings: Any) -> dict[str, Any]:
        """Storage options to read through the proxy, with settings of ours."""
        given = dict(self.shelf.store.options or {})
        ours = {**given.pop("binidx", {}), **settings}
        endpoint = {} if self.shelf.web is not None else {"endpoint_url": self.proxy.endpoint}
        return {**given, **endpoint, "binidx": ours}

    def open(self, uri: str, **settings: Any) -> RangeReader:
        """Without a cache, and in exact ranges."""
        return open_object(uri, storage_options=self.options(max_gap=0, **settings), cache=False)


def counts_in_flight(proxy: Proxy, enough: int, read: Callable[[], object]) -> Counts:
    """What the proxy counts while `read` runs, with answers later and later until so many requests are in flight.

    On a busy machine few requests are sent before the first answer of a near store comes.
    """
    for delay_ms in (20, 200, 2_000, 20_000):
        proxy.become(delay_ms=delay_ms)
        proxy.reset()
        read()
        counts = proxy.counts()
        if counts.most_at_once >= enough:
            break
    return counts


@contextlib.contextmanager
def distant_store(name: str, request: pytest.FixtureRequest, directory: Path, **weather: Any) -> Iterator[Distant]:
    """One of `TRANSPORTS`; it is as far away as the weather says."""
    shelf = Shelf(STORES[name], request, directory)
    variable = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}.get(name.partition(" ")[0])
    with latency_proxy(os.environ[variable] if variable else shelf.web.endpoint, **weather) as proxy:
        yield Distant(shelf, proxy)
