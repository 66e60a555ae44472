"""The results of the demo, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .._command import human_bytes
from ..seaweed import S3Server
from .ledger import Cost, Ledger
from .plan import Plan
from .prepare import Written
from .screen import Screen
from .step import Step

# A vocabulary of 4,096 fits uint16.
TOKEN_BYTES = 2

# One batch's loss is off by a tenth or two; so many together by little.
NUM_LAST = 10

ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@dataclass(frozen=True)
class Outcome:
    """Results of a completed demo.

    Args:
        plan: the training run.
        server: the server of the bucket.
        ledger: costs of the stages.
        written: counts of each dataset, by name.
        order: hash of each batch of an uninterrupted run.
        killed: steps of the process that was killed.
        resumed: steps of the process that resumed from its checkpoint.
    """

    plan: Plan
    server: S3Server
    ledger: Ledger
    written: dict[str, Written]
    order: list[str]
    killed: list[Step]
    resumed: list[Step]

    @property
    def steps(self) -> list[Step]:
        """The steps of both processes, including those after the checkpoint that the first one did, too."""
        return [*self.killed, *self.resumed]

    @property
    def training(self) -> Cost:
        """The cost of both training processes."""
        return self.ledger.costs["train"] + self.ledger.costs["resume"]

    @property
    def trained_tokens(self) -> int:
        """Tokens that both processes trained on."""
        return len(self.steps) * self.plan.tokens_per_step

    def figures(self) -> dict[str, Any]:
        """All results as JSON values: seconds, bytes, nats."""
        return {
            "corpus": {name: asdict(written) for name, written in self.written.items()},
            "stages": {name: asdict(cost) for name, cost in self.ledger.costs.items()},
            "total": asdict(self.ledger.total),
            "training": self._training(),
            "resume": self._resume(),
            "steps": [asdict(step) for step in self.steps],
        }

    def _training(self) -> dict[str, Any]:
        cost, steps = self.training, self.steps
        return {
            "num_steps": self.plan.num_steps,
            "tokens": self.trained_tokens,
            "first_loss": steps[0].loss,
            "last_loss": fmean(step.loss for step in self.resumed[-NUM_LAST:]),
            "valid_loss": steps[-1].valid_loss,
            "tokens_per_second": self.trained_tokens / sum(step.seconds for step in steps),
            "seconds_per_step": fmean(step.seconds for step in steps),
            "wait_seconds_per_step": fmean(step.wait_seconds for step in steps),
            "requests": cost.requests,
            "bytes_asked_per_token": cost.bytes_asked / self.trained_tokens,
            "bytes_moved_per_token": cost.bytes_moved / self.trained_tokens,
        }

    def _resume(self) -> dict[str, Any]:
        first = self.resumed[0]
        return {
            "consumed_samples": self.plan.checkpoint_samples,
            "step": first.number,
            "batch": first.batch,
            "unbroken_batch": self.order[first.number - 1],
            "equal_batches": sum(step.batch == self.order[step.number - 1] for step in self.steps),
            "batches": len(self.steps),
        }


def show_outcome(outcome: Outcome, screen: Screen) -> None:
    """Print the final tables."""
    costs = {**outcome.ledger.costs, "total": outcome.ledger.total}
    screen.line()
    screen.table([["", "seconds", "requests", "asked", "moved"], *(row(name, cost) for name, cost in costs.items())])
    screen.line()
    for name, text in findings(outcome.figures()).items():
        screen.heading(name, text)


def row(name: str, cost: Cost) -> list[str]:
    """Return one line of the table; the request columns of a stage without reads are empty."""
    read = [f"{cost.requests:,}", human_bytes(cost.bytes_asked), human_bytes(cost.bytes_moved)]
    return [name, f"{cost.seconds:.1f}", *(read if cost.requests else [""] * 3)]


def findings(figures: dict[str, Any]) -> dict[str, str]:
    """Return the findings, one per line."""
    training, resume = figures["training"], figures["resume"]
    first, last, valid = (training[f"{which}_loss"] for which in ("first", "last", "valid"))
    wait = training["wait_seconds_per_step"]
    moved = training["bytes_moved_per_token"]
    share = wait / training["seconds_per_step"]
    return {
        "loss": f"{first:.2f} -> {last:.2f}, on unseen text {valid:.2f}",
        "speed": f"{training['tokens_per_second']:,.0f} tokens/s",
        "wait": f"{1000 * wait:.1f} ms per step for data, {share:.1%} of it",
        "bytes": f"{moved:.1f} moved per token of {TOKEN_BYTES}: each process fills a cache of its own",
        "order": f"{resume['equal_batches']} of {resume['batches']} batches are those of an unbroken run",
    }


def show_next(outcome: Outcome, screen: Screen, *, directory: Path | None, keep: bool) -> None:
    """Print commands to try next: on the bucket while it is up, on the kept directory, and on the user's data."""
    screen.line()
    if keep:
        screen.line("The bucket stays up until Ctrl-C. In another terminal:")
        for name, value in environment(outcome).items():
            screen.line(f"  export {name}={value}")
    else:
        screen.line("Next:")
    for command, purpose in next_commands(outcome, directory, keep).items():
        screen.line(f"  {command:<42} {screen.dim(purpose)}".rstrip())


def next_commands(outcome: Outcome, directory: Path | None, keep: bool) -> dict[str, str]:
    """Return commands and their purposes."""
    commands: dict[str, str] = {}
    if keep:
        commands |= {f"binidx inspect {prefix}": "" for prefix in outcome.plan.prefixes}
    else:
        commands["binidx demo --keep"] = "the same; the bucket stays up"
    if directory:
        commands |= {f"binidx inspect {directory / name}": "" for name in outcome.written}
    where = outcome.plan.prefixes[0].rpartition("/")[0] if keep else "s3://bucket"
    return {**commands, f"binidx convert data/mine {where}/mine": "your own data"}


def environment(outcome: Outcome) -> dict[str, str]:
    """Return the variables by which another terminal finds the server."""
    return {name: outcome.server.environment[name] for name in ENVIRONMENT}
