"""Text to tokens through the whole pipeline: S3 in to S3 out against disk to disk, and the memory of a worker.

    from S3         256 MB of jsonl in a bucket of a real S3 server on this machine, parts made by twice as many
                    processes as from disk to disk, as the default is; put together by the server. What the server takes
                    of the cores is in the figure. Processes are warm: what they import is no part of it
    memory          the most that one worker process had resident, after 64 MB and after 256 MB of text

The goals: 0.9 of the local run, which tokenises as fast as a core can; 300 MB, whatever the size of the text.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from binidx.tools.demo.corpus import build_corpus
from binidx.tools.demo.tokenizer import EOD, train_bpe
from binidx.tools.seaweed import s3_server

from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.local_workers import LocalExecutor
from binidx.prepare.preprocess.run import preprocess
from binidx.tokenize.describe import describe_tokenizer
from tests.bench.table import Row

TEXT_BYTES = 256_000_000
FEW_BYTES = 64_000_000
PART_BYTES = 32 << 20
ROUNDS = 3
LOCAL, FAR = 1, 2
"""Workers: one core is left to the server."""

WORKER = """
import json, sys
from binidx.prepare.preprocess.local_workers import keep_one_arena
from binidx.prepare.preprocess.plan import plan_parts
from binidx.prepare.preprocess.tokenising import make_part
from binidx.text.inputs import find_inputs
from tests.bench.preprocess import job_of
keep_one_arena()
job = job_of(*sys.argv[1:4])
for part in plan_parts(job, find_inputs(job.inputs)):
    make_part(job, part)
with open("/proc/self/status") as file:
    print([int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")][0])
"""


def rows(directory: Path) -> list[Row]:
    """Throughput from S3 to S3, memory from disk to disk and from S3 to S3."""
    tokenizer = str(directory / "tokenizer.json")
    texts = build_corpus()["en"]
    train_bpe(texts, Path(tokenizer), vocab_size=20_000)
    text = str(write_text(directory / "in.jsonl", texts, TEXT_BYTES))
    few = str(write_text(directory / "few.jsonl", texts, FEW_BYTES))
    with s3_server(directory / "s3") as server, server.in_environment():
        base = server.make_bucket("preprocess")
        for name in (text, few):
            fs, path = fsspec.url_to_fs(f"{base}/{Path(name).name}")
            fs.put(name, path)
        pairs = {"local": (text, f"{directory}/out", LOCAL), "s3": (f"{base}/in.jsonl", f"{base}/out", FAR)}
        seconds = race(pairs, tokenizer, few, directory)
        memory = {
            name: [peak(source, f"{target}-{number}", tokenizer) for number, source in enumerate(sources)]
            for name, sources, target in (
                ("disk to disk", (few, text), f"{directory}/memory"),
                ("S3 to S3", (f"{base}/few.jsonl", f"{base}/in.jsonl"), f"{base}/memory"),
            )
        }
    speed = {name: TEXT_BYTES / 1e6 / each for name, each in seconds.items()}
    note, flat = "the same bytes; goal: 0.9x", "goal: <= 300 MB, flat"
    return [
        Row("text to tokens, S3 to S3", speed["s3"], speed["local"], "MB/s", True, note, "disk to disk, one core"),
        *(
            Row(f"memory of a worker, {name}", most / 1e6, least / 1e6, "MB", False, flat, "a quarter of the text")
            for name, (least, most) in memory.items()
        ),
    ]


def write_text(path: Path, texts: list[str], num_bytes: int) -> Path:
    """Documents of 50 to 2,000 consecutive words of the texts."""
    choose, words, written = random.Random(0), [word for text in texts for word in text.split()], 0
    with path.open("w") as file:
        while written < num_bytes:
            first = choose.randrange(len(words) - 2000)
            text = " ".join(words[first : first + choose.randrange(50, 2000)])
            written += file.write(json.dumps({"text": text}) + "\n")
    return path


def job_of(source: str, target: str, tokenizer: str, **options: Any) -> Job:
    spec = describe_tokenizer(tokenizer, eod=EOD)
    return Job((source,), target, spec, append_eod=True, engine="gigatoken", part_bytes=PART_BYTES, **options)


def race(pairs: dict[str, tuple[str, str, int]], tokenizer: str, few: str, directory: Path) -> dict[str, float]:
    """Median seconds of each, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in pairs}
    made = {}
    with warm(tokenizer, few, directory, LOCAL) as one, warm(tokenizer, few, directory, FAR) as two:
        for number in range(ROUNDS):
            for name, (source, target, count) in pairs.items():
                began = time.perf_counter()
                job = job_of(source, f"{target}-{number}", tokenizer)
                report = preprocess(job, executor=one if count == LOCAL else two, workers=count)
                times[name].append(time.perf_counter() - began)
                made[name] = report.manifests["text"]["dataset"]
    assert made["local"] == made["s3"]
    return {name: statistics.median(each) for name, each in times.items()}


@contextmanager
def warm(tokenizer: str, text: str, directory: Path, count: int) -> Iterator[LocalExecutor]:
    """Workers that have imported what they need and made the engine ready."""
    executor = LocalExecutor(count)
    try:
        job = job_of(text, f"{directory}/warm-{count}", tokenizer, lineage=True)
        preprocess(job, executor=executor, workers=count)
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def peak(source: str, target: str, tokenizer: str) -> int:
    """The most bytes that a process had that made all parts of a text."""
    command = [sys.executable, "-c", WORKER, source, target, tokenizer]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/tests"}
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout.split()[-1])
