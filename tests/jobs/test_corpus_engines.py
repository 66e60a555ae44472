"""convert and verify on processes of this machine, Ray and Dask: the bytes and findings of one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.dask_cluster import dask_cluster
from helpers.lineage_data import build_with_lineage
from helpers.random_datasets import Document, build_ours

from binidx.corpus import token_parts
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_datasets
from binidx.corpus.verify import verify_dataset
from binidx.jobs.engines import LocalExecutor
from binidx.jobs.parts import Workers
from binidx.storage.codecs.segments import SEGMENT_BYTES


def assert_same(workers: Workers, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset with lineage, longer than a part, is copied, compressed and verified as by one process."""
    monkeypatch.setattr(token_parts, "LEAST_BYTES", SEGMENT_BYTES)
    long = np.minimum(np.random.default_rng(1).geometric(0.01, 3 * SEGMENT_BYTES), 65535)
    other = build_ours(folder / "other", [Document(long, [len(long)], [])], np.uint16)
    merge_datasets([build_with_lineage(folder / "a", 80, 1), other], source := folder / "en")
    for name, way in {"sums": StorageFormat(checksums=True), "zstd": StorageFormat("zstd", 1)}.items():
        convert_dataset(source, folder / f"one-{name}" / "en", way=way)
        convert_dataset(source, folder / f"many-{name}" / "en", way=way, workers=workers)
        one, many = (
            {file.name: file.read_bytes() for file in (folder / f"{whose}-{name}").iterdir()}
            for whose in ("one", "many")
        )
        assert many == one
    found = verify_dataset(folder / "many-zstd" / "en", lineage=True)
    by_workers = verify_dataset(folder / "many-zstd" / "en", lineage=True, workers=workers, records=folder / "records")
    assert replace(by_workers, seconds=0) == replace(found, seconds=0)
    assert found.lineage
    assert not (folder / "records").exists()


def test_processes_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalExecutor(2) as processes:
        assert_same(Workers(executor=processes), tmp_path, monkeypatch)


def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    try:
        assert_same(Workers("ray"), tmp_path, monkeypatch)
    finally:
        ray.shutdown()


def test_dask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dask_cluster(tmp_path, num_workers=1) as (address, _):
        assert_same(Workers(f"dask={address}"), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "dask"])
def test_a_killed_worker_costs_its_attempts_only(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", SEGMENT_BYTES)
    long = np.random.default_rng(1).integers(0, 9, 200 * SEGMENT_BYTES, np.uint16)
    source = build_ours(tmp_path / "en", [Document(long, [len(long)], [])], np.uint16)
    with contextlib.ExitStack() as stack:
        workers, processes = Workers("local", 2), list[int]()
        if engine == "dask":
            address, found = stack.enter_context(dask_cluster(tmp_path))
            workers, processes = Workers(f"dask={address}"), [found[1].pid]

        def kill_one() -> None:
            while len(list(tmp_path.glob("copy-parts/*.json"))) < 5:
                time.sleep(0.01)
            os.kill((processes or [child.pid for child in multiprocessing.active_children()])[0], signal.SIGKILL)

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        convert_dataset(source, tmp_path / "copy", way=StorageFormat("zstd"), workers=workers)
        killer.join()
    convert_dataset(source, tmp_path / "one", way=StorageFormat("zstd"))
    assert (tmp_path / "copy.bin.zst").read_bytes() == (tmp_path / "one.bin.zst").read_bytes()
    assert not (tmp_path / "copy-parts").exists()
