"""Output of the demo: lines and bars while it runs, then tables and findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from statistics import fmean
from typing import Any, TypeVar

from tqdm import tqdm

from .._display import human_bytes, table
from .train import BATCH_SIZE, SEQUENCE_LENGTH, Step

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
        """Return the items as an iterable that moves a bar on stderr, if stderr is a terminal."""
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


def show_figures(found: dict[str, Any], screen: Screen) -> None:
    """Print the final table and the findings."""
    rows = []
    for name, cost in {**found["stages"], "total": found["total"]}.items():
        reads = [f"{cost['requests']:,}", human_bytes(cost["bytes_asked"]), human_bytes(cost["bytes_moved"])]
        rows.append([name, f"{cost['seconds']:.1f}", *(reads if cost["requests"] else [""] * 3)])
    screen.line(f"\n{table(['', 'seconds', 'requests', 'wanted', 'moved'], rows)}\n")
    training, resume = found["training"], found["resume"]
    losses = f"{training['first_loss']:.2f} -> {training['last_loss']:.2f}"
    wait = training["wait_seconds_per_step"]
    share, moved = wait / training["seconds_per_step"], training["bytes_moved_per_token"]
    screen.heading("loss", f"{losses}, on unseen text {training['valid_loss']:.2f}")
    screen.heading("speed", f"{training['tokens_per_second']:,.0f} tokens/s")
    screen.heading("wait", f"{1000 * wait:.1f} ms per step for data, {share:.1%} of it")
    screen.heading("bytes", f"{moved:.1f} moved per {TOKEN_BYTES}-byte token: each process fills a cache of its own")
    screen.heading("order", f"{resume['equal_batches']} of {resume['batches']} batches are those of an unbroken run")


def show_access(names: Iterable[str], environment: dict[str, str], screen: Screen) -> None:
    """Print how other terminals reach the bucket while it stays up."""
    screen.line("\nThe bucket stays up until Ctrl-C. In another terminal:")
    for variable, value in environment.items():
        screen.line(f"  export {variable}={value}")
    for name in names:
        screen.line(f"  binidx inspect s3://{BUCKET}/{name}")
