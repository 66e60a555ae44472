"""The stages of the demo in their order, with the lines and bars that they print, and its findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from servers.seaweed import S3Server, s3_server
from tqdm import tqdm

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.errors import BinidxError

from .corpus import EOD, build_corpus, count_bytes, train_bpe, write_dataset
from .train import BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Step, batch_hash, batches

WEIGHTS = {"en": 0.7, "code": 0.3}
SPLIT = "100,0,0"

# One batch's loss is off by a tenth or two; so many together by little.
NUM_LAST = 10

BUCKET = "binidx-demo"
ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@contextmanager
def run_demo(num_steps: int, directory: Path) -> Iterator[tuple[S3Server, dict[str, Any]]]:
    """Run all stages; yield the server, which runs within the `with` block, and the figures, as JSON values.

    Args:
        num_steps: training steps of the whole run.
        directory: an empty directory for the files of the server and the demo.

    Raises:
        BinidxError: a stage failed, or the order of the resumed run differs from that of an uninterrupted one.
    """
    say("server", "SeaweedFS, a real S3 server, on loopback")
    with s3_server(directory / "s3") as server, server.in_environment():
        say("", f"{server.endpoint}   bucket {server.make_bucket(BUCKET)}")
        written = write_corpus(directory)
        order = read_order(directory, num_steps)
        killed = train(directory, order, resume=False)
        resumed = train(directory, order, resume=True)
        yield server, {"corpus": written, **build_figures(order, killed, resumed)}


def say(name: str, text: str) -> None:
    """Print a line of the output: a stage by its name, or "" for a detail of the present one."""
    print(f"{name:<10} {text}", flush=True)


def progress(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Return the items as an iterable that moves a bar on stderr, if stderr is a terminal."""
    return tqdm(items, desc=f"{'':<10} {what}", total=total, disable=None, leave=False, ncols=80)


def write_corpus(directory: Path) -> dict[str, dict[str, int]]:
    """Write both datasets into the bucket, from text to tokens; return the counts of each."""
    say("corpus", "the text that lies beside this Python: manual, docstrings, modules")
    corpus, written = build_corpus(), {}
    for name, documents in corpus.items():
        say("", f"{name:<4} {count_bytes(documents) / 2**20:>5.1f} MiB   {len(documents):>9,} documents")
    say("tokenizer", "byte-level BPE, trained on both")
    every = [document for documents in corpus.values() for document in documents]
    path = directory / "tokenizer.json"
    tokenizer = train_bpe(progress(every, "learning", len(every)), path, vocab_size=VOCAB_SIZE)
    say("", f"{tokenizer.get_vocab_size():,} entries")
    say("write", ".bin/.idx on this disk")
    for name, documents in corpus.items():
        counts = write_dataset(str(directory / name), progress(documents, name, len(documents)), tokenizer)
        written[name] = counts
        say("", f"{name:<4} {counts['tokens']:>9,} tokens in {counts['documents']:,} documents")
    say("convert", f"to s3://{BUCKET}, each read back and compared   (binidx convert)")
    for name in corpus:
        done = convert_dataset(str(directory / name), f"s3://{BUCKET}/{name}")
        say("", f"{name:<4} {done.bytes_sent / 2**20:>5.1f} MiB   {done.target}.bin, .idx")
    return written


def describe_run(blend: dict[str, float], cache: str, tokenizer: Path, num_steps: int) -> binidx.Run:
    """Return the description of a run.

    Args:
        blend: share of samples of each dataset, by its URI.
        cache: URI for the index caches.
        tokenizer: a tokenizer.json.
        num_steps: training steps.
    """
    config = binidx.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE_LENGTH,
        split=SPLIT,
        blend=([*blend], [*blend.values()]),
        path_to_cache=cache,
        tokenizer=binidx.describe_tokenizer(str(tokenizer), eod=EOD),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return binidx.Run(config, [num_steps * BATCH_SIZE, 0, 0], BATCH_SIZE)


def read_order(directory: Path, num_steps: int) -> list[str]:
    """Build the datasets and read the whole run once; return the hash of each of its batches, in order."""
    blend = {f"s3://{BUCKET}/{name}": weight for name, weight in WEIGHTS.items()}
    run = describe_run(blend, f"s3://{BUCKET}/cache", directory / "tokenizer.json", num_steps)
    run.save(str(directory / "run.json"))
    shares = " + ".join(f"{weight} {name}" for name, weight in WEIGHTS.items())
    say("dataset", f"{shares}, split {SPLIT}, straight from the URIs")
    dataset: Any = run.build()[0]
    say("", f"{len(dataset):,} samples of {SEQUENCE_LENGTH} tokens; indices cached in the bucket")
    order = [batch_hash(batch) for batch in progress(islice(batches(dataset), num_steps), "reading", num_steps)]
    say("", f"an unbroken loader reads all {num_steps} batches, we note their hashes")
    return order


