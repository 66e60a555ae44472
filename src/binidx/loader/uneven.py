"""Batches of samples that differ in length: bounds of sequences made equally many, or all in one row (THD).

    cu_seqlens of two rows       0 3 8        0 3 8 8       as Megatron's inter-document masking pads them:
                                 0 2 5 8      0 2 5 8       sequences of no tokens at the end

    samples of 2, 4 and 2        a a | b b b b | c c        one row, with where each begins and, without pads, ends

Source: ours; the keys of a packed row are those of Megatron-LM's packing scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from binidx.dataset.torch_bridge import as_tensor

LENGTHS = ("original_seq_len", "padded_seq_len")


def is_packable(samples: Sequence[Any]) -> bool:
    """Whether these are samples of a length of their own, which cannot be stacked."""
    return isinstance(samples[0], Mapping) and all(name in samples[0] for name in LENGTHS)


def pack(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of all samples: their tensors concatenated, each of shape (1, T).

    Besides `cu_seqlens`, the sum of the original lengths, and `cu_seqlens_padded`, where each begins, then T: int32,
    each of shape (1, B + 1); `max_seqlen`, with pads, int32 (1,); and a number a sample, shape (B,), where it has some.
    """
    original, padded = (np.concatenate([np.asarray(sample[name]) for sample in samples]) for name in LENGTHS)
    batch: dict[str, Any] = {}
    for name, value in samples[0].items():
        if name not in LENGTHS:
            values = [np.asarray(sample[name]) for sample in samples]
            batch[name] = as_tensor(np.concatenate(values)[None] if value.ndim else np.stack(values))
    batch["cu_seqlens"] = as_tensor(_bounds(original))
    batch["cu_seqlens_padded"] = as_tensor(_bounds(padded))
    batch["max_seqlen"] = as_tensor(padded.max(keepdims=True))
    return batch


def level(samples: Sequence[Any]) -> list[Any]:
    """The samples with equally many bounds of sequences, where they have bounds: the last one repeated."""
    if not isinstance(samples[0], Mapping) or "cu_seqlens" not in samples[0]:
        return [*samples]
    bounds = [np.asarray(sample["cu_seqlens"]) for sample in samples]
    most = max(map(len, bounds))
    even = [np.pad(each, (0, most - len(each)), mode="edge") for each in bounds]
    return [{**sample, "cu_seqlens": as_tensor(each)} for sample, each in zip(samples, even, strict=True)]


def _bounds(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)[None]
