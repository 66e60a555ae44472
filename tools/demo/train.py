"""The training process: one line per step, a checkpoint in the middle, and a resume from it.

python -m binidx.tools.demo.train PLAN.json [--resume]        lines of JSON on stdout, see step.py and process.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from binidx.storage.stats import total

from .data import VALID_BATCHES, Batch, batch_hash, batches, build_datasets
from .model import GPT, GPTShape
from .plan import Plan
from .step import Step
from .tokenizer import DemoTokenizer

PEAK_LEARNING_RATE = 6e-3
WARMUP_STEPS = 10


class Trainer:
    """A model, its optimizer, and the samples they have consumed: the whole state of a run."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = GPT(GPTShape(DemoTokenizer(plan.tokenizer).vocab_size, plan.sequence_length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.consumed_samples = 0

    @property
    def steps_done(self) -> int:
        """Steps of the run so far, over all processes."""
        return self.consumed_samples // self.plan.batch_size

    def step(self, batch: Batch) -> float:
        """Train on one batch; return the loss before the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.plan.num_steps)
        loss = self.model.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.consumed_samples += self.plan.batch_size
        return loss.item()

    @torch.no_grad()
    def mean_loss(self, valid: Iterator[Batch]) -> float:
        """Return the mean loss over VALID_BATCHES batches."""
        return sum(self.model.loss(next(valid)).item() for _ in range(VALID_BATCHES)) / VALID_BATCHES

    def save(self) -> None:
        """Write the checkpoint atomically: a killed process leaves a complete one or none."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "consumed_samples": self.consumed_samples,
        }
        unfinished = f"{self.plan.checkpoint}.part"
        torch.save(state, unfinished)
        os.replace(unfinished, self.plan.checkpoint)

    def load(self) -> None:
        """Load the checkpoint's state."""
        state = torch.load(self.plan.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.consumed_samples = state["consumed_samples"]


def learning_rate(step: int, num_steps: int) -> float:
    """Return the rate of a step: a warm-up, then a linear decay to a tenth."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * (1 - 0.9 * step / num_steps)


def train(plan: Plan, *, resume: bool) -> Iterator[Step]:
    """Run the plan from its start, or from its checkpoint, to its end."""
    trainer = Trainer(plan)
    if resume:
        trainer.load()
    before = time.perf_counter()
    dataset, valid = build_datasets(plan)
    open_seconds = time.perf_counter() - before
    loader = batches(dataset, plan, trainer.consumed_samples)
    while trainer.steps_done < plan.num_steps:
        yield one_step(trainer, loader, valid, open_seconds)


def one_step(trainer: Trainer, loader: Iterator[Batch], valid: object, open_seconds: float) -> Step:
    """Fetch a batch, train on it, save at the plan's checkpoint, and print the record."""
    plan = trainer.plan
    start = time.perf_counter()
    batch = next(loader)
    arrived = time.perf_counter()
    loss = trainer.step(batch)
    done = time.perf_counter()
    if trainer.steps_done == plan.checkpoint_step:
        trainer.save()
    ended = trainer.steps_done == plan.num_steps
    valid_loss = trainer.mean_loss(batches(valid, plan)) if ended else None
    stats = total()
    return Step(
        number=trainer.steps_done,
        batch=batch_hash(batch),
        loss=loss,
        wait_seconds=arrived - start,
        seconds=done - start,
        open_seconds=open_seconds,
        requests=stats.requests,
        bytes_asked=stats.bytes_asked,
        bytes_moved=stats.bytes_moved,
        valid_loss=valid_loss,
    )


if __name__ == "__main__":
    for record in train(Plan.load(Path(sys.argv[1])), resume="--resume" in sys.argv):
        print(record.format(), flush=True)
