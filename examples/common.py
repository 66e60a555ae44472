"""Parts that the examples share: arguments, a dataset, a model small enough for a laptop, and a line a step."""

from __future__ import annotations

import argparse
import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import binidx

SEQUENCE_LENGTH, MICRO_BATCH_SIZE = 64, 4


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="URI of a .bin/.idx pair, without the ending, or of a run.json")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--eod", type=int, required=True, help="the token that ends a document")
    parser.add_argument("--steps", type=int, default=100, help="of the whole run")
    parser.add_argument("--save", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between checkpoints (plain_torch.py)")
    parser.add_argument("--resume", action="store_true", help="go on from it")
    return parser.parse_args(argv)


def train_dataset(options: argparse.Namespace) -> Any:
    """Train split of a run.json, or samples of a whole prefix, as many epochs of it as the steps need."""
    if options.data.endswith(".json"):
        return binidx.Run.load(options.data).build()[0]
    return binidx.load_dataset(
        options.data,
        SEQUENCE_LENGTH,
        num_samples=1_000_000,  # more than the steps of the examples need; their order does not depend on it
        tokenizer=binidx.SpecialTokens(options.eod),
    )


def train_loader(dataset: Any, losses_to: Path | None = None) -> Any:
    """Micro-batches of this rank. With tensor or pipeline parallelism give the mesh: `find_topology(mesh["dp"])`.

    `loader.record_losses(number, losses)` writes into the folder `losses_to`, for `binidx spikes`. `number` is that of
    the micro-batch in the whole run: a trainer may have fetched others since.
    """
    topology = binidx.find_topology()
    return binidx.build_pretraining_data_loader(dataset, 0, MICRO_BATCH_SIZE, *topology, losses_to=losses_to)


def join_ranks() -> None:
    """Form a process group if a launcher started several processes, for trainers that do not do it themselves.

    Its timeout bounds how long reads outlast an outage of the store: by default NCCL's is 10 minutes, gloo's 30.
    """
    if binidx.find_topology().size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=30))


def replicate(model: torch.nn.Module) -> torch.nn.Module:
    """Average gradients over the ranks, if there are several."""
    return torch.nn.parallel.DistributedDataParallel(model) if torch.distributed.is_initialized() else model


def save(state: dict[str, Any], checkpoint: Path) -> None:
    """Write a checkpoint, on one rank: its states are the same on all."""
    if binidx.find_topology().rank == 0:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(checkpoint)  # complete, or not there


class TinyModel(torch.nn.Module):
    """One token predicts the next: no more than it takes to have a loss."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.head(self.embed(tokens)).mT, labels, reduction="none")
        return (loss * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)


def losses_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of each sample, (B,), of which the trainer takes the mean."""
    losses: torch.Tensor = model(batch["tokens"], batch["labels"], batch["loss_mask"])
    return losses


def tell(step: int, batch: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
    """Print a step as a line of JSON: the hash of its batch, and its loss."""
    read = hashlib.blake2b(batch["tokens"].numpy().tobytes(), digest_size=8).hexdigest()
    print(json.dumps({"step": step, "read": read, "loss": round(loss.item(), 6)}), flush=True)
