"""Fault x provider x transport x ETags x cache: what is read is right, or an error; `make soak` prints the table.

    fault               what a request meets with some probability, by a proxy before a real server; `replaced object`
                        replaces the object on the server instead
    provider transport  s3 gs http abfs, directly and by their drivers (BINIDX_FAST=0); files, mapped and by fsspec
    ETags               sent; or dropped by the proxy, with generations and version ids, so that only a date is left
    cache               none; memory and disk hold half of the object, so that they evict and fetch again

A sample is 65 tokens of uint16 at a random place. A read of 1,024 is compared, or refused with an error of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.proxied_store import Distant, distant_store
from helpers.reader_stacks import STORES, Shelf, Store
from servers.faults import OTHER, inverted
from servers.latency_proxy import latency_proxy

from binidx.errors import StorageError
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    # gcsfs sends the objects we put; that is not what is tested here.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

SAMPLE_BYTES, SAMPLES_PER_READ = 130, 1024
READS = 5
"""Of one cell that are compared."""
MOST_READS = 50
"""Of one cell, refused ones included."""
READS_AFTER = 2
"""Of an object that was replaced; they may be refused."""
HUNG_SECONDS = 900.0
"""A cell that takes longer hangs: a read fails after five minutes at the latest."""
DATA = np.random.default_rng(0).bytes(2 << 20)
CHUNK = 4096

FAULTS: dict[str, dict[str, float]] = {
    "short body": {"short": 0.02, "truncate": 0.05},
    "other range": {"elsewhere": 0.01, "resized": 0.01, "placeless": 0.01, "whole": 0.01, "long": 0.01},
    "other object": {"replaced": 0.005, "outgrown": 0.005},
    "garbage status line": {"garbage": 0.05},
    "oversized header": {"oversized": 0.05},
    "reset": {"reset": 0.03, "close": 0.03, "reset-late": 0.03},
    "5xx burst": {"503": 0.03, "500": 0.01},
    "transient 404": {"404": 0.02},
    "stall": {"stall": 0.002, "hang": 0.002},
    "replaced object": {},
    "redirect": {"redirect": 0.01},
}
"""Fault -> what requests meet, with which probability; each of it once in any case."""
BURST = ["503", "500", "502", "504", "429", "503"] * 4
REPLACED = [inverted(DATA), inverted(DATA) + DATA[:1000]]
"""Other bytes of the same size, and more of them."""

CACHES: dict[str, Callable[[RangeReader, Path], RangeReader]] = {
    "none": lambda reader, directory: reader,
    "memory": lambda reader, directory: ChunkCache(reader, chunk_bytes=CHUNK, store=ChunkStore(len(DATA) // 2)),
    "disk": lambda reader, directory: DiskCache(
        reader, str(directory), len(DATA) // 2, chunk_bytes=CHUNK, block_bytes=8 * CHUNK
    ),
}
PROVIDERS = {
    "s3": "driver",
    "s3 fast": "direct",
    "gs": "driver",
    "gs fast": "direct",
    "http": "direct",
    "abfs": "driver",
    "abfs fast": "direct",
}
"""Store of `reader_stacks`, or abfs -> its transport."""
FILES = {"mapped": "mapped", "file": "driver"}
UNCACHED = {"http", "abfs", "abfs fast"}
"""Providers of which nothing is cached on disk without an ETag: a recorded identity has no date there."""
CELLS = {
    (store, etags): [
        (fault, store.partition(" ")[0], PROVIDERS[store], etags, cache)
        for fault, cache in itertools.product(FAULTS, CACHES)
        if etags == "yes" or cache != "disk" or store not in UNCACHED
    ]
    for store, etags in itertools.product(PROVIDERS, ("yes", "no"))
}


@dataclass
class Cell:
    """Outcome of the reads of one cell: samples, and refused reads by the class of their error."""

    name: Sequence[str]
    compared: int = 0
    wrong: int = 0
    met: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    hung: bool = True

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {name}" for name, count in self.refused.items()) or "0"
        return ROW.format(*self.name, f"{self.compared:,}", self.wrong, int(self.hung), f"{self.met:,}", refused)


ROW = "{:20} {:5} {:7} {:5} {:7} {:>8} {:>6} {:>5} {:>7}  {}"
HEAD = "\n" + ROW.format(
    "fault", "store", "by", "ETags", "cache", "samples", "wrong", "hung", "faults", "reads refused"
)


ENDED: list[Cell] = []
Say = Callable[[object], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print at once, whether or not pytest captures."""

    def print_now(text: object) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return print_now


@contextlib.contextmanager
def far(name: str, etags: str, request: pytest.FixtureRequest, directory: Path) -> Iterator[Distant]:
    """A store behind a proxy."""
    weather: dict[str, Any] = {"delay_ms": 0, "versionless": etags == "no"}
    kind, _, fast = name.partition(" ")
    if kind != "abfs":
        with distant_store(name, request, directory, **weather) as found:
            yield found
        return
    server = request.getfixturevalue("abfs")
    with latency_proxy(server.endpoint, **weather) as proxy:
        options = {"connection_string": server.connection(proxy.endpoint), "binidx": {"fast": bool(fast)}}
        container = server.make_container(f"c{uuid.uuid4().hex}")
        yield Distant(Shelf(Store(lambda *_: container, options), request, directory), proxy)


