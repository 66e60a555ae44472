"""The stages of the demo in their order, and its output: lines and bars while it runs, then tables and findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from tqdm import tqdm

from binidx.corpus.convert import convert_dataset
from binidx.errors import BinidxError
from binidx.storage.stats import total

from .._display import human_bytes, table
from ..seaweed import S3Server, s3_server
from .corpus import build_corpus, count_bytes, train_bpe, write_dataset
from .train import BATCH_SIZE, SEQUENCE_LENGTH, SPLIT, Step, batch_hash, batches, describe_run

WEIGHTS = {"en": 0.7, "code": 0.3}

T = TypeVar("T")

# A vocabulary of 4,096 fits uint16.
TOKEN_BYTES = 2

# One batch's loss is off by a tenth or two; so many together by little.
NUM_LAST = 10

BUCKET = "binidx-demo"
ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")

Costs = dict[str, dict[str, float]]
"""Stage -> "seconds", "requests" to stores, "bytes_asked" by reads, "bytes_moved" for these reads."""


class Screen:
    """Writer of lines to stdout; with `quiet`, as for --json, it prints none."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def line(self, text: str = "") -> None:
        """Print one line and flush."""
        if not self._quiet:
            print(text, flush=True)

    def heading(self, name: str, text: str) -> None:
        """Print the name of the next stage."""
        self.line(f"{name:<10} {text}")

    def detail(self, text: str) -> None:
        """Print a line below a heading."""
        self.line(f"{'':<10} {text}")

    def progress(self, items: Iterable[T], what: str, total: int) -> Iterable[T]:
        """Return the items as an iterable that moves a bar on stderr, if stderr is a terminal.

        Args:
            items: the items.
            what: label of the bar.
            total: number of items.
        """
        return tqdm(items, desc=f"{'':<10} {what}", total=total, disable=None, leave=False, ncols=80)


def describe_steps(steps: list[Step]) -> str:
    """Return a line with the number of the last of these steps, and the means of all steps."""
    loss, wait = fmean(step.loss for step in steps), 1000 * fmean(step.wait_seconds for step in steps)
    speed = BATCH_SIZE * SEQUENCE_LENGTH / fmean(step.seconds for step in steps)
    return f"step {steps[-1].number:>4}  loss {loss:.2f}  {speed:>6,.0f} tokens/s  wait {wait:4.1f} ms"


def build_figures(
    costs: Costs, written: dict[str, Any], order: list[str], killed: list[Step], resumed: list[Step]
) -> dict[str, Any]:
    """Return the results of a demo as JSON values: seconds, bytes, nats.

    Args:
        costs: cost of each stage.
        written: counts of each dataset, by name.
        order: hash of each batch of an uninterrupted run.
        killed: steps of the process that was killed.
        resumed: steps of the process that resumed from its checkpoint.
    """
    steps, first = [*killed, *resumed], resumed[0]
    tokens = len(steps) * BATCH_SIZE * SEQUENCE_LENGTH
    training = sum_costs([costs["train"], costs["resume"]])
    return {
        "corpus": written,
        "stages": costs,
        "total": sum_costs([*costs.values()]),
        "training": {
            "num_steps": len(order),
            "tokens": tokens,
            "first_loss": steps[0].loss,
            "last_loss": fmean(step.loss for step in resumed[-NUM_LAST:]),
            "valid_loss": steps[-1].valid_loss,
            "tokens_per_second": tokens / sum(step.seconds for step in steps),
            "seconds_per_step": fmean(step.seconds for step in steps),
            "wait_seconds_per_step": fmean(step.wait_seconds for step in steps),
            "requests": training["requests"],
            "bytes_asked_per_token": training["bytes_asked"] / tokens,
            "bytes_moved_per_token": training["bytes_moved"] / tokens,
        },
        "resume": {
            "consumed_samples": (first.number - 1) * BATCH_SIZE,
            "step": first.number,
            "batch": first.batch,
            "unbroken_batch": order[first.number - 1],
            "equal_batches": sum(step.batch == order[step.number - 1] for step in steps),
            "batches": len(steps),
        },
        "steps": [asdict(step) for step in steps],
    }


def sum_costs(costs: list[dict[str, float]]) -> dict[str, float]:
    """Return the sum of some stages' costs."""
    return {name: sum(cost[name] for cost in costs) for name in costs[0]}


