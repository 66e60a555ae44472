"""Samples of chat files: the conversations of a row, tokenized on access and packed into S tokens.

    sample i  ─►  row indices[i mod n] of the file  ─►  conversations  ─ chat template ─►  tokens and targets
              ─►  packed into S tokens, with cu_seqlens, the bounds that attention stays within

    conversation      A A A A A E B B B E  C C C E            as the tokenizer ends it
    padded            A A A A A E B B B E p p C C C E         to a multiple of tokens that context parallel ranks share
    row of S + 1      A A A A A E B B B E p p C C C E p p     truncated or padded at the end
    cu_seqlens        0           6           12            S S S ... S       S + 1 numbers

Source: Megatron-LM, `SFTDataset`, `SFTLowLevelDataset`: the last sequence includes the pads at the end; one that would
begin beyond S is empty; the label of a truncated row is a pad. 0.16 appends an EOD that the tokenizer left out; 0.16 to
0.18 have one bound a sequence. A text, which neither takes, ends with an EOD.

The schema of a row is the first of these that fits. A conversation is a list of messages with a role and a content.

    openai-messages   {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt          {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca, dolly     {"instruction": "...", "input": "...", "output": "..."}, and other names of these three
    pretrain-text     {"text": "..."}: not a conversation; all of it is trained on

Source: Megatron-LM, `varlen_dataset.py`: its schemas, names, order and roles. Difference: it decides the schema by the
columns of the whole file; here each row is checked, so a file may mix schemas.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.config import GPTDatasetConfig, find_token, padding_multiple
from binidx.dataset.megatron_releases import Rule, follows
from binidx.dataset.token_dataset import SampleAssemble
from binidx.dataset.tokens.json_lines import JsonLines
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError, FormatError
from binidx.order.order_protocols import Numbers

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
"""Name of the class in the names of indices; a subclass has its own."""

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
        >>> config = binidx.megatron.SFTDatasetConfig(tokenizer=binidx.megatron.ChatTokenizer(hugging_face), ...)

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
        """Identity of the tokenizer in the names of indices."""
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


Ids = NDArray[np.int64]
Tokenized = tuple[Ids, Ids]
"""Tokens, and their targets: the same, or IGNORE where a token is not trained on."""


def pack_conversations(
    conversations: Iterable[Tokenized], sequence_length: int, *, pad: int, multiple: int = 1
) -> tuple[Ids, Ids, NDArray[np.bool_], NDArray[np.int32]]:
    """Pack conversations into one row, up to the first that does not fit, which is truncated.

    Args:
        conversations: tokens and targets of each, at least one; those beyond the end of the row are not consumed.
        sequence_length: number of tokens of the row, S.
        pad: id of pads.
        multiple: number of which the length of each sequence is a multiple, except for the last, which ends at S.

    Returns:
        Tokens and targets, shape (2, S + 1); the position of each token in its sequence, shape (S,); False at added
        pads, else True, shape (S + 1,); the start of each sequence, then S, shape (n + 1,).
    """
    lines = np.full((2, sequence_length + 1), pad, np.int64)
    is_real = np.zeros(sequence_length + 1, np.bool_)
    positions, bounds = np.zeros(sequence_length, np.int64), [0]
    for conversation in conversations:
        first, both = bounds[-1], np.stack(conversation)
        fitting = both[:, : sequence_length - first]
        lines[:, first : first + fitting.shape[1]] = fitting
        is_real[first : first + fitting.shape[1]] = True
        positions[first:] = np.arange(sequence_length - first)
        bounds.append(first + round_up(both.shape[1], multiple))
        if bounds[-1] > sequence_length:
            break
    bounds[-1] = sequence_length
    return lines, positions, is_real, np.array(bounds, np.int32)


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def append_eod(tokens: Ids, targets: Ids, eod: int) -> Tokenized:
    """Return tokens and targets with an EOD at the end; an appended one is trained on.

    Args:
        tokens, targets: of a conversation, shape (n,), int64.
        eod: the id to append, unless it is the last token already.
    """
    if len(tokens) and tokens[-1] == eod:
        return tokens, targets
    return np.append(tokens, eod), np.append(targets, eod)


@dataclass(repr=False)
class SFTDatasetConfig(GPTDatasetConfig):
    """Config of chat samples with one more option; a plain `GPTDatasetConfig` is enough without it.

    Args:
        shuffle: serve the rows of each epoch in another order, a function of (random_seed, epoch). By default rows are
            served in the order of the file, as in Megatron-LM, and a "cyclic" loader shuffles them.

    The other arguments are those of `GPTDatasetConfig`; `tokenizer` is described at `SFTDataset`.

    Source: ours.
    """

    shuffle: bool = field(default=False, metadata=affects("order"))


class SFTLowLevelDataset(JsonLines):
    """Chat file: item i is the messages of row i, or the text of a row that has only text."""

    def parse(self, row: int, line: NDArray[np.uint8]) -> Conversation | str:
        """Return the messages or the text in the bytes of a row.

        Args:
            row: number of the row, for errors.
            line: its bytes, shape (n,).

        Raises:
            FormatError: not a JSON object, or one of no known schema.
        """
        fields = super().parse(row, line)
        try:
            return parse_row(fields)
        except FormatError as error:
            raise FormatError(f"{self.describe_row(row)}: {error}") from error


class ChatAssemble(SampleAssemble):
    """Function that packs the conversations of a row into S tokens, as `SFTDataset` describes the samples.

    Args:
        config: options of the samples, and the tokenizer.
        dataset: the chat file, which parses rows.
        masked_id: id that is not trained on, wherever it is; -1 for none.
    """

    def __init__(self, config: GPTDatasetConfig, dataset: SFTLowLevelDataset, masked_id: int) -> None:
        self.config, self.dataset, self.masked_id = config, dataset, masked_id
        pad = find_token(config.tokenizer, "pad")
        self.pad = int(config.tokenizer.eod if pad is None or pad < 0 else pad)
        """Id that fills rows: the tokenizer's pad, or its EOD if it has no pad."""

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        conversation, length = self.dataset.parse(int(spans[0, 0]), pieces[0]), self.config.sequence_length
        (tokens, targets), positions, is_real, bounds = pack_conversations(
            map(self.tokenize, split_conversations(conversation)), length, pad=self.pad, multiple=self._padding_multiple
        )
        longest = np.array(np.diff(bounds).max())
        if follows(self.config, Rule.sft_padded_bounds):
            bounds = np.pad(bounds, (0, max(0, length + 1 - len(bounds))), constant_values=length)
        labels = targets[1:]
        return {
            "tokens": as_tensor(tokens[:-1]),
            "labels": as_tensor(labels),
            "loss_mask": as_tensor(self.mask_loss(number, labels, is_real[1:])),
            "position_ids": as_tensor(positions),
            "cu_seqlens": as_tensor(bounds),
            "max_seqlen": as_tensor(longest),
        }

    @property
    def _padding_multiple(self) -> int:
        """Number of tokens of which each conversation is a multiple."""
        hybrid = self.config.hybrid_context_parallel and follows(self.config, Rule.sft_hybrid_padding)
        sequence_parallel = hybrid or follows(self.config, Rule.sft_sequence_parallel_padding)
        return padding_multiple(self.config, hybrid=hybrid, sequence_parallel=sequence_parallel)

    def tokenize(self, conversation: Conversation | str) -> Tokenized:
        """Tokenize one conversation or one text.

        A text gets an EOD at its end, unless it ends in one. A conversation gets one, too, with
        `megatron_samples="0.16"`.

        Args:
            conversation: messages with "role" and "content", or a text.

        Returns:
            Tokens and targets, each of shape (n,), int64, not shifted. A target is the token itself, or IGNORE (-100)
            for a token that is not trained on. All tokens of a text and an appended EOD are trained on; `mask_loss`
            masks `masked_id` later.

        Raises:
            ConfigError: the tokenizer has no `tokenize_conversation`.
        """
        tokenizer = self.config.tokenizer
        if isinstance(conversation, str):
            tokens = targets = tokenizer.tokenize(conversation)
        else:
            try:
                tokenize = tokenizer.tokenize_conversation
            except AttributeError:
                name = type(tokenizer).__name__
                raise ConfigError(
                    f"{name}: has no tokenize_conversation; give binidx.megatron.ChatTokenizer(tokenizer)"
                ) from None
            tokens, targets = tokenize(conversation, return_target=True, add_generation_prompt=False)
        both = np.asarray(tokens, np.int64), np.asarray(targets, np.int64)
        needs_eod = isinstance(conversation, str) or not follows(self.config, Rule.sft_no_eod)
        return append_eod(*both, tokenizer.eod) if needs_eod else both

    def mask_loss(self, number: int | None, labels: Ids, is_real: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return 1 for each label that is trained on, else 0; all 0 for the padding sample (None).

        Args:
            number: of the sample; None is the padding sample.
            labels: shape (n,).
            is_real: False at pads, shape (n,).
        """
        is_trained: NDArray[np.bool_] = is_real & (labels != IGNORE) & (labels != self.masked_id)
        return (is_trained & (number is not None)).astype(np.float32)


class VarlenChatAssemble(ChatAssemble):
    """Function that makes samples of whole conversations of their own length, as `VarlenDataset` describes them."""

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        conversation = self.dataset.parse(int(spans[0, 0]), pieces[0])
        length, eod = self.config.sequence_length, self.config.tokenizer.eod
        both = np.stack(append_eod(*self.tokenize(add_system_message(conversation)), eod))
        if both.shape[1] == 1:
            both = np.full((2, 2), eod)  # an empty text becomes an EOD that predicts another
        elif both.shape[1] > length + 1:
            both = both[:, : length + 1]
            both[:, -1] = np.where(both[0, -1] == eod, both[:, -1], eod)
        original = both.shape[1] - 1
        has_lengths = not self.config.varlen_sbhd_validation
        padded = round_up(original, self.config.padding_multiple) if has_lengths else length
        tokens, targets = np.pad(both, ((0, 0), (0, padded - original)), constant_values=self.pad)
        sample: Sample = {
            "tokens": as_tensor(tokens[:-1]),
            "labels": as_tensor(targets[1:]),
            "loss_mask": as_tensor(self.mask_loss(number, targets[1:], np.arange(padded) < original)),
            "position_ids": as_tensor(np.arange(padded)),
        }
        if not has_lengths and follows(self.config, Rule.varlen_padding_mask):
            sample["padding_mask"] = as_tensor(np.arange(padded) >= original)
        if has_lengths:
            sample["original_seq_len"] = as_tensor(np.array([original], np.int32))
            sample["padded_seq_len"] = as_tensor(np.array([padded], np.int32))
        return sample
