"""The C functions over NumPy arrays: the only module that imports the compiled core.

Each wrapper checks dtype, contiguity and bounds before it takes a pointer; the GIL is released inside every call. The
rules of each algorithm, its picture and its price stand at the top of its file in `native/`.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError

C_ITEMS = {"int16": "int16_t[]", "int32": "int32_t[]", "int64": "int64_t[]", "float64": "double[]"}
MAX_COUNT = 2**53
"""Counts stay below this: sums of two fit int64, and each is exact as a double."""


def _pointer(array: NDArray[Any], dtype: type[np.generic]) -> Any:
    """A `const void *` to an array that may be unaligned, as those mapped from an .idx are."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(f"needs a contiguous 1-D {np.dtype(dtype).name} array, found {array.ndim}-D {array.dtype}")
    return ffi.from_buffer(array)


def _items(array: NDArray[Any], dtype: DTypeLike, *, write: bool = False) -> Any:
    """A typed pointer to an aligned, C-contiguous array; `write` refuses one that is read-only."""
    found, needed = array.dtype, np.dtype(dtype)
    if found != needed or not array.flags.c_contiguous or not array.flags.aligned:
        raise TypeError(f"needs an aligned, contiguous {needed.name} array, found {found} with strides {array.strides}")
    return ffi.from_buffer(C_ITEMS[needed.name], array, require_writable=write)


def _count(name: str, value: int, least: int = 0) -> int:
    """`value` as an int that C can add to another without overflow."""
    if not least <= value < MAX_COUNT:
        raise ValueError(f"{name}: {value}, needs {least} <= {name} < {MAX_COUNT}")
    return operator.index(value)


def check_sequences(lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int) -> tuple[int, int]:
    """How many leading sequences are true to the format, and their tokens.

    Args:
        lengths: tokens of each sequence, shape (num_sequences,).
        pointers: first byte of each sequence in the `.bin`, shape (num_sequences,).
        item_bytes: bytes of one token.

    Returns:
        (number of the first wrong sequence, or num_sequences; tokens before it).
    """
    if len(lengths) != len(pointers):
        raise ValueError(f"{len(lengths)} lengths, {len(pointers)} pointers")
    total = ffi.new("int64_t *")
    right = lib.binidx_check_sequences(
        _pointer(lengths, np.int32), _pointer(pointers, np.int64), len(lengths), item_bytes, total
    )
    return right, total[0]


def check_documents(document_indices: NDArray[np.int64], num_sequences: int) -> int:
    """How many leading document bounds never fall and never pass `num_sequences`; all of them when it is right."""
    bounds = _pointer(document_indices, np.int64)
    return int(lib.binidx_check_documents(bounds, len(document_indices), num_sequences))


class RandomState:
    """NumPy's legacy `RandomState(seed)` as far as `shuffle` goes: the same places, and the same state afterwards.

    One instance carries on from shuffle to shuffle, as NumPy's does; it must not be used by two threads at once.

    Source: NumPy, `numpy.random.RandomState` over MT19937, frozen by NEP 19.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: {seed}, needs 0 <= seed < 2**32")
        self._rng = ffi.new("binidx_mt19937 *")
        lib.binidx_mt19937_seed(self._rng, operator.index(seed))

    @property
    def state(self) -> tuple[NDArray[np.uint32], int]:
        """NumPy's `get_state()[1:3]`: the block of 624 words, and how many of them are drawn."""
        return np.frombuffer(ffi.buffer(self._rng.key), np.uint32).copy(), int(self._rng.position)

    def shuffle(self, array: NDArray[Any]) -> None:
        """Shuffle a contiguous 1-D array of 4- or 8-byte numbers in place. The draws do not depend on the dtype."""
        if array.dtype.kind not in "iuf" or array.itemsize not in (4, 8) or array.ndim != 1:
            raise TypeError(f"shuffle: {array.ndim}-D {array.dtype}, needs 1-D numbers of 4 or 8 bytes")
        if not array.flags.c_contiguous or not array.flags.aligned:
            raise TypeError(f"shuffle: strides {array.strides}, needs an aligned, contiguous array")
        shuffle = lib.binidx_shuffle_4 if array.itemsize == 4 else lib.binidx_shuffle_8
        shuffle(self._rng, ffi.from_buffer(array, require_writable=True), len(array))

    def shuffle_targets(self, first: int, count: int) -> NDArray[np.int64]:
        """What steps first, first - 1, ... of a shuffle swap with, shape (count,): the draws without the array.

        Makes orders beyond memory testable: a shuffle of n items is the steps from n - 1 down to 1.
        """
        first, count = _count("first", first), _count("count", count)
        if count > first:
            raise ValueError(f"count: {count}, needs at most {first}: the last step is 1")
        targets = np.empty(count, np.int64)
        lib.binidx_shuffle_targets(self._rng, first, count, _items(targets, np.int64, write=True))
        return targets


