"""Rows of chat files as conversations: lists of messages, each with a role and a content.

    openai-messages   {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt          {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca, dolly     {"instruction": "...", "input": "...", "output": "..."}, and other names of these three
    pretrain-text     {"text": "..."}: no conversation, all of it is learnt

The first of these that fits a row is its schema.

Source: Megatron-LM, `varlen_dataset.py`, whose names, order and roles these are. It looks at the columns of the whole
file; here each row is looked at, so a file may mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from binidx.errors import FormatError

Message = Mapping[str, Any]
Row = Mapping[str, Any]
Conversation = list[Message]

INSTRUCTION = ("instruction", "prompt", "query", "question")
OUTPUT = ("output", "response", "completion", "answer")
CONTEXT = ("input", "context")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
"""Of the speakers of sharegpt; all others are users."""


def conversation_of(row: Row) -> Conversation | str:
    """The messages of a row, or the text of one that has only text.

    Raises:
        FormatError: it fits no schema, or what should be text is not.
    """
    for fits, read in SCHEMAS.values():
        if fits(row):
            return read(row)
    raise FormatError(
        f"found {', '.join(row) or 'nothing'}, needs messages, conversations, instruction and output, or text"
    )


def openai_messages(row: Row) -> Conversation:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
        raise FormatError("messages: needs a list of objects with role and content, at least one")
    return messages


def sharegpt(row: Row) -> Conversation:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise FormatError("conversations: needs a list of objects with from and value, at least one")
    roles = [ROLES.get(str(turn.get("from") or "").lower(), "user") for turn in turns]
    said = [_message(role, text_of(turn.get("value"), "value")) for role, turn in zip(roles, turns, strict=True)]
    return said if roles[0] == "system" else [_message("system", ""), *said]


def alpaca(row: Row) -> Conversation:
    instruction, context, output = (_first(row, names) for names in (INSTRUCTION, CONTEXT, OUTPUT))
    asked = f"{instruction}\n\n{context}" if context else instruction
    return [_message("system", ""), _message("user", asked), _message("assistant", output)]


def pretrain_text(row: Row) -> str:
    return text_of(row["text"], "text")


def with_system(messages: Conversation) -> Conversation:
    """Roles and contents only, and an empty system message first where there is none: as `VarlenDataset` wants them.

    Raises:
        FormatError: a content that is no text, such as parts of text and image.
    """
    plain = [_message(each.get("role") or "user", text_of(each.get("content"), "content")) for each in messages]
    return plain if plain[0]["role"] == "system" else [_message("system", ""), *plain]


def conversations_in(messages: Conversation) -> list[Conversation]:
    """Those that one row holds one after the other: each system message begins another."""
    found: list[Conversation] = []
    for message in messages:
        if not found or message["role"] == "system":
            found.append([])
        found[-1].append(message)
    return found


def text_of(value: Any, name: str) -> str:
    """A text; None is the empty one."""
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{name}: {type(value).__name__}, needs text")
    return value or ""


def _first(row: Row, names: Sequence[str]) -> str:
    return next((text for name in names if (text := text_of(row.get(name), name))), "")


def _is_message(thing: Any) -> bool:
    return isinstance(thing, dict) and isinstance(thing.get("role"), str)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _has(names: Sequence[str]) -> Callable[[Row], bool]:
    return lambda row: any(name in row for name in names)


SCHEMAS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], Conversation | str]]] = {
    "openai-messages": (_has(["messages"]), openai_messages),
    "sharegpt": (_has(["conversations"]), sharegpt),
    "alpaca": (lambda row: _has(INSTRUCTION)(row) and _has(OUTPUT)(row), alpaca),
    "pretrain-text": (_has(["text"]), pretrain_text),
}
"""By name: whether a row is of it, and how it is read."""
