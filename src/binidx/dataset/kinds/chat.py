"""Rows of chat files as conversations: lists of messages, each with a role and a content.

    openai-messages   {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt          {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca, dolly     {"instruction": "...", "input": "...", "output": "..."}, and other names of these three
    pretrain-text     {"text": "..."}: no conversation, all of it is learnt

The first of these that fits a row is its schema.

Source: Megatron-LM, `varlen_dataset.py`, whose names, order and roles these are. It looks at the columns of the whole
file; here each row is looked at, so a file may mix them.

A Hugging Face tokenizer as chat samples want it: by its chat template, and learnt where the assistant speaks.

    <user> hi <assistant> hello <end> <user> ...
                          -----------                    learnt: from what begins an answer, to the end of its turn

Where the template marks answers with {% generation %}, its marks count. Else the tokens up to each answer are compared
with those of the whole, so the template must write a conversation as its beginning and then more.

Source: ours; `tokenize_conversation` is the method of Megatron's SFTTokenizer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError

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


RECORDED_NAME = "binidx.dataset.chat_tokenizer.ChatTokenizer"


"""In the names of index caches, wherever the class is defined; a subclass has its own."""


MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """What `SFTDataset`, `VarlenDataset` and the names of caches ask of a tokenizer.

    Args:
        tokenizer: has `apply_chat_template`, `encode`, `eos_token_id`, `pad_token_id`, `name_or_path` and a length.
        chat_template: instead of the tokenizer's own.

    Raises:
        ConfigError: it has no end of sequence, or no template.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not isinstance(self.chat_template, str):
            raise ConfigError(f"{name}: has no chat template; give chat_template=")
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{name}: has no eos_token, which ends each conversation")
        self.eod, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.vocab_size = len(tokenizer)

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        kind = type(self)
        name = RECORDED_NAME if kind is ChatTokenizer else f"{kind.__module__}.{kind.__name__}"
        return OrderedDict([("class", name), ("tokenizer_path", [self.tokenizer.name_or_path])])

    def tokenize(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int64)

    def tokenize_conversation(
        self, conversation: Sequence[Mapping[str, Any]], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """Tokens, and with `return_target` the same with IGNORE for all that the assistant does not say.

        Raises:
            ConfigError: the template neither marks answers nor writes them one after the other.
        """
        if MARKED.search(self.chat_template):
            found = self._apply(
                conversation, add_generation_prompt, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens, answers = (np.asarray(found[name], np.int64) for name in ("input_ids", "assistant_masks"))
        else:
            tokens = self._tokens(conversation, add_generation_prompt)
            answers = self._answers(conversation, tokens) if return_target else np.zeros(0, np.int64)
        return (tokens, np.where(answers == 1, tokens, IGNORE)) if return_target else tokens

    def _answers(self, conversation: Sequence[Mapping[str, Any]], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        said = np.zeros(len(tokens), np.int64)
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                first = len(self._beginning(conversation[:turn], tokens, True)) if turn else 0
                said[first : len(self._beginning(conversation[: turn + 1], tokens, False))] = 1
        return said

    def _beginning(self, turns: Sequence[Mapping[str, Any]], tokens: NDArray[np.int64], ask: bool) -> NDArray[np.int64]:
        found = self._tokens(turns, ask)
        if not np.array_equal(tokens[: len(found)], found):
            raise ConfigError(
                f"{self.tokenizer.name_or_path}: by its chat template a conversation does not begin with the tokens of "
                f"its first {len(turns)} turns; mark the answers in the template with {{% generation %}}"
            )
        return found

    def _tokens(self, conversation: Sequence[Mapping[str, Any]], ask: bool) -> NDArray[np.int64]:
        return np.asarray(self._apply(conversation, ask, return_dict=False), np.int64)

    def _apply(self, conversation: Sequence[Mapping[str, Any]], ask: bool, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            [*conversation],
            tokenize=True,
            add_generation_prompt=ask,
            chat_template=self.chat_template,
            **options,
        )


IGNORE = -100
