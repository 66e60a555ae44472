"""The disk is asked ahead while it has to move, and no longer: by the rule, and by a real file that is cold or warm."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from binidx.native.arguments import WARM_READS, AskAhead
from binidx.native.gpt_samples import GPTIndex, Recipe, Sequences, TextRows
from binidx.storage.stores.local import LocalFile


def rounds(cold: AskAhead, reads: list[bool]) -> list[bool]:
    """What is wanted before each read, `reads` saying whether the disk moves for it."""
    wanted = []
    for moved in reads:
        wanted.append(cold.wanted)
        cold.saw(moved)
    return wanted


def test_it_asks_until_enough_reads_were_warm_and_again_after_a_cold_one() -> None:
    cold, warm = [True], [False]
    reads = 3 * cold + WARM_READS * warm + 5 * warm + cold + warm
    assert rounds(AskAhead(), reads) == (3 + WARM_READS) * [True] + 6 * [False] + [True]


def test_where_asking_hides_the_cold_it_hardly_ever_goes_without() -> None:
    """A filesystem that does not count pages read ahead: only a read that did not ask is seen to wait."""
    asks, without = AskAhead(), 0
    for _ in range(20_000):
        without += not asks.wanted
        asks.saw(not asks.wanted)
    assert without <= 20_000 // WARM_READS


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_batch(reader: LocalFile, orders: GPTIndex, number: int) -> bool:
    """Read 8 documents; whether the disk was asked ahead for them."""
    asked = reader._ask_ahead.wanted
    rows = TextRows(Recipe(1024, pad=0, add_extra_token=False), 8)
    served = [(8 * number + i) * 37 % 4000 for i in range(8)]
    reader.read_into(lambda about: rows.read(orders, about, served, range(8)))
    assert rows.text[:, 0].tolist() == served
    return asked


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
@pytest.mark.parametrize("trusted", [False, True])
def test_a_cold_file_is_asked_ahead_for_until_it_is_warm(tmp_path: Path, trusted: bool) -> None:
    path = tmp_path / "en.bin"
    stored = np.zeros((4001, 1024), np.uint16)
    stored[:, 0] = np.arange(4001)
    path.write_bytes(stored.tobytes())
    lengths = np.full(4001, 1024, np.int32)
    sequences = Sequences(lengths, np.arange(4001) * 2048, dtype_code=8, item_bytes=2)
    starts = np.stack([np.arange(4001), np.zeros(4001, np.int64)], axis=1)
    orders = GPTIndex(np.arange(4000), starts, np.arange(4001, dtype=np.int32), sequences, add_extra_token=False)
    drop_pages(path)
    reader = LocalFile(path)
    reader._ask_ahead.warm_reads = WARM_READS - (not trusted)
    assert one_batch(reader, orders, 0) is not trusted
    if not reader._ask_ahead.wanted:
        pytest.skip("this filesystem has no disk, or keeps what it is told to drop")
    assert path.read_bytes() == stored.tobytes()  # all of it is warm now
    asked = [one_batch(reader, orders, number) for number in range(1, WARM_READS + 6)]
    assert asked == WARM_READS * [True] + 5 * [False]