def read_samples(cell: Cell, reader: RangeReader, rng: np.random.Generator) -> None:
    """Read samples at random places and compare them."""
    starts = rng.integers(0, (len(DATA) - SAMPLE_BYTES) // 2, SAMPLES_PER_READ) * 2
    try:
        views = reader.read([(start, start + SAMPLE_BYTES) for start in starts.tolist()])
    except StorageError as error:
        cell.refused[type(error).__name__] = cell.refused.get(type(error).__name__, 0) + 1
        return
    cell.compared += len(views)
    cell.wrong += sum(view != DATA[start : start + SAMPLE_BYTES] for start, view in zip(starts, views, strict=True))


def run_cell(
    cell: Cell, open_reader: Callable[[], RangeReader], before_read: Callable[[], Any], put: Callable[[bytes], Any]
) -> None:
    """Read until enough is compared, and after the object was replaced; in a thread, so that a hang is seen."""

    def work() -> None:
        reader, rng = open_reader(), np.random.default_rng(1)
        for _ in range(MOST_READS):
            before_read()
            read_samples(cell, reader, rng)
            if cell.compared >= READS * SAMPLES_PER_READ:
                break
        for data in REPLACED if cell.name[0] == "replaced object" else ():
            put(data)
            cell.met += 1
            for _ in range(READS_AFTER):
                read_samples(cell, reader, rng)
        cell.hung = False

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HUNG_SECONDS)


def run_distant_cell(cell: Cell, distant: Distant, directory: Path) -> None:
    """Run a cell of a store behind a proxy."""
    fault, _, _, etags, cache = cell.name
    name = f"{uuid.uuid4().hex}.bin"
    distant.proxy.become()
    uri, met = distant.put(name, DATA), distant.proxy.counts().faults.total()
    if distant.shelf.web is not None:
        distant.shelf.web.behaviour = "heedless"

    def open_reader() -> RangeReader:
        options = distant.options(max_gap=8 << 10, deadline_seconds=300, hedge=True)
        reader = CACHES[cache](open_object(uri, storage_options=options, cache=False), directory)
        distant.proxy.become(faults=FAULTS[fault], script=[None, *FAULTS[fault]])
        return reader

    def burst() -> None:
        distant.proxy.become(faults=FAULTS[fault], script=BURST)

    run_cell(
        cell,
        open_reader,
        burst if fault == "5xx burst" else lambda: None,
        lambda data: put_later(distant, name, data) if etags == "no" else distant.put(name, data),
    )
    cell.met += distant.proxy.counts().faults.total() - met


def put_later(distant: Distant, name: str, data: bytes) -> None:
    """Put an object of which only the date will tell that it is another one; a date has whole seconds."""
    time.sleep(1.1)
    distant.put(name, data)


def check(cells: Sequence[Cell], say: Say) -> None:
    """Print what was compared so far, and check that each cell met its fault, compared enough, nothing wrong."""
    ENDED.extend(cells)
    samples, wrong, hung = (sum(getattr(each, name) for each in ENDED) for name in ("compared", "wrong", "hung"))
    say(f"\n{samples:,} samples compared in {len(ENDED)} cells so far, {wrong} wrong; {hung} cells hung")
    assert [str(each) for each in cells if each.wrong or each.hung or not each.met] == []
    assert min(each.compared for each in cells) >= READS * SAMPLES_PER_READ


def test_the_matrix_has_a_million_samples() -> None:
    num_cells = sum(map(len, CELLS.values())) + len(FILES)
    assert num_cells * READS * SAMPLES_PER_READ >= 1_000_000


@pytest.mark.parametrize(("store", "etags"), CELLS)
def test_no_fault_of_a_store_becomes_a_wrong_sample(
    store: str, etags: str, request: pytest.FixtureRequest, tmp_path: Path, say: Say
) -> None:
    cells = [Cell(name) for name in CELLS[store, etags]]
    with far(store, etags, request, tmp_path) as distant:
        distant.put(OTHER, inverted(DATA))
        time.sleep(1.1)  # so that its date is another one
        say(HEAD)
        for number, cell in enumerate(cells):
            run_distant_cell(cell, distant, tmp_path / f"cache-{number}")
            say(cell)
            if cell.hung:
                break
    check(cells, say)


def test_no_replaced_file_becomes_a_wrong_sample(tmp_path: Path, say: Say) -> None:
    cells = [Cell(("replaced object", "file", transport, "no", "none")) for transport in FILES.values()]
    for cell, name in zip(cells, FILES, strict=True):
        shelf = Shelf(STORES["file"], None, tmp_path)  # type: ignore[arg-type]
        uri = shelf.put(DATA, f"{name}.bin")
        run_cell(
            cell,
            lambda uri=uri, name=name: open_object(uri, mmap=name == "mapped", cache=False),
            lambda: None,
            lambda data, shelf=shelf, name=name: shelf.put(data, f"{name}.bin"),
        )
        say(cell)
    check(cells, say)