def torch_randperm(n: int, seed: int) -> NDArray[np.int64]:
    """`torch.randperm(n, generator=torch.Generator().manual_seed(seed))` on the CPU, without torch; shape (n,).

    The same as `torch.manual_seed(seed); torch.randperm(n)`: torch keeps the low 32 bits of a seed. From
    n = (2**32 - 1) // 20 on torch changes to a rule with 64-bit draws, and so do we.

    Source: PyTorch, `randperm_cpu`.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: {seed}, needs -2**63 <= seed < 2**64")
    return _randperm(n, seed, wide=n >= (2**32 - 1) // 20)


def _randperm(n: int, seed: int, *, wide: bool) -> NDArray[np.int64]:
    """torch's rule with 64-bit draws (wide) or with 32-bit ones, whatever n is."""
    out = np.empty(_count("n", n), np.int64)
    rng = ffi.new("binidx_mt19937 *")
    lib.binidx_mt19937_seed(rng, seed & 0xFFFFFFFF)
    permute = lib.binidx_randperm_64 if wide else lib.binidx_randperm_32
    permute(rng, len(out), _items(out, np.int64, write=True))
    return out


def sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_tokens: int,
    rows: NDArray[Any],
    *,
    add_extra_token: bool,
) -> None:
    """Fill `rows`: where each sample starts, see `index.sample.build_sample_index`.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        document_index: sequences in reading order, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: of all documents in document_index.
        rows: int32 or int64, shape (num_samples + 1, 2).
        add_extra_token: a sample holds the first token of the next one too.

    Raises:
        IndexBuildError: a document number, a length, or the sum of the lengths is not what it must be.
    """
    if rows.ndim != 2 or rows.shape[1] != 2 or len(rows) < 1:
        raise TypeError(f"rows: shape {rows.shape}, needs (num_samples + 1, 2)")
    if document_index.ndim != 1 or rows.dtype not in (np.int32, np.int64):
        raise TypeError(f"document_index: {document_index.ndim}-D, rows: {rows.dtype}; need 1-D, int32 or int64")
    lengths, documents = _pointer(sequence_lengths, np.int32), _items(document_index, np.int32)
    samples = ffi.new(
        "binidx_samples *"
    )  # borrows both pointers: `lengths` and `documents` stay alive until the return
    samples.sequence_lengths, samples.num_sequences = lengths, len(sequence_lengths)
    samples.document_index, samples.num_documents = documents, len(document_index)
    samples.sequence_length, samples.extra = _count("sequence_length", sequence_length, 1), int(add_extra_token)
    samples.num_tokens, samples.num_samples = _count("num_tokens", num_tokens), len(rows) - 1
    build = lib.binidx_sample_index_4 if rows.itemsize == 4 else lib.binidx_sample_index_8
    found = ffi.new("int64_t *")
    code = build(samples, _items(rows, rows.dtype, write=True), found)
    if code < 0:
        counted = f"{len(rows) - 1} samples over {num_tokens}"
        raise _sample_error(code, found[0], sequence_lengths, document_index, counted)


def _sample_error(
    code: int, found: int, lengths: NDArray[np.int32], documents: NDArray[np.int32], counted: str
) -> IndexBuildError:
    """What a negative code of the sample index means."""
    if code == lib.BINIDX_BAD_TOKENS:
        return IndexBuildError(f"sample index: the documents hold {found} tokens, needs those counted: {counted}")
    document = documents[found]
    if code == lib.BINIDX_BAD_DOCUMENT:
        return IndexBuildError(f"document_index[{found}]: {document}, needs 0 <= sequence < {len(lengths)}")
    assert code == lib.BINIDX_BAD_LENGTH
    return IndexBuildError(f"sequence_lengths[{document}]: {lengths[document]}, needs 0 or more tokens")


def blend_weighted(
    weights: NDArray[np.float64], dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Fill the two indices, shape (size,), see `index.blend.build_blend_index`; returns the samples drawn from each.

    The weights must be finite and positive.
    """
    size = len(dataset_index)
    if len(dataset_sample_index) != size or not 0 < len(weights) < 2**15:
        raise ValueError(f"{len(weights)} weights, {size} and {len(dataset_sample_index)} rows")
    counts = np.empty(len(weights), np.float64)
    lib.binidx_blend_weighted(
        _items(weights, np.float64),
        len(weights),
        size,
        _items(counts, np.float64, write=True),
        _items(dataset_index, np.int16, write=True),
        _items(dataset_sample_index, np.int64, write=True),
    )
    return counts


def blend_exhaustive(
    sizes: NDArray[np.int64], dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64]
) -> None:
    """Fill the two indices, shape (sum of sizes,), see `index.blend.build_exhaustive_blend_index`."""
    total = sum(map(int, sizes))
    if not len(dataset_index) == len(dataset_sample_index) == total or not 0 < len(sizes) < 2**15 or min(sizes) < 0:
        raise ValueError(f"{len(sizes)} sizes of {total} in all, {len(dataset_index)} rows")
    scratch = np.empty((2, len(sizes)), np.float64)
    unspent = np.empty(len(sizes), np.int16)
    lib.binidx_blend_exhaustive(
        _items(sizes, np.int64),
        len(sizes),
        total,
        _items(scratch[0], np.float64, write=True),
        _items(scratch[1], np.float64, write=True),
        _items(unspent, np.int16, write=True),
        _items(dataset_index, np.int16, write=True),
        _items(dataset_sample_index, np.int64, write=True),
    )
