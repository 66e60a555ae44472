"""Text to tokens through the whole pipeline: S3 in to S3 out against disk to disk, and the memory of a worker.

    hf              32 MB of jsonl in a bucket of a real S3 server on this machine; one worker here as there. The engine
                    is slow enough for the core to be the limit: what is lost are the times when it waits for the store
    gigatoken       256 MB; twice as many workers as from disk to disk, as the default is. Here the server is the limit,
                    whose share of the cores is in the figure; beside it what it gives to who only reads the text
    CPU             of our own processes, driver and worker, whatever the server takes: what a cluster pays that has its
                    store elsewhere
    far             the same wall time with each first byte 30 ms later
    memory          the most that one worker process had resident, after 64 MB and after 256 MB of text: with lineage
                    and a vocabulary of 50,257

Processes are warm: what they import is no part of it, and gigatoken has met nearly all of the words: it takes half of
what it does for new text, which is the hardest case for all around it. Parts have 64 MiB, as those of all text from 1
to 32 GiB. The goals: 0.9 of the local run, which tokenizes as fast as a core can; 300 MB, whatever the text's size.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from demo.corpus import EOD, build_corpus, train_bpe
from servers.latency_proxy import latency_proxy
from servers.seaweed import s3_server

from binidx import describe_tokenizer
from binidx.jobs.engines import LocalExecutor
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.preprocess import preprocess
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import Slice, plan_slices
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(
    cores=0,
    size="256 MB of jsonl, 32 MB with Hugging Face",
    cached="imports, and nearly all words",
    workers=1,
)
SIZES = {"text": 256_000_000, "few": 64_000_000, "little": 32_000_000}
PART_BYTES = 64 << 20
ROUNDS = 3
FAR_MS = 30

WORKER = """
import json, sys
from binidx.jobs.engines import configure_malloc
from binidx.prepare.preprocess.job import plan_parts
from binidx.prepare.preprocess.tokenize_part import make_part
from binidx.prepare.text.inputs import find_inputs
from tests.bench.preprocess import job_of
configure_malloc()
job = job_of(*sys.argv[1:4])
for part in plan_parts(job, find_inputs(job.inputs)):
    make_part(job, part)