def train(directory: Path, order: list[str], *, resume: bool) -> list[Step]:
    """Train in a new process, which is killed after its checkpoint; with `resume` from that checkpoint to the end.

    Args:
        directory: folder of the saved run and its checkpoint.
        order: hash of each batch of an uninterrupted run.
        resume: continue from the checkpoint instead of the start.

    Raises:
        BinidxError: the process ended early, or a batch differs from that of an uninterrupted run.
    """
    num_steps, steps, shown = len(order), list[Step](), 0
    if resume:
        first, last = num_steps // 2 + 1, num_steps
        say("resume", f"a fresh process, from the checkpoint: consumed_samples {num_steps // 2 * BATCH_SIZE:,}")
    else:
        first, last = 1, num_steps // 2 + max(1, num_steps // 30)
        say("train", f"a small GPT on the CPU, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens a step")
    with training_process(directory / "run.json", resume) as process:
        assert process.stdout is not None
        for number, line in enumerate(islice(process.stdout, last + 1 - first), first):
            step = Step(**json.loads(line))
            check_step(step, number, order)
            steps.append(step)
            if number == first and resume:
                say("", f"step {number:>4}  batch {step.batch}  of the resumed run")
                say("", f"{'':<9}  batch {order[number - 1]}  of an unbroken run: the same")
            if number == 1 or number % -(-num_steps // 10) == 0:
                say("", describe_steps(steps[shown:]))
                shown = len(steps)
        if not steps or steps[-1].number < last:
            status = process.wait()
            raise BinidxError(f"training process {process.pid}: exit status {status}, needed 0; see stderr above")
    if not resume:
        say("", f"kill -9 {process.pid}, in step {last + 1}")
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


def describe_steps(steps: list[Step]) -> str:
    """Return a line with the number of the last of these steps, and the means of all steps."""
    loss, wait = fmean(step.loss for step in steps), 1000 * fmean(step.wait_seconds for step in steps)
    speed = BATCH_SIZE * SEQUENCE_LENGTH / fmean(step.seconds for step in steps)
    return f"step {steps[-1].number:>4}  loss {loss:.2f}  {speed:>6,.0f} tokens/s  wait {wait:4.1f} ms"


@contextmanager
def training_process(run: Path, resume: bool) -> Iterator[subprocess.Popen[str]]:
    """Start training in a new Python, whose stdout has a line for each step; kill it at the end of the `with` block.

    Args:
        run: the saved run.
        resume: continue from its checkpoint.
    """
    command = [sys.executable, str(Path(__file__).with_name("train.py")), str(run), *(["--resume"] if resume else [])]
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


def build_figures(order: list[str], killed: list[Step], resumed: list[Step]) -> dict[str, Any]:
    """Return the results of the training as JSON values.

    Args:
        order: hash of each batch of an uninterrupted run.
        killed: steps of the process that was killed.
        resumed: steps of the process that resumed from its checkpoint.
    """
    steps, first = [*killed, *resumed], resumed[0]
    return {
        "training": {
            "tokens": len(steps) * BATCH_SIZE * SEQUENCE_LENGTH,
            "first_loss": steps[0].loss,
            "last_loss": fmean(step.loss for step in resumed[-NUM_LAST:]),
            "seconds_per_step": fmean(step.seconds for step in steps),
            "wait_seconds_per_step": fmean(step.wait_seconds for step in steps),
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


def show_figures(figures: dict[str, Any]) -> None:
    """Print the findings in the result of `build_figures`."""
    training, resume = figures["training"], figures["resume"]
    seconds, wait = training["seconds_per_step"], training["wait_seconds_per_step"]
    print()
    say("loss", f"{training['first_loss']:.2f} -> {training['last_loss']:.2f}")
    say("speed", f"{BATCH_SIZE * SEQUENCE_LENGTH / seconds:,.0f} tokens/s")
    say("wait", f"{1000 * wait:.1f} ms per step for data, {wait / seconds:.1%} of it")
    say("order", f"{resume['equal_batches']} of {resume['batches']} batches are those of an unbroken run")


def show_access(environment: dict[str, str]) -> None:
    """Print how other terminals reach the bucket while it stays up, by the environment variables of the server."""
    print("\nThe bucket stays up until Ctrl-C. In another terminal:")
    for variable, value in environment.items():
        print(f"  export {variable}={value}")
    for name in WEIGHTS:
        print(f"  binidx inspect s3://{BUCKET}/{name}", flush=True)
