"""What became of each index that a process asked for, told to who wants to hear of it: `binidx prepare-cache`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from binidx.index.files import IndexFiles

FOUND, TAKEN_OVER, BUILT, NOT_KEPT = "found", "taken over", "built", "not kept"


@dataclass(frozen=True)
class Outcome:
    """One index.

    files: where it lies, or would.
    how: FOUND there, also when another process has just built it; TAKEN_OVER from an index of the same order; BUILT;
        NOT_KEPT, since it is built sooner than fetched.
    seconds: until its arrays were here, waiting for other processes included.
    """

    files: IndexFiles
    how: str
    seconds: float


Hear = Callable[[Outcome], None]


@contextlib.contextmanager
def hearing(hear: Hear) -> Iterator[None]:
    """While the block runs, `hear` is called for each index; by any thread."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)


def tell(make: Callable[[], Outcome]) -> None:
    """Tell of an index; made only where somebody hears."""
    for hear in tuple(_hearers):
        hear(make())


_hearers: list[Hear] = []
