"""What every test may ask for."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from servers import seaweed
from servers.azurite import AzureServer, azurite
from servers.ceph import ceph_server
from servers.gcs import gcs_server
from servers.http_objects import Server, http_objects
from servers.seaweed import S3Server, s3_server

from binidx.storage.requests.node_rates import node_rates
from binidx.storage.requests.scheduler import STORE_TIMES, _schedulers

# No test depends on the speed of the machine.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# `nohup make check &` ignores SIGINT, and child processes inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

S3_SERVERS = {"seaweed": s3_server, "ceph": ceph_server}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--s3", choices=[*S3_SERVERS], default="seaweed", help="the S3 server to test against")
    parser.addoption("--kill-rounds", type=int, default=1_050, help="kill -9 of all jobs of test_kills.py together")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: much of a test is waiting for a server, a child process or the disk."""
    return (os.cpu_count() or 1) + 1


LONG = (
    "test_contract",
    "test_demo",
    "test_sanitizers",
    "test_examples",
    "test_rank_agreement",
    "test_training",
    "test_releases",
    "test_build_lock",
    "test_distribution",
    "test_everywhere",
    "test_merge",
    "test_disk_cache_damage",
    "test_how_to",
    "test_text_to_step",
)
"""Files that take a minute: they begin first, so that no worker is left with one at the end. The contracts of readers
fork, which takes long in a process that has grown."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(".py" in argument for argument in config.args):
        return  # of named files the first begins: `make fast` names the nearest first
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


NEEDS_TORCH = re.compile(r"No module named '(torch|transformers|lightning)\b|pip install 'binidx\[torch\]'")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip the modules that need torch, where it is not installed: `make test-versions`."""
    return skipped_without_torch((yield), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip the tests that need torch, where it is not installed."""
    return skipped_without_torch((yield), item.path)


def skipped_without_torch(report: Any, path: Path) -> Any:
    if report.failed and find_spec("torch") is None and NEEDS_TORCH.search(str(report.longrepr)):
        report.outcome, report.longrepr = "skipped", (str(path), 0, "Skipped: needs torch")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import without garbage collections: they take 9 of 26 s of CPU in each process of the suite."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """No garbage collection looks again at what was imported until now: a contract takes half the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> Iterator[None]:
    """Nor at what a module of tests has imported or cached: a collection takes 0.3 s of a process that has grown."""
    yield
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _helpers_for_children() -> Iterator[None]:
    """Child processes import `helpers`, `servers` and `demo` as the tests do."""
    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{tests.parent / 'examples'}", prepend=os.pathsep)
        # Hundreds of children import the package: each would compile it again.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_reads() -> Iterator[None]:
    """On a busy machine no read sends a second request or gives up, and no child is late, unless its test asks so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("binidx.testing.CHILD_TIMEOUT_SECONDS", 900.0)
        patch.setenv("BINIDX_HEDGE", "0")
        patch.setenv("BINIDX_DEADLINE_SECONDS", "600")
        yield


@pytest.fixture(scope="session", autouse=True)
def _rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process shares rates with no other one; its children share theirs, of servers that others do not have."""
    with pytest.MonkeyPatch.context() as patch:
        path = str(tmp_path_factory.mktemp("rates") / "binidx" / "rates")
        patch.setattr("binidx.storage.requests.node_rates.default_path", lambda: path)
        yield


@pytest.fixture(scope="session", autouse=True)
def _index_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Index files of this run go to a directory of its own, which no earlier run has filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BINIDX_INDEX_DIR", str(tmp_path_factory.mktemp("index-dir")))
        yield


@dataclass
class IndexBuilds:
    """Builds of GPT indices in this process: the options of each, and a context for each."""

    options: list[dict[str, Any]] = field(default_factory=list)
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@pytest.fixture
def index_builds(monkeypatch: pytest.MonkeyPatch) -> IndexBuilds:
    from binidx.order import gpt_order

    builds, build = IndexBuilds(), gpt_order.build_gpt_index

    def build_and_note(*arguments: Any, **options: Any) -> None:
        builds.options.append(options)
        with builds.around():
            build(*arguments, **options)

    monkeypatch.setattr(gpt_order, "build_gpt_index", build_and_note)
    return builds


@pytest.fixture
def local_workers_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine `local` of commands works in threads of this process: a process takes seconds to begin."""
    monkeypatch.setattr("binidx.jobs.engines.LocalExecutor", ThreadPoolExecutor)


@pytest.fixture(autouse=True)
def _unknown_stores() -> None:
    """No store has answered yet: tests give one name to many servers."""
    STORE_TIMES.answered.clear()
    node_rates().forget()
    for scheduler in _schedulers.values():
        scheduler.limiters.clear()


@pytest.fixture(autouse=True)
def _quiet_loggers() -> None:
    """Warnings are logged and nothing below: a library that an earlier test ran may have lowered a level for good."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("binidx").setLevel(logging.NOTSET)


@dataclass(frozen=True)
class Bucket:
    """A bucket on a real S3 server; the environment points s3fs, boto3 and child processes at it."""

    uri: str
    server: S3Server

    def fresh(self) -> str:
        """A URI under which nothing lies yet."""
        return f"{self.uri}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    start = S3_SERVERS[request.config.getoption("--s3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seaweed, "SECONDS_TO_START", 900.0)
        with start(tmp_path_factory.mktemp("s3-server")) as server, server.in_environment():
            yield Bucket(server.make_bucket("test-bucket"), server)


@pytest.fixture(scope="session")
def gs() -> Iterator[str]:
    """A bucket on a small GCS server; the environment points gcsfs at it."""
    with gcs_server() as server, server.in_environment():
        yield "gs://test-bucket"


@pytest.fixture(scope="session")
def abfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """A real server of Azure blobs; the environment points adlfs and child processes at it."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server, server.in_environment():
        yield server


@pytest.fixture(scope="session")
def web() -> Iterator[Server]:
    """A server of objects over plain HTTP, in this process: web.objects["/name"] = data."""
    with http_objects({}) as server:
        yield server
