"""Conversations one after the other in a row of S tokens, with the bounds that attention keeps to.

    conversation      A A A A A . B B B B .  C C C C          each ends in EOD
    padded            A A A A A E B B B E p p C C C E         to a multiple of what context parallel ranks share
    row of S + 1      A A A A A E B B B E p p C C C E p p p   what is too long is cut off, what is too short is padded
    cu_seqlens        0           6           12            S

Source: Megatron-LM, `SFTDataset.__getitem__`: the last sequence has the pads at the end; one that begins beyond S is
empty; the label of a row that was cut off is a pad.

Samples of chat files: the conversations of a row, tokenized when they are asked for and packed into S tokens.

    sample i  ─►  row indices[i mod n] of the file  ─►  conversations  ─ chat template ─►  tokens, and what is learnt
              ─►  one after the other in S tokens, with cu_seqlens

Source: Megatron-LM, `SFTDataset`, `SFTLowLevelDataset`. Differences: any URI, and no table of the whole file; the
schemas of `chat`, not `messages` alone; pads are told by their place and not by their id, so an EOD that pads as well
is learnt where it ends a conversation; `cu_seqlens` of a batch are made equally long by `collate`; the rows can be
shuffled. What Megatron passes over is passed over here: the seed without `shuffle`, and `eod_mask_loss`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.kinds.chat import IGNORE, Conversation, conversation_of, conversations_in
from binidx.dataset.kinds.json_lines import JsonLines
from binidx.dataset.megatron_dataset import MegatronDataset, recorded_name, required, token_of
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.format.indexed_dataset import Span
from binidx.index.cache.manifest import describe_documents

Ids = NDArray[np.int64]


Tokenized = tuple[Ids, Ids]


"""Tokens, and what is to be learnt of them: the same, or IGNORE."""


@dataclass(frozen=True)
class PackedRow:
    """Attributes:
    tokens, targets: each of shape (S + 1,).
    positions: of each token in its sequence, shape (S,).
    is_real: not a pad that was put in, shape (S + 1,).
    cu_seqlens: where each sequence begins, and the end, shape (n + 1,) int32.
    """

    tokens: Ids
    targets: Ids
    positions: Ids
    is_real: NDArray[np.bool_]
    cu_seqlens: NDArray[np.int32]


def pack_conversations(
    conversations: Iterable[Tokenized], sequence_length: int, *, eod: int, pad: int, multiple: int = 1
) -> PackedRow:
    """One row of conversations, up to the first that does not fit.

    Args:
        conversations: at least one; those behind the end are not asked for.
        sequence_length: S.
        multiple: of it each sequence's length is one, but that of the last, which ends at S.
    """
    lines = np.full((2, sequence_length + 1), pad, np.int64)
    is_real = np.zeros(sequence_length + 1, np.bool_)
    positions, bounds = np.zeros(sequence_length, np.int64), [0]
    for conversation in conversations:
        first, both = bounds[-1], np.stack(ended(*conversation, eod))
        here = both[:, : sequence_length - first]
        lines[:, first : first + here.shape[1]] = here
        is_real[first : first + here.shape[1]] = True
        positions[first:] = np.arange(sequence_length - first)
        bounds.append(first + round_up(both.shape[1], multiple))
        if bounds[-1] > sequence_length:
            break
    bounds[-1] = sequence_length
    return PackedRow(lines[0], lines[1], positions, is_real, np.array(bounds, np.int32))


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-count // multiple) * multiple


def ended(tokens: Ids, targets: Ids, eod: int) -> Tokenized:
    """With an EOD at the end, to be learnt, where there is none yet."""
    if len(tokens) and tokens[-1] == eod:
        return tokens, targets
    return np.append(tokens, eod), np.append(targets, eod)


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):
    """What chat samples can need to know besides; a plain `GPTDatasetConfig` will do.

    Args:
        shuffle: each epoch serves its rows in another order, a function of (random_seed, epoch). By default they come
            in the file's, as in Megatron-LM, and a "cyclic" loader shuffles them.
    """

    shuffle: bool = False


class SFTLowLevelDataset(JsonLines):
    """A chat file: row by row the messages, or the text of a row that has only text."""

    def __getitem__(self, idx: Any) -> Conversation | str:
        return self.conversation(int(idx), self.get(idx))

    def conversation(self, row: int, line: NDArray[np.uint8]) -> Conversation | str:
        """What is in the bytes of a row.

        Raises:
            FormatError: no JSON object, or of no schema.
        """
        found = self.parse(row, line)
        try:
            return conversation_of(found)
        except FormatError as error:
            raise FormatError(f"{self.place(row)}: {error}") from error


class SFTDataset(MegatronDataset):
    """Chat samples: each the conversations of one row, S tokens.

    `tokens`, `labels`, `position_ids` int64, `loss_mask` float32, each of shape (S,); `cu_seqlens` int32 (n + 1,) for n
    conversations, and `max_seqlen` int32 (). Labels of what is not learnt are -100, and their loss mask is 0.

    The tokenizer has `eod`, `pad`, and

        tokenize_conversation(messages, return_target=True, add_generation_prompt=False) -> tokens, targets
        tokenize(text) -> tokens                               for rows of text

    as Megatron's SFTTokenizer; `ChatTokenizer` makes one of a Hugging Face tokenizer.

    Raises:
        ConfigError: masks or resets of positions, which these samples do not have.
        IndexBuildError: the split has no rows, and samples were asked of it.
    """

    RECORDED_NAME: ClassVar[str] = "SFTDataset"

    config: GPTDatasetConfig
    dataset: SFTLowLevelDataset

    def __init__(
        self,
        dataset: SFTLowLevelDataset,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
            if getattr(config, name):
                raise ConfigError(f"{name}: found True, packed samples have cu_seqlens instead; leave it")
        if num_samples and not len(indices):
            raise IndexBuildError(
                f"{dataset_path}: no rows in the {index_split.name} split, {num_samples} samples asked"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: SFTLowLevelDataset) -> int:
        """Rows."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> SFTLowLevelDataset:
        """Open the file."""
        return SFTLowLevelDataset(
            required(dataset_path),
            path_to_cache=config.path_to_cache,
            mmap=config.mmap_bin_files,
            storage_options=config.storage_options,
        )

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    @property
    def order_identity(self) -> dict[str, Any]:
        """What it depends on which row a sample is, in JSON values; the same for a file that was copied or moved."""
        shuffled = getattr(self.config, "shuffle", False)
        return {
            "class": recorded_name(type(self)),
            **self.dataset.identity,
            "indices": describe_documents(self.indices),
            "shuffled_by": self.config.random_seed if shuffled else None,
        }

    def row_of(self, idx: int | None) -> int:
        """The row of the file that a sample is made of."""
        number = idx or 0
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.dataset_path}, {self.index_split.name} split: sample {idx}, it has {len(self)}")
        epoch, place = divmod(number % len(self), len(self.indices))
        if getattr(self.config, "shuffle", False):
            place = int(shuffled(len(self.indices), self.config.random_seed, epoch)[place])
        return int(self.indices[place])

    def spans(self, idx: int | None) -> list[Span]:
        row = self.row_of(idx)
        return [(row, 0, int(self.dataset.sequence_lengths[row]))]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        found = self.dataset.conversation(self.row_of(idx), sequences[0])
        row = pack_conversations(
            (self.tokenized(each) for each in ([found] if isinstance(found, str) else conversations_in(found))),
            self.config.sequence_length,
            eod=self.config.tokenizer.eod,
            pad=self.pad,
            multiple=self.config.padding_multiple,
        )
        labels = row.targets[1:]
        return {
            "tokens": as_tensor(row.tokens[:-1]),
            "labels": as_tensor(labels),
            "loss_mask": as_tensor(self.loss_mask(idx, labels, row.is_real[1:])),
            "position_ids": as_tensor(row.positions),
            "cu_seqlens": as_tensor(row.cu_seqlens),
            "max_seqlen": as_tensor(np.array(np.diff(row.cu_seqlens).max())),
        }

    @property
    def pad(self) -> int:
        """What rows are filled with: the EOD, of a tokenizer without a pad."""
        pad = token_of(self.config.tokenizer, "pad")
        return int(self.config.tokenizer.eod if pad is None or pad < 0 else pad)

    def tokenized(self, conversation: Conversation | str) -> Tokenized:
        """Tokens and targets of one conversation, or of a text, of which all is learnt."""
        tokenizer = self.config.tokenizer
        if isinstance(conversation, str):
            tokens = targets = tokenizer.tokenize(conversation)
        elif hasattr(tokenizer, "tokenize_conversation"):
            tokens, targets = tokenizer.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
        else:
            raise ConfigError(
                f"{type(tokenizer).__name__}: has no tokenize_conversation; give binidx.ChatTokenizer(tokenizer)"
            )
        return np.asarray(tokens, np.int64), np.asarray(targets, np.int64)

    def loss_mask(self, idx: int | None, labels: Ids, is_real: NDArray[np.bool_]) -> NDArray[np.float32]:
        """1 where a label is to be learnt, shape of the labels; all 0 for the padding sample."""
        learnt: NDArray[np.bool_] = is_real & (labels != IGNORE) & (labels != self._pad_token_id) & (idx is not None)
        return learnt.astype(np.float32)


@lru_cache(maxsize=4)
def shuffled(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch, shape (num_rows,), read-only; the last ones are kept."""
    order = np.random.RandomState([seed, epoch]).permutation(num_rows)
    order.flags.writeable = False
    return order
