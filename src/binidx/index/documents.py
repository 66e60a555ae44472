"""The documents of a split: numbers of stored sequences, as an array or, without any memory, as a range.

Work over all of them goes in windows of 1 MiB of numbers, each by itself, several threads at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import IndexBuildError

Documents = NDArray[np.int32] | range


Result = TypeVar("Result")


WINDOW = 2**18


def check_documents(documents: NDArray[Any] | range, *, signs: bool = True) -> None:
    """Raise IndexBuildError unless all are sequence numbers that int32 holds.

    `signs=False` leaves an int32 array to C, which refuses those below 0 when it looks their lengths up.
    """
    if not signs and not isinstance(documents, range) and documents.dtype == np.int32 and documents.ndim == 1:
        return
    if isinstance(documents, range):
        low, high = (min(documents[0], documents[-1]), max(documents[0], documents[-1])) if documents else (0, 0)
    elif documents.ndim != 1 or documents.dtype.kind not in "iu":
        raise IndexBuildError(f"documents: {documents.ndim}-D {documents.dtype}, needs 1-D integers")
    else:
        low, high = (int(documents.min()), int(documents.max())) if len(documents) else (0, 0)
    if low < 0 or high > np.iinfo(np.int32).max:
        raise IndexBuildError(f"documents: numbers from {low} to {high}, needs 0 to {np.iinfo(np.int32).max}")


def kept(documents: NDArray[np.int32] | range) -> Documents:
    """Few as an array; of more than WINDOW that follow each other only the ends."""
    if len(documents) > WINDOW:
        return documents if isinstance(documents, range) else compact(documents)
    if isinstance(documents, range):
        return np.arange(documents.start, documents.stop, documents.step, dtype=np.int32)
    return documents


def compact(documents: NDArray[Any]) -> Documents:
    """A range where the documents are one, so that the array can go; else what was given."""
    if not len(documents) or documents.dtype.kind not in "iu" or documents.ndim != 1:
        return documents
    whole = range(int(documents[0]), int(documents[0]) + len(documents))
    same = all((window(documents, first) == window(whole, first)).all() for first in windows(len(documents)))
    return whole if same and whole[-1] == documents[-1] else documents


def documents_digest(documents: NDArray[Any] | range) -> str:
    """XXH3 of their numbers as int32, in hex: the same for an array and its range."""
    digest = xxhash.xxh3_128()
    for first in windows(len(documents)):
        digest.update(window(documents, first).data)
    return digest.hexdigest()


def window(documents: NDArray[Any] | range, first: int) -> NDArray[np.int32]:
    """WINDOW of them from number `first` on, contiguous."""
    some = documents[first : first + WINDOW]
    if isinstance(some, range):
        return np.arange(some.start, some.stop, some.step, dtype=np.int32)
    return np.ascontiguousarray(some, np.int32)


def windows(count: int) -> range:
    """Where the windows of so many begin."""
    return range(0, count, WINDOW)


def fill(out: NDArray[Any], documents: NDArray[Any] | range, threads: int = 1) -> None:
    """`out[:] = documents`, without a copy of a range."""

    def put(first: int) -> None:
        some = documents[first : first + WINDOW]
        out[first : first + WINDOW] = np.arange(some.start, some.stop, some.step) if isinstance(some, range) else some

    map_windows(put, windows(len(documents)), threads)


def map_windows(work: Callable[[int], Result], windows: range, threads: int) -> list[Result]:
    """`work` of each window, in their order, so many at a time. The first one's error is raised."""
    if min(threads, len(windows)) <= 1:
        return [work(first) for first in windows]
    with ThreadPoolExecutor(threads, "binidx-index") as pool:
        return list(pool.map(work, windows))
