"""Conversions that are killed at a numbered event; event 0 never comes.

    python -m helpers.convert_crash SOURCE PART_BYTES TARGET EVENT [TARGET EVENT ...]

Each attempt is a forked child that ends, as by kill -9, when it is told of its n-th event: a part sent or read back, or
the start of a stage. CODEC in the environment says how the tokens are to be stored. Prints the exit status of each: 9
died, 0 came to its end. After each the target must be either no dataset or the whole one.
"""

from __future__ import annotations

import os
import sys

from binidx.corpus import token_parts
from binidx.corpus.block_digests import same_content
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.format.bin_file import open_bin
from binidx.format.indexed_dataset import IndexedDataset
from binidx.jobs.progress import SilentWatcher
from binidx.storage.location import Location
from binidx.storage.open import open_object


class Dying:
    """A Watch that ends the process at one event."""

    def __init__(self, event: int) -> None:
        self.left = event

    def begin(self, what: str, *counts: object) -> None:
        self.advance(0)

    def advance(self, count: int) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(9)

    def say(self, message: str) -> None:
        self.advance(0)


def attempt(source: str, part_bytes: int, target: str, event: int) -> int:
    child = os.fork()
    if child == 0:
        way = StorageFormat(os.environ.get("CODEC"))
        convert_dataset(source, target, way=way, part_bytes=part_bytes, watch=Dying(event))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(source: str, target: str) -> None:
    """AssertionError if the target is a dataset, but not the source."""
    if IndexedDataset.exists(target):
        assert same_content(open_object(source + ".idx"), open_object(target + ".idx"), SilentWatcher())
        assert same_content(open_bin(Location.of(source)), open_bin(Location.of(target)), SilentWatcher())


if __name__ == "__main__":
    source, part_bytes, *attempts = sys.argv[1:]
    token_parts.LEAST_BYTES = int(part_bytes)
    for target, event in zip(attempts[::2], attempts[1::2], strict=True):
        print(attempt(source, int(part_bytes), target, int(event)), end="", flush=True)
        if target.startswith("/"):  # a client made here, before the next fork, would be of no use after it
            check(source, target)
