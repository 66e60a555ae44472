"""Documents of a split, and the arrays of an index: allocated, filled from documents, and checked.

Documents are numbers of stored sequences, as an array or, without any memory, as a range. Work over all of them is done
in windows of 1 MiB of numbers, several threads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.errors import IndexBuildError
from binidx.storage.threads import CPU

Documents = NDArray[np.int32] | range
Result = TypeVar("Result")

WINDOW = 2**18


class ArrayAllocator(Protocol):
    """Provider of the arrays of an index for the function that fills them: in memory, or in their final files.

    Implemented by `index.cache.array_writer.ArrayWriter`.
    """

    def array(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike, *, in_order: bool = True
    ) -> AbstractContextManager[NDArray[Any]]:
        """Return a context manager of a new array, which is complete at the end of the block.

        Args:
            name: of the array within its index.
            shape, dtype: of the array; its content is undefined.
            in_order: whether it is filled from one end to the other; False: at random places, several times.
        """


FEWER_SAMPLES = "request fewer samples (sizes and num_samples count samples of sequence_length tokens, not tokens)"


def new_array(name: str, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array in memory; raise IndexBuildError, which begins with `name`, if it does not fit."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # the latter: more bytes than an address can count
        needed = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
        raise IndexBuildError(f"{name}: does not fit in memory (needs {needed:,} bytes); {FEWER_SAMPLES}") from error


def out_or_empty(out: NDArray[Any] | None, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return `out`, or a new array if it is None.

    Args:
        out: array to fill; None for a new one.
        shape, dtype: needed ones.

    Raises:
        IndexBuildError: `out` is not contiguous or has another shape or dtype.
    """
    if out is None:
        return new_array("index", shape, dtype)
    needed = shape if isinstance(shape, tuple) else (shape,)
    if out.shape != needed or out.dtype != dtype or not out.flags.c_contiguous:
        found = f"shape {out.shape} of {out.dtype}"
        raise IndexBuildError(f"out: found {found}, need contiguous {needed} of {np.dtype(dtype)}")
    return out


def check_array(name: str, array: NDArray[Any], dtypes: Sequence[type], dimensions: int) -> None:
    """Raise ValueError unless an array has one of the dtypes, and this number of dimensions."""
    if array.dtype not in dtypes or array.ndim != dimensions:
        needed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name}: found {array.ndim}-D {array.dtype}, need {dimensions}-D {needed}")


def check_within(name: str, values: NDArray[Any], low: int, high: int) -> None:
    """Raise ValueError unless all values are from `low` to `high`."""
    found = int(values.min()), int(values.max())
    if found[0] < low or found[1] > high:
        raise ValueError(f"{name}: found {found[0]} to {found[1]}, need {low} to {high}")


def check_documents(documents: NDArray[Any] | range, *, signs: bool = True) -> None:
    """Raise IndexBuildError unless all documents are sequence numbers that int32 holds.

    Args:
        documents: shape (num_documents,).
        signs: False does not check an int32 array; the C functions raise if it has negative numbers.
    """
    if isinstance(documents, range):
        low, high = (min(documents[0], documents[-1]), max(documents[0], documents[-1])) if documents else (0, 0)
    elif documents.ndim != 1 or documents.dtype.kind not in "iu":
        raise IndexBuildError(f"documents: found {documents.ndim}-D {documents.dtype}, need 1-D integers")
    elif not signs and documents.dtype == np.int32:
        return
    else:
        low, high = (int(documents.min()), int(documents.max())) if len(documents) else (0, 0)
    if low < 0 or high > np.iinfo(np.int32).max:
        raise IndexBuildError(f"documents: found numbers from {low} to {high}, need 0 to {np.iinfo(np.int32).max}")


def compact_documents(documents: NDArray[np.int32] | range) -> Documents:
    """Return documents in the form that datasets store: a range, or an array that is small or of other numbers."""
    return as_range(documents) if isinstance(documents, np.ndarray) and len(documents) > WINDOW else documents


def as_array(documents: Documents) -> NDArray[np.int32]:
    """Return documents as an array, shape (n,); a new one of a range."""
    if isinstance(documents, range):
        return np.arange(documents.start, documents.stop, dtype=np.int32)
    return documents


def as_range(documents: NDArray[Any]) -> Documents:
    """Return the range of consecutive documents, so that their array can be freed; other documents as they are."""
    if not len(documents) or documents.dtype.kind not in "iu" or documents.ndim != 1:
        return documents
    whole = range(int(documents[0]), int(documents[0]) + len(documents))
    same = all((get_window(documents, first) == get_window(whole, first)).all() for first in windows(len(documents)))
    return whole if same and whole[-1] == documents[-1] else documents


def documents_digest(documents: NDArray[Any] | range) -> str:
    """Return the XXH3 hash of document numbers as int32, in hex: the same for an array and an equal range."""
    digest = xxhash.xxh3_128()
    for first in windows(len(documents)):
        digest.update(get_window(documents, first).data)
    return digest.hexdigest()


def get_window(documents: NDArray[Any] | range, first: int) -> NDArray[np.int32]:
    """Return up to WINDOW documents from position `first` on, as a contiguous array.

    Args:
        documents: shape (num_documents,).
        first: position of the first of them.
    """
    part = documents[first : first + WINDOW]
    if isinstance(part, range):
        return np.arange(part.start, part.stop, part.step, dtype=np.int32)
    return np.ascontiguousarray(part, np.int32)


def windows(count: int) -> range:
    """Return the first position of each window of `count` documents."""
    return range(0, count, WINDOW)


def fill_numbers(out: NDArray[Any], numbers: NDArray[Any] | range, threads: int = 1) -> None:
    """Do `out[:] = numbers`; a range is not made an array first.

    Args:
        out: shape (n,), of any dtype that holds the numbers.
        numbers: shape (n,).
        threads: number of windows that are written at once.
    """

    def fill_window(first: int) -> None:
        part = numbers[first : first + WINDOW]
        out[first : first + WINDOW] = np.arange(part.start, part.stop, part.step) if isinstance(part, range) else part

    map_windows(fill_window, windows(len(numbers)), threads)


def map_windows(work: Callable[[int], Result], windows: range, threads: int) -> list[Result]:
    """Return the result of `work` for each window, in order; `threads` windows are worked on at once.

    Args:
        work: function of the first position of a window.
        windows: first positions, as `windows` returns them.
        threads: number of threads.

    Raises:
        The error of the first window that failed.
    """
    if min(threads, len(windows)) <= 1:
        return [work(first) for first in windows]
    with CPU.executor(threads) as pool:
        return list(pool.map(work, windows))


def split_range(bookends: tuple[float, float], num_elements: int) -> range:
    """Return the elements of one split as a range: an array of 300 million numbers takes 1.2 GB.

    Args:
        bookends: start and end of the split, from 0 to 1.
        num_elements: number of elements of all splits.
    """
    begin, end = (round(edge * float(num_elements)) for edge in bookends)
    return range(begin, end)