def show_figures(figures: dict[str, Any], screen: Screen) -> None:
    """Print the final table and the findings.

    Args:
        figures: the result of `build_figures`.
        screen: output.
    """
    rows = []
    for name, cost in {**figures["stages"], "total": figures["total"]}.items():
        reads = [f"{cost['requests']:,}", human_bytes(cost["bytes_asked"]), human_bytes(cost["bytes_moved"])]
        rows.append([name, f"{cost['seconds']:.1f}", *(reads if cost["requests"] else [""] * 3)])
    screen.line(f"\n{table(['', 'seconds', 'requests', 'wanted', 'moved'], rows)}\n")
    training, resume = figures["training"], figures["resume"]
    losses = f"{training['first_loss']:.2f} -> {training['last_loss']:.2f}"
    wait = training["wait_seconds_per_step"]
    share, moved = wait / training["seconds_per_step"], training["bytes_moved_per_token"]
    screen.heading("loss", f"{losses}, on unseen text {training['valid_loss']:.2f}")
    screen.heading("speed", f"{training['tokens_per_second']:,.0f} tokens/s")
    screen.heading("wait", f"{1000 * wait:.1f} ms per step for data, {share:.1%} of it")
    screen.heading("bytes", f"{moved:.1f} moved per {TOKEN_BYTES}-byte token: each process fills a cache of its own")
    screen.heading("order", f"{resume['equal_batches']} of {resume['batches']} batches are those of an unbroken run")


def show_access(names: Iterable[str], environment: dict[str, str], screen: Screen) -> None:
    """Print how other terminals reach the bucket while it stays up.

    Args:
        names: names of the datasets.
        environment: environment variables of the server.
        screen: output.
    """
    screen.line("\nThe bucket stays up until Ctrl-C. In another terminal:")
    for variable, value in environment.items():
        screen.line(f"  export {variable}={value}")
    for name in names:
        screen.line(f"  binidx inspect s3://{BUCKET}/{name}")


@contextmanager
def run_demo(num_steps: int, directory: Path, screen: Screen) -> Iterator[tuple[S3Server, dict[str, Any]]]:
    """Run all stages; yield the server, which runs within the `with` block, and the figures.

    Args:
        num_steps: training steps of the whole run.
        directory: an empty directory for the files of the server and the demo.
        screen: output.

    Raises:
        BinidxError: a stage failed, or the order of the resumed run differs from that of an uninterrupted one.
    """
    demo = Demo(directory, screen)
    screen.line("From text to an exactly resumed training run, on this machine alone\n")
    with demo.start_server() as server:
        written = demo.write_corpus()
        order = demo.read_order(num_steps)
        killed = demo.train(order, resume=False)
        resumed = demo.train(order, resume=True)
        yield server, build_figures(demo.costs, written, order, killed, resumed)


