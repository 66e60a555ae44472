"""Megatron Core's masking between documents, which came after 0.16.1, by its rule over the dataset of 0.16.1.

Source: NVIDIA/Megatron-LM, pull request 5298 (June 2026), `GPTDataset.__getitem__`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from helpers.oracle import megatron


class Parts:
    """A low-level dataset that notes how long each part is that is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.lengths = dataset, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def get(self, *args: Any, **options: Any) -> Any:
        part = self.dataset.get(*args, **options)
        self.lengths.append(len(part))
        return part


class InterDocumentDataset(megatron.gpt.GPTDataset):
    """Samples with `cu_seqlens` and `max_seqlen`, whose positions start again with each document."""

    def __init__(self, dataset: Any, *args: Any) -> None:
        super().__init__(dataset, *args)
        self.dataset = Parts(self.dataset)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        self.dataset.lengths = lengths = []
        sample = super().__getitem__(idx)
        sample.pop("attention_mask", None)
        length = self.config.sequence_length
        bounds = bounds_of(lengths, length, self.config.add_extra_token_to_sequence)
        padded = torch.full((length + 1,), length, dtype=torch.int32)
        padded[: len(bounds)] = torch.tensor(bounds, dtype=torch.int32)
        positions = sample["position_ids"].clone()
        for start, stop in pairwise(bounds):
            positions[start:stop] = torch.arange(stop - start)
        return {**sample, "position_ids": positions, "cu_seqlens": padded, "max_seqlen": padded.diff().max()}


def bounds_of(lengths: list[int], sequence_length: int, extra: bool) -> list[int]:
    """Where documents begin, and the end: without the extra token, and pads are the last document's."""
    if extra:
        lengths[-1] -= 1
        if lengths[-1] == 0:
            lengths.pop()
    if not lengths:
        lengths.append(0)
    lengths[-1] += sequence_length - sum(lengths)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds
