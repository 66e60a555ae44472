"""Micro-batches filled by C against a model of NumPy slices, at every vector level, from pieces and from a map."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from binidx.errors import IndexBuildError
from binidx.format.idx import DType
from binidx.native.arguments import LEVELS, Mapped
from binidx.native.gpt_samples import (
    FREE_BYTES,
    GPTIndex,
    GPTRows,
    Recipe,
    Rows,
    Sequences,
    Starts,
    TextRows,
    take_block,
)

PAD, EOD = 77, 5
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]
OUTPUTS = ("tokens", "labels", "loss_mask", "positions")


def model(parts: list[np.ndarray], recipe: dict[str, Any], length: int) -> dict[str, np.ndarray]:
    """What Megatron makes of the parts of a sample."""
    text = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    padded = np.full(length + 1, PAD)
    padded[: len(text)] = text
    tokens, labels = padded[:-1].copy(), padded[1:].copy()
    loss_mask = (labels != PAD).astype(np.float32)
    loss_mask[(tokens == EOD) & recipe["mask_eod"]] = 0
    found = {
        "tokens": np.where(tokens == PAD, 0, tokens),
        "labels": np.where(labels == PAD, 0, labels),
        "loss_mask": loss_mask,
        "text": padded,
    }
    starts = [0]
    if recipe["starts"] is Starts.AFTER_EOD:
        starts += (np.flatnonzero(tokens[:-1] == EOD) + 1).tolist()
    if recipe["starts"] is Starts.EACH_PIECE:
        starts = starts_of_pieces([len(part) for part in parts], length, recipe["add_extra_token"])
        found["cu_seqlens"] = np.array([*starts, *[length] * (length + 1 - len(starts))])
        found["max_seqlen"] = np.diff(found["cu_seqlens"]).max()
    runs = [np.arange(stop - start) for start, stop in pairwise([*starts, length])]
    return {**found, "positions": np.concatenate(runs)}


def starts_of_pieces(lengths: list[int], length: int, extra: bool) -> list[int]:
    """Megatron's rule; where it has more bounds than a row holds and fails, pieces without tokens are left out."""
    lengths = lengths or [0]
    if extra:
        lengths[-1] -= 1
        lengths = lengths[:-1] if lengths[-1] == 0 else lengths
    lengths = lengths or [0]
    lengths[-1] += length - sum(lengths)
    if len(lengths) > length:
        lengths = [count for count in lengths if count]
    return np.cumsum([0, *lengths])[:-1].tolist()


def random_recipe(rng: np.random.Generator) -> dict[str, Any]:
    flags = {name: bool(rng.integers(2)) for name in ("mask_eod", "add_extra_token")}
    return {"starts": Starts(int(rng.integers(3))), **flags}


def random_samples(rng: np.random.Generator, length: int, extra: bool) -> list[list[int]]:
    """For each sample the tokens of its pieces, some of them none, at most `length + extra` in all."""
    samples = []
    for _ in range(rng.integers(1, 6)):
        left, pieces = int(rng.integers(0, length + extra + 1)), []
        while left or rng.random() < 0.3:
            pieces.append(int(rng.integers(0, left + 1)) if rng.random() < 0.9 else left)
            left -= pieces[-1]
        samples.append(pieces)
    return samples


def empty_rows(recipe: dict[str, Any], length: int, rows: int) -> tuple[GPTRows, TextRows]:
    made = Recipe(length, pad=PAD, eod=EOD, **recipe)
    outputs, text = GPTRows(made, rows), TextRows(made, rows)
    for name in OUTPUTS:
        getattr(outputs, name)[:] = -9
    text.text[:] = -9
    return outputs, text


