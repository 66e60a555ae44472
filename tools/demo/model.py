"""A small, plain GPT: embeddings, pre-norm blocks, and the embedding again as the head.

tokens (B, S) ─► wte + wpe ─► [ x + attention(norm x) ─► x + mlp(norm x) ] × layers ─► norm ─► logits (B, S, V)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT; the defaults have 1.7 million parameters with a vocabulary of 4,096."""

    vocab_size: int
    sequence_length: int
    width: int = 192
    num_layers: int = 2
    num_heads: int = 4


class Block(nn.Module):
    """One layer: causal attention, then an MLP four times as wide, each added to its input."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, S, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        hidden: Tensor = F.gelu(self.mlp_in(self.norm2(x)))
        out: Tensor = self.mlp_out(hidden)
        return x + out

    def attention(self, x: Tensor) -> Tensor:
        """Apply causal attention, (B, S, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """Next-token logits; the embedding is also the head.

    Source: Radford et al. 2019 (GPT-2), reduced.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.sequence_length, shape.width)
        blocks = [Block(shape) for _ in range(shape.num_layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.apply(init_weights)
        for block in blocks:  # as GPT-2: the residual stream keeps its size whatever the depth
            for linear in (block.out, block.mlp_out):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * shape.num_layers))

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Map tokens and positions, both (B, S) int64, to logits (B, S, vocab_size)."""
        x = self.blocks(self.tokens(tokens) + self.positions(position_ids))
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats over the positions of `loss_mask`, for one batch of a GPTDataset."""
        logits = self(batch["tokens"], batch["position_ids"])
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        return (losses * mask).sum() / mask.sum()


def init_weights(module: nn.Module) -> None:
    """Initialise matrices with a normal of std 0.02 and biases with 0, as GPT-2."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
