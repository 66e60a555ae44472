"""Random inputs that several tests draw from: datasets on disk, tokenizers, configs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tokenizer:
    """As much of a tokenizer as datasets look at. `eod` occurs in the data, `pad` does not."""

    vocab_size: int = 1000
    eod: int = 0
    pad: int = 999
    name: str = "test"

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([("class", "cases.Tokenizer"), ("tokenizer_path", [self.name]), ("vocab_size", "1000")])


TOKENIZER = Tokenizer()


def random_lengths(rng: np.random.Generator, num_sequences: int) -> np.ndarray:
    """Lengths of every kind: short, long, one long one among short ones, and zeros."""
    kind = rng.integers(4)
    lengths = rng.integers(1, [8, 60, 3, 20][kind], num_sequences)
    if kind == 2:
        lengths[rng.integers(num_sequences)] = rng.integers(100, 400)
    if kind == 3:
        lengths[rng.random(num_sequences) < 0.3] = 0
    return lengths.astype(np.int32)


def write_with_megatron(prefix: Path, lengths: np.ndarray, rng: np.random.Generator, dtype: type = np.uint16) -> str:
    """A pair written by Megatron Core, one sequence a document, tokens 0 (the EOD) to 998."""
    from helpers.oracle import megatron  # 3 s of CPU time, which most users of this module do not need

    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in lengths:
        tokens = rng.integers(0, 999, length)
        tokens[rng.random(length) < 0.1] = TOKENIZER.eod
        builder.add_document(tokens, [int(length)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def assert_same_sample(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Key by key, in dtype, shape and value."""
    assert sorted(ours) == sorted(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        assert ours[key].shape == value.shape, key
        assert (np.asarray(ours[key]) == np.asarray(value)).all(), key
