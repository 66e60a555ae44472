"""The stages of the demo, one method each, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from binidx.corpus.convert import convert_dataset

from .._command import human_bytes
from ..seaweed import S3Server, s3_server
from .corpus import build_corpus, count_bytes
from .data import SPLIT, batch_hash, batches, build_datasets
from .ledger import Cost, Ledger
from .plan import Plan
from .prepare import Written, write_dataset
from .process import TrainingProcess, training_process
from .report import Outcome
from .screen import Screen
from .step import Step
from .tokenizer import DemoTokenizer, train_bpe
from .watch import StepLines, check_step

BUCKET = "binidx-demo"
WEIGHTS = {"en": 0.7, "code": 0.3}
SEQUENCE_LENGTH = 128
BATCH_SIZE = 16


@contextmanager
def run_demo(num_steps: int, directory: Path, screen: Screen) -> Iterator[Outcome]:
    """Run all stages; the bucket stays up within the `with` block.

    Args:
        num_steps: training steps of the whole run.
        directory: an empty directory for the files of the server and the demo.
        screen: output.

    Raises:
        BinidxError: a stage failed, or the order of the resumed run differs from that of an uninterrupted one.
    """
    demo = Demo(directory, screen)
    screen.line("From text to an exactly resumed training run, on this machine alone")
    screen.line()
    with ExitStack() as stack:
        server = demo.start_server(stack)
        corpus = demo.collect()
        tokenizer = demo.train_tokenizer(corpus)
        written = demo.write(corpus, tokenizer)
        demo.convert()
        plan = demo.plan(num_steps)
        order = demo.build(plan)
        killed = demo.train_and_kill(plan, order)
        resumed = demo.resume(plan, order)
        yield Outcome(plan, server, demo.ledger, written, order, killed, resumed)


class Demo:
    """One run of the demo: its directory, its output, its costs."""

    def __init__(self, directory: Path, screen: Screen) -> None:
        self.directory = directory
        self.screen = screen
        self.ledger = Ledger()

    def start_server(self, stack: ExitStack) -> S3Server:
        self.screen.heading("server", "SeaweedFS, a real S3 server, on loopback")
        with self.ledger.stage("server"):
            server = stack.enter_context(s3_server(self.directory / "s3"))
            stack.enter_context(server.in_environment())
            server.make_bucket(BUCKET)
        self.screen.detail(f"{server.endpoint}   bucket s3://{BUCKET}")
        return server

    def collect(self) -> dict[str, list[str]]:
        self.screen.heading("corpus", "the text that lies beside this Python: manual, docstrings, modules")
        with self.ledger.stage("corpus"):
            corpus = build_corpus()
        for name, documents in corpus.items():
            self.screen.detail(f"{name:<4} {human_bytes(count_bytes(documents)):>9}   {len(documents):>9,} documents")
        return corpus

    def train_tokenizer(self, corpus: dict[str, list[str]]) -> DemoTokenizer:
        self.screen.heading("tokenizer", "byte-level BPE, trained on both")
        documents = [document for each in corpus.values() for document in each]
        with self.ledger.stage("tokenizer"):
            watched = self.screen.progress(documents, "learning", len(documents))
            tokenizer = train_bpe(watched, self.directory / "tokenizer.json")
        self.screen.detail(f"{tokenizer.vocab_size:,} entries")
        return tokenizer

    def write(self, corpus: dict[str, list[str]], tokenizer: DemoTokenizer) -> dict[str, Written]:
        self.screen.heading("write", ".bin/.idx on this disk")
        written = {}
        with self.ledger.stage("write"):
            for name, documents in corpus.items():
                watched = self.screen.progress(documents, name, len(documents))
                written[name] = write_dataset(str(self.directory / name), watched, tokenizer)
                tokens, text_bytes = written[name].tokens, written[name].text_bytes
                self.screen.detail(f"{name:<4} {tokens:>9,} tokens, {text_bytes / tokens:.1f} bytes of text each")
        return written

    def convert(self) -> None:
        """Move both datasets into the bucket, as `binidx convert` does."""
        self.screen.heading("convert", f"to s3://{BUCKET}, each read back and compared   (binidx convert)")
        with self.ledger.stage("convert"):
            for name in WEIGHTS:
                done = convert_dataset(str(self.directory / name), f"s3://{BUCKET}/{name}")
                self.screen.detail(f"{name:<4} {human_bytes(done.bytes_sent):>9}   {done.target}.bin, .idx")

    def plan(self, num_steps: int) -> Plan:
        """Write the plan of the training run for the processes that execute it."""
        plan = Plan(
            prefixes=[f"s3://{BUCKET}/{name}" for name in WEIGHTS],
            weights=list(WEIGHTS.values()),
            cache=f"s3://{BUCKET}/cache",
            tokenizer=str(self.directory / "tokenizer.json"),
            checkpoint=str(self.directory / "checkpoint.pt"),
            num_steps=num_steps,
            checkpoint_step=num_steps // 2,
            batch_size=BATCH_SIZE,
            sequence_length=SEQUENCE_LENGTH,
        )
        plan.save(self.plan_path)
        return plan

    @property
    def plan_path(self) -> Path:
        return self.directory / "plan.json"

    def build(self, plan: Plan) -> list[str]:
        """Build the datasets and read the whole run once; return the hash of each of its batches, in order."""
        blend = " + ".join(f"{weight} {name}" for name, weight in WEIGHTS.items())
        self.screen.heading("dataset", f"{blend}, split {SPLIT}, straight from the URIs")
        with self.ledger.stage("dataset"):
            train, _ = build_datasets(plan)
            self.screen.detail(f"{len(train):,} samples of {plan.sequence_length} tokens; indices cached in the bucket")
            loader = self.screen.progress(islice(batches(train, plan), plan.num_steps), "reading", plan.num_steps)
            order = [batch_hash(batch) for batch in loader]
        self.screen.detail(f"an unbroken loader reads all {len(order)} batches, we note their hashes")
        return order

    def train_and_kill(self, plan: Plan, order: list[str]) -> list[Step]:
        """Train past the checkpoint, then kill the process; return its steps."""
        kill_step = plan.checkpoint_step + max(1, plan.num_steps // 30)
        tokens = f"{plan.batch_size} x {plan.sequence_length} tokens a step"
        self.screen.heading("train", f"a small GPT on the CPU, {tokens}, from the bucket")
        lines, steps = StepLines(plan, self.screen), list[Step]()
        with self.ledger.stage("train"), training_process(self.plan_path, resume=False) as process:
            for number, step in enumerate(process.steps(), 1):
                check_step(step, number, order)
                if not steps:
                    self.show_opened(process, step)
                steps.append(step)
                lines.add(step)
                if step.number == kill_step:
                    process.kill()
                    break
        self.book_reads("train", steps)
        self.screen.detail(f"kill -9 {process.pid}, in step {kill_step + 1}")
        return steps

    def resume(self, plan: Plan, order: list[str]) -> list[Step]:
        """Resume in a new process from the checkpoint to the end of the run."""
        self.screen.heading(
            "resume", f"a fresh process, from the checkpoint: consumed_samples {plan.checkpoint_samples:,}"
        )
        lines, steps = StepLines(plan, self.screen), list[Step]()
        with self.ledger.stage("resume"), training_process(self.plan_path, resume=True) as process:
            for number, step in enumerate(process.steps(), plan.checkpoint_step + 1):
                check_step(step, number, order)
                if not steps:
                    self.show_opened(process, step)
                    self.show_continuity(step, order)
                steps.append(step)
                lines.add(step)
        self.book_reads("resume", steps)
        return steps

    def show_opened(self, process: TrainingProcess, first: Step) -> None:
        opened = f"datasets opened in {first.open_seconds:.1f} s, their indices from the cache"
        self.screen.detail(f"process {process.pid}: {opened}")

    def show_continuity(self, first: Step, order: list[str]) -> None:
        """Print the two hashes that must be equal, one below the other."""
        same = self.screen.green("the same")
        self.screen.detail(f"step {first.number:>4}  batch {first.batch}  of the resumed run")
        self.screen.detail(f"{'':<9}  batch {order[first.number - 1]}  of an unbroken run: {same}")

    def book_reads(self, stage: str, steps: list[Step]) -> None:
        last = steps[-1]
        self.ledger.book(stage, Cost(0.0, last.requests, last.bytes_asked, last.bytes_moved))
