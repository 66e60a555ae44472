"""One dataset of many cannot be built while another waits for a process that builds: the error, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import binidx
from binidx.index.cache.build_lock import HeldLease, Lease
from binidx.storage import steps
from binidx.storage.location import Location
from binidx.storage.writing.publish import delete_object

SCRIPT = """
import sys
import binidx
from helpers.gpt_data import TOKENIZER

base, *names = sys.argv[1:]
config = binidx.GPTDatasetConfig(
    random_seed=3, sequence_length=16, blend=([f"{base}/{name}" for name in names], [1.0] * len(names)), split="1,0,0",
    tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    cache_small_indices=True, path_to_cache=f"{base}/cache", num_dataset_builder_threads=2,
)
binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [20, 0, 0], lambda: True, config).build()
"""


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with one dataset, `en`."""
    found = f"{tmp_path}/data" if request.param == "local" else request.getfixturevalue("s3").fresh()
    with binidx.IndexedDatasetBuilder(f"{found}/en.bin", np.uint16) as builder:
        for _ in range(30):
            builder.add_document(np.ones(40, np.uint16), [40])
        builder.finalize(f"{found}/en.idx")
    return str(found)


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    node = {**os.environ, "BINIDX_INDEX_DIR": f"{tmp_path}/node"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=node)


def held_claim(base: str) -> Any:
    """The claim of an index that was built, and is to be built again, in the hands of somebody who is at work."""
    fs, path = fsspec.core.url_to_fs(f"{base}/cache")
    [name] = [each for each in fs.ls(path, detail=False) if "GPTDataset-train-binidx.json" in each]
    uri = f"{base}/cache/{name.rpartition('/')[2]}"
    delete_object(Location.of(uri))
    holding = steps.run(Lease(Location.of(f"{uri}-claim")).acquire())
    assert isinstance(holding, HeldLease)
    return holding


def test_an_error_does_not_wait_for_the_datasets_that_wait_for_another_node(base: str, tmp_path: Path) -> None:
    """Not even the process does, whose threads Python joins when it ends."""
    assert run(tmp_path, base, "en").returncode == 0
    with held_claim(base):
        began = time.monotonic()
        failed = run(tmp_path, base, "en", "missing")
    assert "missing.idx" in failed.stderr
    assert "ObjectNotFoundError" in failed.stderr.splitlines()[-1]
    assert time.monotonic() - began < 500, "the claim is held for as long as we wait"
