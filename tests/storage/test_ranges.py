"""coalesce and assemble against slices of a short object; every byte can be counted by eye."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import ShortReadError
from binidx.storage.interfaces import Range
from binidx.storage.ranges import assemble, check_ranges, coalesce, cut

OBJECT = bytes(range(200))

ranges = st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda each: (each[0], min(sum(each), 200)))
lists_of_ranges = st.lists(ranges, max_size=12)
gaps = st.integers(0, 30)
limits = st.integers(1, 100)


def bytes_of(requests: list[Range]) -> list[int]:
    return [byte for start, stop in requests for byte in range(start, stop)]


@given(lists_of_ranges, gaps, limits)
def test_requests_cover_each_byte_once_and_in_order(asked: list[Range], gap: int, limit: int) -> None:
    fetched = bytes_of(coalesce(asked, max_gap=gap, max_request=limit))
    assert fetched == sorted(set(fetched))
    assert set(fetched) >= set(bytes_of(asked))


@given(lists_of_ranges, gaps, limits)
def test_no_request_is_empty_or_over_one_and_a_half_limits(asked: list[Range], gap: int, limit: int) -> None:
    for start, stop in coalesce(asked, max_gap=gap, max_request=limit):
        assert 0 < stop - start < 1.5 * limit
        assert stop - start <= limit or stop in {end for _, end in asked}


@given(lists_of_ranges, gaps, limits)
def test_only_gaps_up_to_the_limit_are_fetched_in_vain(asked: list[Range], gap: int, limit: int) -> None:
    needed = set(bytes_of(asked))
    unasked = set(bytes_of(coalesce(asked, max_gap=gap, max_request=limit))) - needed
    for byte in unasked:
        before = max(each for each in needed if each < byte)
        after = min(each for each in needed if each > byte)
        assert after - before - 1 <= gap


@given(lists_of_ranges, gaps, limits)
def test_assembled_views_are_the_slices_asked(asked: list[Range], gap: int, limit: int) -> None:
    requests = coalesce(asked, max_gap=gap, max_request=limit)
    answers = [OBJECT[start:stop] for start, stop in requests]
    assert [bytes(view) for view in assemble(asked, requests, answers)] == [OBJECT[i:j] for i, j in asked]


@given(lists_of_ranges, limits)
def test_without_a_gap_nothing_is_fetched_in_vain(asked: list[Range], limit: int) -> None:
    fetched = bytes_of(coalesce(asked, max_gap=0, max_request=limit))
    assert set(fetched) == set(bytes_of(asked))


@pytest.mark.parametrize(
    ("asked", "gap", "limit", "needed"),
    [
        ([], 9, 99, []),
        ([(5, 5), (7, 7)], 9, 99, []),
        ([(40, 50), (0, 10), (12, 20), (44, 60)], 2, 100, [(0, 20), (40, 60)]),
        ([(0, 10), (12, 20)], 1, 100, [(0, 10), (12, 20)]),
        ([(0, 10), (10, 20)], 0, 100, [(0, 20)]),
        ([(0, 10), (10, 20)], 0, 15, [(0, 10), (10, 20)]),
        ([(3, 9), (3, 9), (4, 5)], 0, 100, [(3, 9)]),
        ([(0, 25)], 0, 10, [(0, 10), (10, 20), (20, 25)]),
        ([(0, 8), (4, 12), (11, 30)], 0, 10, [(0, 10), (10, 20), (20, 30)]),
    ],
)
def test_coalesce_by_hand(asked: list[Range], gap: int, limit: int, needed: list[Range]) -> None:
    assert coalesce(asked, max_gap=gap, max_request=limit) == needed


def test_a_range_inside_one_answer_is_a_view_of_it() -> None:
    answer = bytearray(OBJECT)
    (view,) = assemble([(10, 20)], [(0, 200)], [answer])
    answer[10] = 99
    assert view[0] == 99
    assert view.readonly


def test_cut_ends_in_a_shorter_part() -> None:
    assert cut((5, 26), 10) == [(5, 15), (15, 25), (25, 26)]


@pytest.mark.parametrize(("stop", "needed"), [(5, []), (7, [5]), (19, [5]), (20, [5, 15]), (34, [5, 15, 25])])
def test_a_short_end_is_no_request_of_its_own(stop: int, needed: list[int]) -> None:
    found = cut((5, stop), 10, 5)
    assert [start for start, _ in found] == needed
    assert bytes_of(found) == list(range(5, stop))


@pytest.mark.parametrize("outside", [(0, 201), (200, 201), (201, 201), (-1, 5), (9, 8)])
def test_ranges_outside_the_object_are_named(outside: Range) -> None:
    with pytest.raises(ShortReadError, match=rf"^s3://b/k: bytes {outside[0]}-{outside[1]} requested, it has 200$"):
        check_ranges("s3://b/k", 200, [(0, 200), outside])
