"""A small, plain GPT: embeddings, pre-norm blocks, and the embedding again as the head.

tokens (B, S) ─► wte + wpe ─► [ x + attention(norm x) ─► x + mlp(norm x) ] × layers ─► norm ─► logits (B, S, V)
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class GPT(nn.Module):
    """Small GPT whose embedding is also its head. 1.7 million parameters with a vocabulary of 4,096.

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