with open("/proc/self/status") as file:
    print([int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")][0])
"""


def rows(directory: Path) -> list[Row]:
    """Throughput from S3 to S3 of two engines, memory from disk to disk and from S3 to S3."""
    tokenizer = str(directory / "tokenizer.json")
    texts = build_corpus()["en"]
    train_bpe(texts, Path(tokenizer), vocab_size=50_257)
    local = {name: str(write_text(directory / f"{name}.jsonl", texts, size)) for name, size in SIZES.items()}
    with s3_server(directory / "s3") as server, server.in_environment():
        base = server.make_bucket("preprocess")
        far = {name: f"{base}/{name}.jsonl" for name in SIZES}
        for name, path in local.items():
            fs, key = fsspec.url_to_fs(far[name])
            fs.put(path, key)
        bench = Bench(tokenizer, str(directory), base, local, far)
        found = [bench.speed("hf", "little", 1), *bench.cpu_and_speed(), bench.against_reading()]
        with latency_proxy(server.endpoint, delay_ms=FAR_MS) as proxy, proxy.in_environment():
            before, where = proxy.counts().requests, f", {FAR_MS} ms away"
            found.append(bench.speed("gigatoken", "text", 2, where))
            num_requests = proxy.counts().requests - before
            check_reached(found[-1].work, num_requests, bench.seconds[f"gigatoken{where}"], FAR_MS)
        return [*found, bench.memory("disk to disk", local, str(directory)), bench.memory("S3 to S3", far, base)]


@dataclass
class Bench:
    """Where all lies: a folder, a bucket, and the texts in both by their names."""

    tokenizer: str
    folder: str
    bucket: str
    local: dict[str, str]
    far: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    def speed(self, engine: str, text: str, far_workers: int, where: str = "") -> Row:
        """S3 to S3 against disk to disk, by the clock."""
        here, there = self.medians(engine, text, far_workers, lambda executor: time.perf_counter())
        self.seconds[engine + where] = there
        note = f"the same bytes; {far_workers} from S3, goal: 0.9x"
        size, work = SIZES[text] / 1e6, f"text to tokens, S3 to S3{where}, {engine}"
        return Row(work, size / there, size / here, "MB/s", True, note, "disk to disk, one worker")

    def cpu_and_speed(self) -> list[Row]:
        """The same of gigatoken, and by what our own processes had of a core."""
        size, work = SIZES["text"] / 1e6, "the same by our own CPU-seconds"
        here, there = self.medians("gigatoken", "text", 1, own_cpu)
        cpu = Row(work, size / there, size / here, "MB/CPU-s", True, "without the server; goal: 0.9x", "disk to disk")
        return [self.speed("gigatoken", "text", 2), cpu]

    def medians(
        self, engine: str, text: str, far_workers: int, clock: Callable[[LocalExecutor], float]
    ) -> tuple[float, float]:
        """Of disk to disk and of S3 to S3, run in turns."""
        times: dict[str, list[float]] = {"disk": [], "s3": []}
        made = []
        with self.warm(engine, 1) as one, self.warm(engine, far_workers) as many:
            for number in range(ROUNDS):
                for name, source, place, executor, count in (
                    ("disk", self.local[text], self.folder, one, 1),
                    ("s3", self.far[text], self.bucket, many, far_workers),
                ):
                    job = job_of(source, f"{place}/{next(NUMBERS)}-{engine}-{number}", self.tokenizer, engine)
                    began = clock(executor)
                    report = preprocess(job, executor=executor, workers=count)
                    times[name].append(clock(executor) - began)
                    made.append(report.manifests["text"]["dataset"])
        assert all(each == made[0] for each in made)
        here, there = map(statistics.median, times.values())
        return here, there

    def against_reading(self) -> Row:
        """gigatoken, against two processes that read the text and do nothing."""
        with LocalExecutor(2) as executor:
            slices = plan_slices(find_inputs([self.far["text"]]), PART_BYTES)
            list(executor.map(read, slices[:2]))
            began = time.perf_counter()
            list(executor.map(read, slices))
            limit = SIZES["text"] / 1e6 / (time.perf_counter() - began)
        ours = SIZES["text"] / 1e6 / self.seconds["gigatoken"]
        return Row("the same, gigatoken", ours, limit, "MB/s", True, "the server's limit", "the text only read")

    def memory(self, way: str, texts: dict[str, str], place: str) -> Row:
        """After all the text, against after a quarter of it."""
        least, most = (peak(texts[name], f"{place}/memory-{name}", self.tokenizer) / 1e6 for name in ("few", "text"))
        note = "goal: <= 300 MB, flat"
        return Row(f"memory of a worker, {way}", most, least, "MB", False, note, "a quarter of the text")

    @contextmanager
    def warm(self, engine: str, count: int) -> Iterator[LocalExecutor]:
        """Workers that have imported what they need, made the engine ready and spoken to the store."""
        executor = LocalExecutor(count)
        try:
            target = f"{self.bucket}/warm-{next(NUMBERS)}"
            job = job_of(self.far["few"], target, self.tokenizer, "gigatoken", part_bytes=4 << 20)
            preprocess(job, executor=executor, workers=count)
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)


NUMBERS = itertools.count()
"""Of outputs: each run makes its own."""


def own_cpu(executor: LocalExecutor) -> float:
    """CPU-seconds of this process and its one worker."""
    return time.process_time() + executor.submit(time.process_time).result()


def read(piece: Slice) -> int:
    """Its batches, and nothing else."""
    return sum(each.num_rows for (each,) in read_slice(piece))


def write_text(path: Path, texts: list[str], num_bytes: int) -> Path:
    """Documents of 50 to 2,000 consecutive words of the texts."""
    choose, words, written = random.Random(0), [word for text in texts for word in text.split()], 0
    with path.open("w") as file:
        while written < num_bytes:
            first = choose.randrange(len(words) - 2000)
            text = " ".join(words[first : first + choose.randrange(50, 2000)])
            written += file.write(json.dumps({"text": text}) + "\n")
    return path


def job_of(source: str, target: str, tokenizer: str, engine: str = "gigatoken", part_bytes: int = PART_BYTES) -> Job:
    spec = describe_tokenizer(tokenizer, eod=EOD)
    return Job((source,), target, spec, append_eod=True, engine=engine, part_bytes=part_bytes)


def peak(source: str, target: str, tokenizer: str) -> int:
    """The most bytes that a process had that made all parts of a text."""
    command = [sys.executable, "-c", WORKER, source, target, tokenizer]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/tests:{root}/examples"}
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout.split()[-1])
