"""Chat files, tokenizers for them, and Megatron-LM's packing of conversations by its rule, in lists."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

IGNORE = -100
ROLE_TOKENS = {"system": 1, "user": 2, "assistant": 3, "tool": 4}


class Speaker:
    """A tokenizer of letters with a token before each turn; as Megatron's SFTTokenizer, the assistant's are targets.

    With `ends` it ends each conversation with an EOD.
    """

    def __init__(self, eod: int = 5, pad: int | None = 6, ends: bool = False) -> None:
        self.eod, self.pad, self.vocab_size, self.ends = eod, pad, 1000, ends

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([("class", "chats.Speaker")])

    def tokenize(self, text: str) -> list[int]:
        return [10 + ord(letter) for letter in text]

    def tokenize_conversation(
        self, conversation: Any, return_target: bool, add_generation_prompt: bool
    ) -> tuple[Any, Any]:
        assert return_target
        assert not add_generation_prompt
        tokens: list[int] = []
        targets: list[int] = []
        for turn in conversation:
            said = self.tokenize(turn["content"])
            tokens += [ROLE_TOKENS[turn["role"]], *said]
            targets += [IGNORE, *(said if turn["role"] == "assistant" else [IGNORE] * len(said))]
        if self.ends:
            tokens.append(self.eod)
            targets.append(self.eod)
        return np.array(tokens), np.array(targets)


def conversation(rng: np.random.Generator, turns: int = 2, longest: int = 12) -> list[dict[str, str]]:
    """A system message, then users and assistants in turn."""
    roles = ["system", *(["user", "assistant"] * turns)]
    letters = [chr(97 + int(each)) for each in rng.integers(0, 26, 40)]
    return [{"role": role, "content": "".join(letters[: rng.integers(1, longest)])} for role in roles]


def random_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows of one to four conversations."""
    rng = np.random.default_rng(seed)
    return [
        {"messages": [m for _ in range(rng.integers(1, 5)) for m in conversation(rng, int(rng.integers(1, 3)))]}
        for _ in range(count)
    ]


def write_rows(uri: str, rows: Iterable[Any]) -> str:
    with create_object(Location.of(uri)) as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    return uri


def packed_as_megatron(
    row: dict[str, Any], tokenizer: Speaker, length: int, multiple: int, version: str = "main"
) -> dict[str, Any]:
    """Source: NVIDIA/Megatron-LM at d98e8a64, `SFTDataset.__getitem__`, for a pad that is no other token.

    In core_v0.16.1 each conversation ends with an EOD, and there are as many bounds as conversations, and one more.
    """
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    starts = [i for i, message in enumerate(row["messages"]) if message["role"] == "system"]
    bounds = [0]
    for start, stop in pairwise([*starts, len(row["messages"])]):
        said, learnt = tokenizer.tokenize_conversation(row["messages"][start:stop], True, False)
        end = [tokenizer.eod] if version == "0.16.1" and said[-1] != tokenizer.eod else []
        tokens += [*said.tolist(), *end]
        targets += [*learnt.tolist(), *end]
        positions += range(len(said) + len(end))
        while len(tokens) % multiple:
            tokens.append(tokenizer.pad)  # type: ignore[arg-type]
            targets.append(tokenizer.pad)  # type: ignore[arg-type]
            positions.append(positions[-1] + 1)
        bounds.append(len(tokens))
        if len(tokens) >= length + 1:
            tokens = [*tokens[:length], tokenizer.pad]  # type: ignore[list-item]
            targets = [*targets[:length], tokenizer.pad]  # type: ignore[list-item]
            positions = positions[: length + 1]
            break
    while len(tokens) < length + 1:
        tokens.append(tokenizer.pad)  # type: ignore[arg-type]
        targets.append(tokenizer.pad)  # type: ignore[arg-type]
        positions.append(positions[-1] + 1)
    bounds[-1] = length
    labels = np.array(targets[1:], np.int64)
    max_seqlen = np.diff(np.array(bounds, np.int32)).max()
    if version == "main":
        bounds += [length] * (length + 1 - len(bounds))
    return {
        "tokens": np.array(tokens[:-1], np.int64),
        "labels": labels,
        "loss_mask": ((labels != tokenizer.pad) & (labels != IGNORE)).astype(np.float32),
        "position_ids": np.array(positions[:length], np.int64),
        "cu_seqlens": np.array(bounds, np.int32),
        "max_seqlen": max_seqlen,
    }