def check_rows(outputs: GPTRows, text: TextRows, rows: list[int], needed: list[dict[str, np.ndarray]]) -> None:
    for row, sample in zip(rows, needed, strict=True):
        for name, value in sample.items():
            found = text.text if name == "text" else getattr(outputs, name)
            np.testing.assert_array_equal(found[row], value, err_msg=name)
    untouched = np.setdiff1d(np.arange(outputs.num_rows), rows)
    assert (outputs.tokens[untouched] == -9).all()
    assert (text.text[untouched] == -9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_of_pieces_is_the_model(dtype: Any, level: int) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        length, recipe = int(rng.choice([1, 2, 3, 7, 31, 32, 33, 200])), random_recipe(rng)
        samples = random_samples(rng, length, recipe["add_extra_token"])
        stored = rng.integers(0, 100, 500).astype(dtype)
        # One byte off: a .bin is mapped where it is, and tokens in it lie at any address.
        buffer = memoryview(b"x" + stored.tobytes())[1:]
        starts = [[int(rng.integers(0, len(stored) - count + 1)) for count in pieces] for pieces in samples]
        where = [list(zip(first, pieces, strict=True)) for first, pieces in zip(starts, samples, strict=True)]
        parts = [[stored[first : first + count] for first, count in pieces] for pieces in where]
        size = stored.itemsize
        views = [buffer[first * size : (first + count) * size] for pieces in where for first, count in pieces]
        bounds = np.cumsum([0, *map(len, samples)]).astype(np.int64)
        rows = rng.permutation(len(samples) + 2)[: len(samples)].tolist()
        outputs, text = empty_rows(recipe, length, len(samples) + 2)
        for each in (outputs, text):
            code = DType.code_from_dtype(dtype)
            each.fill(views, bounds, rows, dtype_code=code, item_bytes=size, level=level)
        check_rows(outputs, text, rows, [model(pieces, recipe, length) for pieces in parts])


def random_orders(
    rng: np.random.Generator, length: int, extra: bool, dtype: Any
) -> tuple[GPTIndex, np.ndarray, list[Any]]:
    """GPTIndex over short sequences, the stored tokens, and for each sample served its parts."""
    lengths = rng.integers(0, [3, 12, 60][rng.integers(3)], 40).astype(np.int32)
    stored = rng.integers(0, 100, lengths.sum()).astype(dtype)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * stored.itemsize
    sequences = Sequences(lengths, pointers, dtype_code=DType.code_from_dtype(dtype), item_bytes=stored.itemsize)
    documents = rng.integers(0, 40, 60).astype(np.int32)
    ends = np.cumsum(lengths[documents])
    rows = max((int(ends[-1]) - extra) // length, 0) + 1
    at = np.arange(rows) * length
    position = np.minimum(np.searchsorted(ends, at, side="right"), 59)
    sample_index = np.stack([position, at - (ends - lengths[documents])[position]], axis=1)
    shuffle = rng.permutation(rows - 1)
    stream = np.concatenate([np.full(lengths[d], i) for i, d in enumerate(documents)])
    tokens = np.concatenate([stored[:0], *(stored[p : p + n] for p, n in zip(
        pointers[documents] // stored.itemsize, lengths[documents], strict=True))])  # fmt: skip
    samples = []
    for row in shuffle:
        owner, text = (each[row * length : row * length + length + extra] for each in (stream, tokens))
        first, last = (int(position[row + step]) for step in (0, 1))
        samples.append([text[owner == document] for document in range(first, last + 1)])
    wide = [np.int32, np.int64][rng.integers(2)], [np.uint32, np.int64][rng.integers(2)]
    arrays = shuffle.astype(wide[1]), sample_index.astype(wide[0]), documents
    return GPTIndex(*arrays, sequences, add_extra_token=extra), stored, samples


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_of_a_map_is_the_model(level: int, disk: bool) -> None:
    served_in_all = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        length, recipe = int(rng.choice([1, 2, 7, 31, 64])), random_recipe(rng)
        orders, stored, samples = random_orders(rng, length, recipe["add_extra_token"], rng.choice(DTYPES))
        if not samples:
            continue
        served = rng.integers(-len(samples), len(samples), rng.integers(1, 7)).tolist()
        served_in_all += len(served)
        rows = rng.permutation(len(served) + 2)[: len(served)].tolist()
        outputs, text = empty_rows(recipe, length, len(served) + 2)
        content = Mapped(memoryview(stored.tobytes()), disk=disk)
        for each in (outputs, text):
            about = content.taking(ask_ahead=bool(rng.integers(2)))
            ranges = each.read(orders, about, served, rows, level)
            assert ranges == sum(len(samples[number]) for number in served)
            assert about.num_bytes == stored.itemsize * sum(len(part) for n in served for part in samples[n])
        check_rows(outputs, text, rows, [model(list(samples[number]), recipe, length) for number in served])
    assert served_in_all > 200


def test_a_sample_of_very_many_pieces_finds_room() -> None:
    lengths = np.zeros(500, np.int32)
    lengths[[0, -1]] = 3
    pointers = np.array([0, *[6] * 499], np.int64)
    sequences = Sequences(lengths, pointers, dtype_code=8, item_bytes=2)
    documents, rows = np.arange(500, dtype=np.int32), np.array([[0, 0], [499, 2]], np.int32)
    orders = GPTIndex(np.zeros(1, np.uint32), rows, documents, sequences, add_extra_token=True)
    content = Mapped(memoryview(np.arange(6, dtype=np.uint16).tobytes()), disk=False)
    for _ in range(2):
        out = GPTRows(Recipe(5, pad=PAD, starts=Starts.EACH_PIECE), 1)
        assert out.read(orders, content.taking(ask_ahead=False), [0], [0]) == 500
        assert out.labels.tolist() == [[1, 2, 3, 4, 5]]
        assert out.cu_seqlens.tolist() == [[0, 3, 5, 5, 5, 5]]


@pytest.mark.parametrize(
    ("ranges", "bounds", "rows", "problem"),
    [
        ([(0, 12)], [0, 1], [0], "a sample is longer"),
        ([(0, 3)], [0, 1], [0], "not whole tokens"),
        ([(0, 2)], [0, 1], [1], "lead outside"),
        ([(0, 2)], [0, 1], [-1], "lead outside"),
        ([(0, 2)], [0, 2], [0], "lead outside"),
        ([(0, 2)], [1, 1], [0], "lead outside"),
        ([(0, 2), (0, 2)], [0, 3, 2], [0, 0], "lead outside"),
    ],
)
def test_impossible_pieces_are_errors_and_write_nothing(ranges: Any, bounds: Any, rows: Any, problem: str) -> None:
    outputs, text = empty_rows({}, 4, 1)
    pieces = [memoryview(bytes(stop - start)) for start, stop in ranges]
    each: Rows
    for each in (outputs, text):
        with pytest.raises(IndexBuildError, match=problem):
            each.fill(pieces, np.array(bounds, np.int64), rows, dtype_code=8, item_bytes=2)
    assert (outputs.tokens == -9).all()
    assert (text.text == -9).all()


WRONG: dict[str, dict[str, Any]] = {
    "a sample there is not": {"served": [2]},
    "a sample before the first": {"served": [-3]},
    "a row of the batch there is not": {"rows": [1]},
    "a row of sample_index there is not": {"shuffle_index": np.array([7, 0], np.uint32)},
    "rows that fall": {"sample_index": np.array([[2, 0], [1, 0], [0, 1]], np.int32)},
    "a document there is not": {"sample_index": np.array([[0, 0], [9, 0], [9, 1]], np.int32)},
    "a sequence there is not": {"document_index": np.array([0, 3, 2], np.int32)},
    "a sequence below 0": {"document_index": np.array([-1, 1, 2], np.int32)},
    "a start before its sequence": {"sample_index": np.array([[0, -1], [1, 0], [2, 0]], np.int32)},
    "an end after its sequence": {"sample_index": np.array([[0, 0], [0, 4], [2, 0]], np.int32)},
    "more than a row and a token": {"sample_index": np.array([[0, 0], [2, 2], [2, 2]], np.int32)},
    "a map that is shorter": {"size": 5},
    "a pointer outside": {"pointers": np.array([-4, 6, 12], np.int64)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_impossible_orders_are_errors_and_write_nothing(wrong: dict[str, Any]) -> None:
    case: dict[str, Any] = {
        "served": [0], "rows": [0], "size": 18, "pointers": np.array([0, 6, 12], np.int64),
        "shuffle_index": np.array([0, 1], np.uint32), "document_index": np.array([0, 1, 2], np.int32),
        "sample_index": np.array([[0, 0], [1, 0], [2, 0]], np.int32), **wrong,
    }  # fmt: skip
    lengths = np.full(3, 3, np.int32)
    sequences = Sequences(lengths, case["pointers"], dtype_code=8, item_bytes=2)
    arrays = (case[name] for name in ("shuffle_index", "sample_index", "document_index"))
    orders = GPTIndex(*arrays, sequences, add_extra_token=True)
    outputs, text = empty_rows({}, 3, 1)
    for each in (outputs, text):
        about = Mapped(memoryview(bytes(case["size"])), disk=False).taking(ask_ahead=False)
        with pytest.raises(IndexBuildError, match=r"samples of 3 tokens: "):
            each.read(orders, about, case["served"], case["rows"])
    assert (outputs.tokens == -9).all()
    assert (text.text == -9).all()


def test_one_row_may_go_without_its_axis() -> None:
    recipe = Recipe(3, pad=PAD, starts=Starts.EACH_PIECE)
    one, many = GPTRows(recipe, None), GPTRows(recipe, 1)
    pieces = [np.arange(4, dtype=np.uint16)]
    for rows in (one, many):
        rows.fill(pieces, np.array([0, 1]), [0], dtype_code=8, item_bytes=2)
    for name in (*OUTPUTS, "cu_seqlens", "max_seqlen"):
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name)[0])
    assert one.max_seqlen.shape == ()


def test_orders_of_other_types_are_refused() -> None:
    sequences = Sequences(np.zeros(1, np.int32), np.zeros(1, np.int64), dtype_code=8, item_bytes=2)
    documents, rows = np.zeros(1, np.int32), np.zeros((1, 2), np.int32)
    with pytest.raises(TypeError, match="shuffle_index of int32"):
        GPTIndex(np.zeros(1, np.int32), rows, documents, sequences, add_extra_token=True)
    with pytest.raises(TypeError, match=r"needs \(n, 2\), found shape \(2, 3\)"):
        GPTIndex(np.zeros(1, np.uint32), np.zeros((2, 3), np.int32), documents, sequences, add_extra_token=True)
    with pytest.raises(ValueError, match="1 lengths of sequences with 2 pointers"):
        Sequences(np.zeros(1, np.int32), np.zeros(2, np.int64), dtype_code=8, item_bytes=2)


def test_a_block_is_given_again_only_when_its_last_array_is_gone() -> None:
    block = take_block(5000)
    address, part = block.ctypes.data, block[10:20].reshape(2, 5)
    part[:] = 7
    del block
    assert take_block(5000).ctypes.data != address
    assert (part == 7).all()
    del part
    assert address in [array.ctypes.data for array in [take_block(5000) for _ in range(2)]]
    assert len(take_block(2 * FREE_BYTES)) == 2 * FREE_BYTES
