"""Columns for people, in terminals of any width."""

from __future__ import annotations

import pytest

from binidx.tools._display import MOST_ROWS, shortened, table

HEAD = ["source", "documents", "tokens"]
ROWS = [["s3://corpus/en", "1,200", "9,000,000"], ["s3://corpus/a-longer-name", "3", "1"]]


def test_columns_stand_side_by_side_where_there_is_room() -> None:
    assert table(HEAD, ROWS, 60).splitlines() == [
        "source                     documents     tokens",
        "s3://corpus/en                 1,200  9,000,000",
        "s3://corpus/a-longer-name          3          1",
    ]


def test_names_have_a_line_of_their_own_where_there_is_not() -> None:
    assert table(HEAD, ROWS, 30).splitlines() == [
        "source",
        "    documents     tokens",
        "s3://corpus/en",
        "        1,200  9,000,000",
        "s3://corpus/a-longer-name",
        "            3          1",
    ]


def test_where_nothing_fits_there_are_words() -> None:
    assert table(HEAD, ROWS[:1], 20).splitlines() == [
        "s3://corpus/en",
        "  documents 1,200,",
        "  tokens 9,000,000",
    ]


@pytest.mark.parametrize("width", [10, 20, 30, 60])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [[f"s3://corpus/{'x' * length}", "1", "2"] for length in range(40)]
    assert all(len(line) <= max(width, 12) for line in table(["source", "a", "b"], rows, width).splitlines())


def test_of_many_rows_the_rest_is_counted() -> None:
    rows = [[str(number), "1", "2"] for number in range(MOST_ROWS + 1000)]
    lines = table(HEAD, rows, 80).splitlines()
    assert len(lines) == MOST_ROWS + 2
    assert lines[-1] == "... and 1,000 more; --json has all"


def test_a_long_name_loses_its_middle() -> None:
    assert shortened("s3://corpus/en", 14) == "s3://corpus/en"
    assert shortened("s3://corpus/a-longer-name", 13) == "s3:/…ger-name"
