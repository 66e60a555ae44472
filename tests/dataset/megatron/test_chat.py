"""Rows of chat files as conversations: the schemas of Megatron-LM, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from binidx.dataset.assemble.chat import add_system_message, parse_row, split_conversations
from binidx.errors import FormatError


def turns(*said: str) -> list[dict[str, str]]:
    """ "u:hi" is a user who says hi."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[each[0]], "content": each[2:]} for each in said]


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"messages": turns("u:hi", "a:hello"), "text": "no"}, turns("u:hi", "a:hello")),
        (
            {"conversations": [{"from": f, "value": f} for f in ("Human", "gpt", "observation", "bard", "someone")]},
            turns("s:", "u:Human", "a:gpt", "t:observation", "a:bard", "u:someone"),
        ),
        ({"conversations": [{"from": "system", "value": None}]}, turns("s:")),
        ({"instruction": "add", "input": "1 2", "output": "3"}, turns("s:", "u:add\n\n1 2", "a:3")),
        ({"instruction": "", "question": "why", "answer": "so", "context": ""}, turns("s:", "u:why", "a:so")),
        ({"text": "all", "instruction": "no output"}, "all"),
        ({"text": None}, ""),
    ],
)  # fmt: skip
def test_a_row_is_of_the_first_schema_that_fits(row: Any, needed: Any) -> None:
    assert parse_row(row) == needed


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"a": 1, "b": 2}, "found a, b, needs messages, conversations"),
        ({}, "found nothing, needs"),
        ({"messages": "hi"}, "messages: needs a list of objects with role and content"),
        ({"messages": [{"content": "hi"}]}, "messages: needs a list"),
        ({"conversations": []}, "conversations: needs a list"),
        ({"prompt": ["hi"], "response": "x"}, "prompt: list, needs text"),
        ({"text": 3}, "text: int, needs text"),
    ],
)
def test_rows_that_fit_no_schema_are_errors_with_their_fields(row: Any, needed: str) -> None:
    with pytest.raises(FormatError, match=needed):
        parse_row(row)


def test_each_system_message_begins_a_conversation() -> None:
    assert split_conversations(turns("s:1", "u:a", "a:b", "s:2", "s:3", "u:c")) == [
        turns("s:1", "u:a", "a:b"),
        turns("s:2"),
        turns("s:3", "u:c"),
    ]
    assert split_conversations(turns("u:a", "s:1")) == [turns("u:a"), turns("s:1")]


def test_fields_unknown_to_templates_are_left_out() -> None:
    assert add_system_message([{"role": "", "content": None, "name": "x"}]) == turns("s:", "u:")
    assert add_system_message([*turns("s:be brief")]) == turns("s:be brief")
