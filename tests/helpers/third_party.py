"""A map-style dataset that is not ours: samples with GPT's keys, and others of any type."""

from __future__ import annotations

from typing import Any

import torch

LENGTH = 8


class ThirdParty(torch.utils.data.Dataset[dict[str, Any]]):
    """Sample i holds the tokens i, i + 1, ..., and one more value of the given kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 24

    def __getitem__(self, idx: int) -> dict[str, Any]:
        text = torch.arange(idx, idx + LENGTH + 1)
        sample: dict[str, Any] = {
            "tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
        }  # fmt: skip
        more: dict[str, Any] = {
            "string": f"document {idx}", "list": [idx, idx + 1], "dict": {"source": "en", "score": torch.ones(2) * idx},
            "bfloat16": torch.ones(3, dtype=torch.bfloat16) * idx, "number": idx, "tensor": torch.tensor([idx]),
            "large": torch.ones(1 << 14, dtype=torch.bfloat16) * idx,
        }  # fmt: skip
        if self.kind == "rows":
            return {name: value.tolist() for name, value in sample.items()}
        if self.kind == "labels":
            return {**sample, "labels": sample["labels"][:-1]}
        if self.kind == "empty":
            return {name: value[:0] for name, value in sample.items()}
        return {**sample, self.kind: more[self.kind]}
