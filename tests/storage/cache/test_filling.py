"""Filling of a disk cache: which extents are chosen, who fetches them, and what a failure leaves."""

from __future__ import annotations

import numpy as np
import pytest

from binidx.storage.cache.filling import PAYING_SHARE, ExtentUses, choose_extents, paying_share


def uses(*rows: tuple[float, int, int]) -> ExtentUses:
    """Extents of 100 bytes of one object, each with (bytes read, first step, last step)."""
    used, first, last = (np.array(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return ExtentUses(np.zeros(count, np.int64), np.arange(count), np.full(count, 100), used.astype(float), first, last)


def test_extents_that_pay_are_chosen_in_the_order_of_their_first_need() -> None:
    read = uses((50, 7, 9), (0.5, 0, 9), (20, 3, 9), (0, 10**9, -1), (300, 5, 9))
    assert choose_extents(read, 0.01, 1e9, step=0).tolist() == [2, 4, 0]
    assert choose_extents(read, 0.4, 1e9, step=0).tolist() == [4, 0]
    assert choose_extents(read, 0.0, 1e9, step=0).tolist() == [1, 2, 4, 0]


def test_the_most_used_extents_get_the_room() -> None:
    read = uses((50, 1, 9), (20, 2, 9), (80, 3, 9))
    assert choose_extents(read, 0.01, 200, step=0).tolist() == [0, 2]
    assert choose_extents(read, 0.01, 99, step=0).tolist() == []


def test_extents_without_a_later_step_give_their_room_to_others() -> None:
    read = uses((90, 0, 4), (80, 0, 9), (10, 6, 9))
    assert choose_extents(read, 0.01, 200, step=4).tolist() == [0, 1]
    assert choose_extents(read, 0.01, 200, step=5).tolist() == [1, 2]


@pytest.mark.parametrize(("ranges", "extents", "share"), [(0, 5, PAYING_SHARE), (5, 0, PAYING_SHARE), (2.6, 260, 0.01)])
def test_an_extent_pays_above_the_ratio_of_the_rates(ranges: float, extents: float, share: float) -> None:
    assert paying_share(ranges, extents) == share
