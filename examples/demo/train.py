"""The training process: a small GPT, a record for each step, a checkpoint in the middle, and a resume from it.

python train.py RUN.json [--resume]        prints each record as a line of JSON

tokens (B, S) ─► wte + wpe ─► [ x + attention(norm x) ─► x + mlp(norm x) ] × layers ─► norm ─► logits (B, S, V)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import binidx

BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE = 16, 128, 4096
LEARNING_RATE = 2e-3

Batch = dict[str, Tensor]


class GPT(nn.Module):
    """Small GPT whose embedding is also its head. 1.7 million parameters with a vocabulary of 4,096.

    Args:
        vocab_size: number of tokens, V.
        sequence_length: most tokens of a sample, S.
        width: size of the hidden states.
        num_layers: number of blocks.
        num_heads: number of attention heads of a block.

    Source: Radford et al. 2019 (GPT-2), reduced; the blocks are torch's.
    """

    def __init__(
        self, vocab_size: int, sequence_length: int, width: int = 192, num_layers: int = 2, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # matrices, as in GPT-2
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Map tokens and positions, both (B, S) int64, to logits (B, S, vocab_size)."""
        x = self.tokens(tokens) + self.positions(position_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats over the positions of `loss_mask`, for one batch of a GPTDataset."""
        logits = self(batch["tokens"], batch["position_ids"])
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        return (losses * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Step:
    """One step of the run.

    Args:
        number: steps of the run done after this one, counted over all processes.
        batch: hash of the batch.
        loss: loss of the step, in nats per token, before its update.
        wait_seconds: time from the request for the batch to its arrival.
        seconds: time of the whole step, waiting included.
    """

    number: int
    batch: str
    loss: float
    wait_seconds: float
    seconds: float


def batches(dataset: Any, consumed_samples: int = 0) -> Iterator[Batch]:
    """Return the batches after `consumed_samples` samples; this number is the whole state that a resume needs.

    Args:
        dataset: built dataset.
        consumed_samples: number of samples served before.
    """
    loader = binidx.build_pretraining_data_loader(dataset, consumed_samples, micro_batch_size=BATCH_SIZE)
    assert loader is not None
    return iter(loader)


def batch_hash(batch: Batch) -> str:
    """Return 48 bits of SHA-256 over the batch's tokens and labels, in hex."""
    return sha256(batch["tokens"].numpy().tobytes() + batch["labels"].numpy().tobytes()).hexdigest()[:12]


def train(path: Path, *, resume: bool) -> Iterator[Step]:
    """Execute a saved run from its start, or with `resume` from its checkpoint, to its end; yield a Step after each.

    Args:
        path: the saved run; the checkpoint lies beside it.
        resume: continue from the checkpoint.
    """
    run = binidx.Run.load(str(path))
    dataset = run.build()[0]
    torch.manual_seed(run.config.random_seed)
    model = GPT(VOCAB_SIZE, SEQUENCE_LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    checkpoint, num_steps, consumed_samples = path.with_suffix(".pt"), (run.sizes[0] or 0) // BATCH_SIZE, 0
    if resume:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        consumed_samples = state["consumed_samples"]
    loader = batches(dataset, consumed_samples)
    for number in range(consumed_samples // BATCH_SIZE + 1, num_steps + 1):
        start = time.perf_counter()
        batch = next(loader)
        wait_seconds = time.perf_counter() - start
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield Step(number, batch_hash(batch), loss.item(), wait_seconds, time.perf_counter() - start)
        if number == num_steps // 2:
            consumed = {"consumed_samples": number * BATCH_SIZE}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **consumed}
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(checkpoint)  # a killed process leaves a complete checkpoint or none


if __name__ == "__main__":
    for record in train(Path(sys.argv[1]), resume="--resume" in sys.argv):
        print(json.dumps(asdict(record)), flush=True)
