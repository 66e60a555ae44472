"""Micro-batches gathered by C against a model of NumPy slices, at every vector level."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from binidx.errors import IndexBuildError
from binidx.format.idx import DType
from binidx.native.cpu import LEVELS
from binidx.native.gather import GPTOutputs, gather_samples, mapped_pieces, scattered_pieces

PAD, EOD = 77, 5
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]


def model(text: np.ndarray, length: int, mask_eod: bool) -> dict[str, np.ndarray]:
    """What Megatron makes of a sample's text."""
    padded = np.full(length + 1, PAD)
    padded[: len(text)] = text
    tokens, labels = padded[:-1].copy(), padded[1:].copy()
    loss_mask = (labels != PAD).astype(np.float32)
    loss_mask[(tokens == EOD) & mask_eod] = 0
    starts = [0, *(np.flatnonzero(tokens[:-1] == EOD) + 1)]
    positions = np.concatenate([np.arange(stop - start) for start, stop in pairwise([*starts, length])])
    return {
        "tokens": np.where(tokens == PAD, 0, tokens),
        "labels": np.where(labels == PAD, 0, labels),
        "loss_mask": loss_mask,
        "positions": positions,
    }


def random_case(rng: np.random.Generator, dtype: Any) -> tuple[int, np.ndarray, list[list[tuple[int, int]]]]:
    """A length, stored tokens, and for each sample the (start, stop) of its pieces among them."""
    length = int(rng.choice([1, 2, 3, 7, 31, 32, 33, 200]))
    stored = rng.integers(0, 100, 500).astype(dtype)
    samples = []
    for _ in range(rng.integers(1, 6)):
        left, pieces = int(rng.integers(0, length + 2)), []
        while left or rng.random() < 0.3:
            count = int(rng.integers(0, left + 1))
            start = int(rng.integers(0, len(stored) - count + 1))
            pieces.append((start, start + count))
            left -= count
        samples.append(pieces)
    return length, stored, samples


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_gathered_batch_is_the_model(dtype: Any, level: int) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        length, stored, samples = random_case(rng, dtype)
        # One byte off: a .bin is mapped where it is, and tokens in it lie at any address.
        buffer = memoryview(b"x" + stored.tobytes())[1:]
        ranges = np.array([piece for pieces in samples for piece in pieces], np.int64).reshape(-1, 2) * stored.itemsize
        bounds = np.cumsum([0, *map(len, samples)]).astype(np.int64)
        rows = rng.permutation(len(samples) + 2)[: len(samples)].astype(np.int64)
        views = [buffer[start:stop] for start, stop in ranges.tolist()]
        for pieces in (mapped_pieces(buffer, ranges, advise=False)[0], scattered_pieces(views)):
            out = outputs(len(samples) + 2, length)
            mask_eod = bool(rng.integers(2))
            gather_samples(
                pieces, bounds, rows, out, pad=PAD, eod=EOD, mask_eod=mask_eod, level=level,
                dtype_code=DType.code_from_dtype(dtype), item_bytes=stored.itemsize,
            )  # fmt: skip
            for row, found in zip(rows, samples, strict=True):
                text = np.concatenate([stored[:0], *(stored[start:stop] for start, stop in found)])
                for name, needed in model(text, length, mask_eod).items():
                    np.testing.assert_array_equal(getattr(out, name)[row], needed, err_msg=f"{seed} {name}")
            untouched = np.setdiff1d(np.arange(len(samples) + 2), rows)
            assert (out.tokens[untouched] == -9).all()


def outputs(rows: int, length: int) -> GPTOutputs:
    tokens, labels, positions = (np.full((rows, length), -9, np.int64) for _ in range(3))
    return GPTOutputs(tokens, labels, np.full((rows, length), -9, np.float32), positions)


@pytest.mark.parametrize(
    ("ranges", "bounds", "rows", "problem"),
    [
        ([(0, 12)], [0, 1], [0], "one is longer"),
        ([(0, 3)], [0, 1], [0], "not whole tokens"),
        ([(0, 2)], [0, 1], [1], "lead outside"),
        ([(0, 2)], [0, 1], [-1], "lead outside"),
        ([(0, 2)], [0, 2], [0], "lead outside"),
        ([(0, 2)], [1, 1], [0], "lead outside"),
        ([(0, 2), (0, 2)], [0, 3, 2], [0, 0], "lead outside"),
    ],
)
def test_impossible_batches_are_errors_and_write_nothing(ranges: Any, bounds: Any, rows: Any, problem: str) -> None:
    out = outputs(1, 4)
    pieces, _ = mapped_pieces(memoryview(bytes(20)), np.array(ranges, np.int64), advise=False)
    with pytest.raises(IndexBuildError, match=problem):
        gather_samples(
            pieces, np.array(bounds, np.int64), np.array(rows, np.int64), out,
            pad=PAD, eod=EOD, mask_eod=False, dtype_code=8, item_bytes=2,
        )  # fmt: skip
    assert (out.tokens == -9).all()


@pytest.mark.parametrize("outside", [(-1, 3), (5, 21), (6, 4)])
def test_a_range_that_leaves_its_mapping_is_refused(outside: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="leaves a mapping of 20 bytes"):
        mapped_pieces(memoryview(bytes(20)), np.array([(0, 20), outside], np.int64), advise=False)