class Demo:
    """One run of the demo.

    Args:
        directory: an empty directory for the files of the server and the demo.
        screen: output.

    Attributes:
        costs: cost of each stage.
    """

    def __init__(self, directory: Path, screen: Screen) -> None:
        self.directory = directory
        self.screen = screen
        self.costs: Costs = {}

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Print the name of a stage, and store the seconds of the `with` block and this process's reads in it."""
        self.screen.heading(name, text)
        start, before = time.perf_counter(), total()
        yield
        seconds, read = time.perf_counter() - start, total() - before
        counters = {"requests": read.requests, "bytes_asked": read.bytes_asked, "bytes_moved": read.bytes_moved}
        self.costs[name] = {"seconds": seconds, **counters}

    @contextmanager
    def start_server(self) -> Iterator[S3Server]:
        """Start an S3 server with a bucket; this process and its children can reach it within the `with` block."""
        with ExitStack() as stack:
            with self.stage("server", "SeaweedFS, a real S3 server, on loopback"):
                server = stack.enter_context(s3_server(self.directory / "s3"))
                stack.enter_context(server.in_environment())
                server.make_bucket(BUCKET)
            self.screen.detail(f"{server.endpoint}   bucket s3://{BUCKET}")
            yield server

    def write_corpus(self) -> dict[str, dict[str, int]]:
        """Write both datasets into the bucket, from text to tokens; return the counts of each."""
        screen, directory = self.screen, self.directory
        with self.stage("corpus", "the text that lies beside this Python: manual, docstrings, modules"):
            corpus = build_corpus()
        for name, documents in corpus.items():
            screen.detail(f"{name:<4} {human_bytes(count_bytes(documents)):>9}   {len(documents):>9,} documents")
        every = [document for documents in corpus.values() for document in documents]
        with self.stage("tokenizer", "byte-level BPE, trained on both"):
            tokenizer = train_bpe(screen.progress(every, "learning", len(every)), directory / "tokenizer.json")
        screen.detail(f"{tokenizer.get_vocab_size():,} entries")
        written = {}
        with self.stage("write", ".bin/.idx on this disk"):
            for name, documents in corpus.items():
                watched = screen.progress(documents, name, len(documents))
                written[name] = write_dataset(str(directory / name), watched, tokenizer)
                tokens, text_bytes = written[name]["tokens"], written[name]["text_bytes"]
                screen.detail(f"{name:<4} {tokens:>9,} tokens, {text_bytes / tokens:.1f} bytes of text each")
        with self.stage("convert", f"to s3://{BUCKET}, each read back and compared   (binidx convert)"):
            for name in corpus:
                done = convert_dataset(str(directory / name), f"s3://{BUCKET}/{name}")
                screen.detail(f"{name:<4} {human_bytes(done.bytes_sent):>9}   {done.target}.bin, .idx")
        return written

    def read_order(self, num_steps: int) -> list[str]:
        """Build the datasets and read the whole run once; return the hash of each of its batches, in order."""
        blend = {f"s3://{BUCKET}/{name}": weight for name, weight in WEIGHTS.items()}
        run = describe_run(blend, f"s3://{BUCKET}/cache", self.directory / "tokenizer.json", num_steps)
        run.save(str(self.directory / "run.json"))
        shares = " + ".join(f"{weight} {name}" for name, weight in WEIGHTS.items())
        with self.stage("dataset", f"{shares}, split {SPLIT}, straight from the URIs"):
            train: Any = run.build()[0]
            self.screen.detail(f"{len(train):,} samples of {SEQUENCE_LENGTH} tokens; indices cached in the bucket")
            loader = self.screen.progress(islice(batches(train), num_steps), "reading", num_steps)
            order = [batch_hash(batch) for batch in loader]
        self.screen.detail(f"an unbroken loader reads all {num_steps} batches, we note their hashes")
        return order

    def train(self, order: list[str], *, resume: bool) -> list[Step]:
        """Train in a new process, which is killed after its checkpoint; with `resume` from that checkpoint to the end.

        Args:
            order: hash of each batch of an uninterrupted run.
            resume: continue from the checkpoint instead of the start.

        Raises:
            BinidxError: the process ended early, or a batch differs from that of an uninterrupted run.
        """
        num_steps, steps, shown = len(order), list[Step](), 0
        if resume:
            first, last = num_steps // 2 + 1, num_steps
            consumed = num_steps // 2 * BATCH_SIZE
            name, text = "resume", f"a fresh process, from the checkpoint: consumed_samples {consumed:,}"
        else:
            first, last = 1, num_steps // 2 + max(1, num_steps // 30)
            name, text = "train", f"a small GPT on the CPU, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens a step"
        with self.stage(name, text), training_process(self.directory / "run.json", resume) as process:
            assert process.stdout is not None
            for number, line in enumerate(islice(process.stdout, last + 1 - first), first):
                step = Step(**json.loads(line))
                check_step(step, number, order)
                steps.append(step)
                if number == first:
                    opened = f"datasets opened in {step.open_seconds:.1f} s, their indices from the cache"
                    self.screen.detail(f"process {process.pid}: {opened}")
                if number == first and resume:
                    self.screen.detail(f"step {number:>4}  batch {step.batch}  of the resumed run")
                    self.screen.detail(f"{'':<9}  batch {order[number - 1]}  of an unbroken run: the same")
                if number == 1 or number % -(-num_steps // 10) == 0:
                    self.screen.detail(describe_steps(steps[shown:]))
                    shown = len(steps)
            if not steps or steps[-1].number < last:
                status = process.wait()
                raise BinidxError(f"training process {process.pid}: exit status {status}, needed 0; see stderr above")
        if not resume:
            self.screen.detail(f"kill -9 {process.pid}, in step {last + 1}")
        for counter in ("requests", "bytes_asked", "bytes_moved"):
            self.costs[name][counter] += getattr(steps[-1], counter)
        return steps


def check_step(step: Step, number: int, order: list[str]) -> None:
    """Raise BinidxError unless this is step `number`, with the batch of an uninterrupted run.

    Args:
        step: record of a step.
        number: its expected number, from 1.
        order: hash of each batch of an uninterrupted run.
    """
    if step.number != number:
        raise BinidxError(f"training: found step {step.number}, needed {number}")
    unbroken = order[number - 1]
    if step.batch != unbroken:
        raise BinidxError(f"step {number}: found batch {step.batch}, an unbroken run has {unbroken} there")


@contextmanager
def training_process(run: Path, resume: bool) -> Iterator[subprocess.Popen[str]]:
    """Start training in a new Python, whose stdout has a line for each step; kill it at the end of the `with` block.

    Args:
        run: the saved run.
        resume: continue from its checkpoint.
    """
    command = [sys.executable, "-m", "binidx.tools.demo.train", str(run), *(["--resume"] if resume else [])]
    # OpenMP's threads spin while they wait for each other by default. On a free machine that gains nothing; where
    # others work too it cost two thirds of the speed.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    # Its own session: Ctrl-C reaches us alone, and we end it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
