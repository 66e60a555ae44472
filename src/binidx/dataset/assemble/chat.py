"""Conversations from the rows of chat files, and their tokens by a Hugging Face chat template.

    openai-messages   {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt          {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca, dolly     {"instruction": "...", "input": "...", "output": "..."}, and other names of these three
    pretrain-text     {"text": "..."}: not a conversation; all of it is trained on

The schema of a row is the first of these that fits. A conversation is a list of messages with a role and a content.

Source: Megatron-LM, `varlen_dataset.py`: its schemas, names, order and roles. Difference: it decides the schema by the
columns of the whole file; here each row is checked, so a file may mix schemas.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
"""Roles of the speakers of sharegpt rows; every other speaker is a user."""

IGNORE = -100
"""Target of tokens that are not trained on."""

RECORDED_NAME = "binidx.dataset.chat_tokenizer.ChatTokenizer"
"""Name of the class in the names of index caches; a subclass has its own."""

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def parse_row(row: Row) -> Conversation | str:
    """Return the messages of a row, or the text of a row that has only text.

    Raises:
        FormatError: the row fits no schema, or a value is not text.
    """
    if "messages" in row:
        return _parse_openai_messages(row["messages"])
    if "conversations" in row:
        return _parse_sharegpt(row["conversations"])
    if any(name in row for name in INSTRUCTION) and any(name in row for name in OUTPUT):
        return _parse_alpaca(row)
    if "text" in row:
        return check_text(row["text"], "text")
    raise FormatError(
        f"found {', '.join(row) or 'nothing'}, needs messages, conversations, instruction and output, or text"
    )


def _parse_openai_messages(messages: Any) -> Conversation:
    if not _is_list_of_objects(messages) or not all(isinstance(message.get("role"), str) for message in messages):
        raise FormatError("messages: needs a list of objects with role and content, at least one")
    return list(messages)


def _parse_sharegpt(turns: Any) -> Conversation:
    if not _is_list_of_objects(turns):
        raise FormatError("conversations: needs a list of objects with from and value, at least one")
    roles = [ROLES.get(str(turn.get("from") or "").lower(), "user") for turn in turns]
    messages = [_message(role, check_text(turn.get("value"), "value")) for role, turn in zip(roles, turns, strict=True)]
    return messages if roles[0] == "system" else [_message("system", ""), *messages]


def _parse_alpaca(row: Row) -> Conversation:
    instruction, context, output = (_first_text(row, names) for names in (INSTRUCTION, CONTEXT, OUTPUT))
    question = f"{instruction}\n\n{context}" if context else instruction
    return [_message("system", ""), _message("user", question), _message("assistant", output)]


def add_system_message(conversation: Conversation | str) -> Conversation | str:
    """Return a conversation of roles and contents that begins with a system message, if need be an empty one.

    A text is returned as it is.

    Raises:
        FormatError: a content is not text, such as a list of texts and images.
    """
    if isinstance(conversation, str):
        return conversation
    plain = [_message(turn.get("role") or "user", check_text(turn.get("content"), "content")) for turn in conversation]
    return plain if plain and plain[0]["role"] == "system" else [_message("system", ""), *plain]


def split_conversations(conversation: Conversation | str) -> list[Conversation | str]:
    """Return the conversations of a row: each system message begins a conversation; a text is one by itself."""
    if isinstance(conversation, str):
        return [conversation]
    starts = [number for number, message in enumerate(conversation) if number == 0 or message["role"] == "system"]
    return [conversation[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def check_text(value: Any, name: str) -> str:
    """Return the value of a row's field `name`, which must be text; "" for None.

    Raises:
        FormatError: the value is not text.
    """
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{name}: {type(value).__name__}, needs text")
    return value or ""


def _first_text(row: Row, names: Sequence[str]) -> str:
    return next((text for name in names if (text := check_text(row.get(name), name))), "")


def _is_list_of_objects(thing: Any) -> bool:
    return isinstance(thing, list) and bool(thing) and all(isinstance(item, dict) for item in thing)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class ChatTokenizer:
    """Hugging Face tokenizer with the methods that `SFTDataset`, `VarlenDataset` and the names of caches require.

        <user> hi <assistant> hello <end> <user> ...
                              -----------                    trained on: an answer and the end of its turn

    Where the template marks answers with {% generation %}, the marks decide. Otherwise the tokens up to each answer are
    compared with those of the whole conversation, so the template must render a conversation as its beginning plus the
    rest.

    Args:
        tokenizer: has `apply_chat_template`, `encode`, `eos_token_id`, `pad_token_id`, `name_or_path` and a length.
        chat_template: replaces the tokenizer's own template.

    Attributes:
        eod: id of the end of a conversation.
        pad: id of the pad, or None.
        vocab_size: number of ids.

    Raises:
        ConfigError: the tokenizer has no end of sequence, or there is no template.

    Example:
        >>> hugging_face = transformers.AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
        >>> config = binidx.SFTDatasetConfig(tokenizer=binidx.ChatTokenizer(hugging_face), ...)

    Source: ours; `tokenize_conversation` has the arguments of Megatron-LM's `SFTTokenizer`.
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
        """Identity of the tokenizer in the names of index caches."""
        kind = type(self)
        name = RECORDED_NAME if kind is ChatTokenizer else f"{kind.__module__}.{kind.__name__}"
        return OrderedDict([("class", name), ("tokenizer_path", [self.tokenizer.name_or_path])])

    def tokenize(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text, without special tokens.

        Args:
            text: any text.

        Returns:
            int64, shape (n,).
        """
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int64)

    def tokenize_conversation(
        self, conversation: Sequence[Message], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the tokens of a conversation and, on request, its targets.

        Args:
            conversation: messages with "role" and "content".
            return_target: also return targets.
            add_generation_prompt: end with the beginning of an answer.

        Returns:
            Tokens, int64, shape (n,). With `return_target` a pair of tokens and targets: -100 for tokens that are not
            the assistant's.

        Raises:
            ConfigError: the template neither marks answers nor renders conversations turn by turn.
        """
        if MARKS_ANSWERS.search(self.chat_template):
            rendered = self._apply(
                conversation, add_generation_prompt, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens, answers = (np.asarray(rendered[name], np.int64) for name in ("input_ids", "assistant_masks"))
        else:
            tokens = self._render(conversation, add_generation_prompt)
            answers = self._find_answers(conversation, tokens) if return_target else np.zeros(0, np.int64)
        return (tokens, np.where(answers == 1, tokens, IGNORE)) if return_target else tokens

    def _find_answers(self, conversation: Sequence[Message], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return 1 for the assistant's tokens, else 0, shape (n,)."""
        answers = np.zeros(len(tokens), np.int64)
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                first = self._count_tokens(conversation[:turn], tokens, True) if turn else 0
                answers[first : self._count_tokens(conversation[: turn + 1], tokens, False)] = 1
        return answers

    def _count_tokens(self, turns: Sequence[Message], tokens: NDArray[np.int64], add_generation_prompt: bool) -> int:
        """Return the number of tokens of the first turns of a conversation."""
        first = self._render(turns, add_generation_prompt)
        if not np.array_equal(tokens[: len(first)], first):
            raise ConfigError(
                f"{self.tokenizer.name_or_path}: by its chat template a conversation does not begin with the tokens of "
                f"its first {len(turns)} turns; mark the answers in the template with {{% generation %}}"
            )
        return len(first)

    def _render(self, conversation: Sequence[Message], add_generation_prompt: bool) -> NDArray[np.int64]:
        return np.asarray(self._apply(conversation, add_generation_prompt, return_dict=False), np.int64)

    def _apply(self, conversation: Sequence[Message], add_generation_prompt: bool, **options: Any) -> Any:
        options |= {"chat_template": self.chat_template, "add_generation_prompt": add_generation_prompt}
        return self.tokenizer.apply_chat_template([*conversation], tokenize=True, **options)
