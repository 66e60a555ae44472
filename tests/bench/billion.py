"""10^9 documents: all three indices into their files, in a process of its own that is watched.

Lengths are those of an .idx: mapped from a file, 4 bytes each, a random stretch of 2^22 (lognormal, 1,000 tokens on
average) over and over. Documents are a range, samples have 4,096 tokens. Wall time, and the most anonymous memory there
was (RssAnon of /proc, every 20 ms, less what the process had before); files are page cache. At 10^8 documents the
arrays are compared with Megatron Core's; at 10^9, where it needs 27 GB and more than two minutes, the document index is
compared with NumPy's shuffle of 4 GB, if BINIDX_BENCH_CHECK=1 (a minute).

Not part of the default run: 11 GB of disk, and 14 GiB of memory that is free. BINIDX_BENCH_DOCUMENTS=100000000 is a
tenth. The limit: a cache line in and out for each step of a shuffle, one line in for each gathered length, and 16
bytes a document that are touched for the first time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from binidx.dataset.config import Split
from binidx.index.cache.array_writer import SHUFFLED_IN_FILE
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.document_sample import EpochPlan, count_tokens, plan_epochs
from binidx.index.gpt_indices import ARRAYS, build_gpt_index
from binidx.native.permutations import RandomState
from binidx.storage.location import Location
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=2, size="1,000,000,000 documents", cached="lengths in the page cache")
NUM_DOCUMENTS = int(os.environ.get("BINIDX_BENCH_DOCUMENTS", 10**9))
THREADS = 2
SEQUENCE_LENGTH = 4096
SEED = 1234
STRETCH = 2**22
NAME = f"0f-GPTDataset-{Split.train.name}"


def rows(directory: Path) -> list[Row]:
    """Seconds to the three files, and anonymous gigabytes on the way; the peer's figures are the goals."""
    write_lengths(directory / "lengths", NUM_DOCUMENTS)
    command = [sys.executable, "-m", "tests.bench.billion", str(directory)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    work = f"three indices of {NUM_DOCUMENTS:,} documents to files, {THREADS} threads"
    note = f"goal 60 s at 10^9; {found['parts']}"
    memory = (
        f"goal 10 GiB at 10^9; formula {found['formula'] / 2**30:.2f} GiB; {found['files'] / 2**30:.1f} GiB of files"
    )
    return [
        Row(work, found["seconds"], 60 * NUM_DOCUMENTS / 1e9, "s", False, note, "the goal"),
        Row(
            f"{work}: anonymous memory",
            found["peak"] / 2**30,
            10 * NUM_DOCUMENTS / 1e9,
            "GiB",
            False,
            memory,
            "the goal",
        ),
    ]


def write_lengths(path: Path, count: int) -> None:
    stretch = np.maximum(np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1.0, STRETCH), 1).astype(np.int32)
    with open(path, "wb") as file:
        for first in range(0, count, STRETCH):
            file.write(stretch[: count - first].data)


def measured(directory: Path) -> dict[str, Any]:
    """Build, watched."""
    lengths = np.memmap(directory / "lengths", np.int32, "r")
    documents, parts = range(len(lengths)), []
    with Watch() as watch:
        start = time.perf_counter()
        tokens = count_tokens(lengths, documents, threads=THREADS)
        plan = plan_epochs(tokens, SEQUENCE_LENGTH, None, add_extra_token=True, drop_last_partial=True)
        parts.append(f"token count {time.perf_counter() - start:.1f} s")
        arrays = IndexCache(IndexFiles(Location.of(directory / "cache"), NAME)).load_or_build(
            "described",
            {},
            ARRAYS,
            lambda writer: build_gpt_index(
                writer, lengths, documents, plan, RandomState(SEED), SEQUENCE_LENGTH, threads=THREADS
            ),
        )
        taken = time.perf_counter() - start
    formula = peak_formula(plan, len(documents))
    assert watch.peak < formula + (64 << 20), (watch.peak, formula)
    check(arrays, lengths, plan)
    files = sum(path.stat().st_size for path in (directory / "cache").iterdir())
    return {"seconds": taken, "peak": watch.peak, "formula": formula, "files": files, "parts": ", ".join(parts)}


def peak_formula(plan: EpochPlan, num_documents: int) -> int:
    """What the docstring of `build_gpt_index` says, in bytes."""
    shuffled = 4 * num_documents * plan.num_epochs, 4 * plan.num_samples
    return max((size for size in shuffled if size > SHUFFLED_IN_FILE), default=0) + THREADS * (2 << 20)


class Watch:
    """The most anonymous memory of this process in the block, beyond what it had before."""

    def __enter__(self) -> Watch:
        self.before, self.peak, self._over = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, anonymous_bytes() - self.before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def anonymous_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def check(arrays: dict[str, Any], lengths: np.ndarray, plan: EpochPlan) -> None:
    """Megatron Core's arrays, or at a size that it has no memory for, the document index of NumPy."""
    if len(lengths) <= 10**8:
        from helpers.oracle import megatron

        rng = np.random.RandomState(SEED)
        index = megatron.gpt._build_document_index(np.arange(len(lengths), dtype=np.int32), 1, rng, False)
        arguments = (SEQUENCE_LENGTH, plan.num_epochs, plan.tokens_per_epoch, True, 1)
        samples = megatron.helpers.build_sample_idx_int32(np.array(lengths), index, *arguments)
        shuffle = megatron.gpt._build_shuffle_index(plan.num_samples, plan.num_samples, rng)
        needed = dict(zip(ARRAYS, (index, samples, shuffle), strict=True))
        assert all((arrays[name] == needed[name]).all() for name in ARRAYS)
    elif os.environ.get("BINIDX_BENCH_CHECK"):
        index = np.arange(len(lengths), dtype=np.int32)
        np.random.RandomState(SEED).shuffle(index)
        assert (arrays["document_index"] == index).all()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    print(json.dumps(measured(Path(sys.argv[1]))))
