"""A Hugging Face tokenizer as chat samples want it: by its chat template, and learnt where the assistant speaks.

    <user> hi <assistant> hello <end> <user> ...
                          -----------                    learnt: from what begins an answer, to the end of its turn

Where the template marks answers with {% generation %}, its marks count. Else the tokens up to each answer are compared
with those of the whole, so the template must write a conversation as its beginning and then more.

Source: ours; `tokenize_conversation` is the method of Megatron's SFTTokenizer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.packing import IGNORE
from binidx.errors import ConfigError

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
