"""Samples of chat files: the conversations of a row, tokenized on access and packed into S tokens.

    sample i  ─►  row indices[i mod n] of the file  ─►  conversations  ─ chat template ─►  tokens and targets
              ─►  packed into S tokens, with cu_seqlens, the bounds that attention stays within

    conversation      A A A A A E B B B E  C C C E            as the tokenizer ends it
    padded            A A A A A E B B B E p p C C C E         to a multiple of tokens that context parallel ranks share
    row of S + 1      A A A A A E B B B E p p C C C E p p     truncated or padded at the end
    cu_seqlens        0           6           12            S S S ... S       S + 1 numbers

Source: Megatron-LM, `SFTDataset`, `SFTLowLevelDataset`: the last sequence includes the pads at the end; one that would
begin beyond S is empty; the label of a truncated row is a pad. 0.16.1 appends an EOD that the tokenizer left out, and
has one bound a sequence. A text, which neither takes, ends with an EOD.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.chat import IGNORE, Conversation, parse_row, split_conversations
from binidx.dataset.config import GPTDatasetConfig, padding_multiple
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, find_token, recorded_name, required, with_context
from binidx.dataset.tokens.json_lines import JsonLines
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.format.indexed_dataset import Span
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext
from binidx.index.cache.manifest import describe_documents

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
        here = both[:, : sequence_length - first]
        lines[:, first : first + here.shape[1]] = here
        is_real[first : first + here.shape[1]] = True
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
    """Return tokens and targets with an EOD at the end; an appended one is trained on."""
    if len(tokens) and tokens[-1] == eod:
        return tokens, targets
    return np.append(tokens, eod), np.append(targets, eod)


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):
    """Config of chat samples with one more option; a plain `GPTDatasetConfig` is enough without it.

    Args:
        shuffle: serve the rows of each epoch in another order, a function of (random_seed, epoch). By default rows are
            served in the order of the file, as in Megatron-LM, and a "cyclic" loader shuffles them.

    The other arguments are those of `GPTDatasetConfig`; `tokenizer` is described at `SFTDataset`.

    Source: ours.
    """

    shuffle: bool = False


class SFTLowLevelDataset(JsonLines):
    """Chat file: item i is the messages of row i, or the text of a row that has only text."""

    def parse(self, row: int, line: NDArray[np.uint8]) -> Conversation | str:
        """Return the messages or the text in the bytes of a row.

        Raises:
            FormatError: not a JSON object, or one of no known schema.
        """
        fields = super().parse(row, line)
        try:
            return parse_row(fields)
        except FormatError as error:
            raise FormatError(f"{self.describe_row(row)}: {error}") from error


class SFTDataset(MegatronDataset):
    """Chat samples: the conversations of one row of a file, packed into S tokens.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (S,);
    `cu_seqlens` int32 (S + 1,), the bounds of the conversations, then S; and `max_seqlen` int32 (). The labels of
    tokens that are not trained on are -100, with a loss mask of 0. With `megatron_samples="0.16.1"` each conversation
    ends with an EOD, and `cu_seqlens` has the shape (n + 1,) for n conversations.

    The tokenizer has `eod`, `pad`, and the methods of Megatron-LM's `SFTTokenizer`; `ChatTokenizer` wraps a Hugging
    Face tokenizer accordingly:

        tokenize_conversation(messages, return_target=True, add_generation_prompt=False) -> tokens, targets
        tokenize(text) -> tokens                               for rows of text

    Args:
        dataset: the chat file.
        dataset_path: its URI; part of the identity.
        indices: rows of the split, shape (num_in_split,) int32.
        num_samples: number of samples; None is one epoch.
        index_split: the split.
        config: `SFTDatasetConfig` or `GPTDatasetConfig`.

    Raises:
        ConfigError: masks or resets of positions are requested, which these samples do not have.
        IndexBuildError: samples are requested of a split without rows.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(binidx.SFTDataset, [1000, 10, 0], lambda: True, config)
        >>> train, valid, _ = builder.build()

    Source: Megatron-LM, `SFTDataset`. Differences: any URI, and no table of the whole file in memory; several schemas,
    not `messages` alone; pads are recognised by position, not by id, so an EOD that is also the pad is trained on where
    it ends a conversation (unless `allow_ambiguous_pad_tokens`); with hybrid context parallelism conversations are
    padded to `padding_multiple`; `collate` pads `cu_seqlens` of a batch to one length; rows can be shuffled. As there,
    the seed has no effect without `shuffle`, and `eod_mask_loss` has none.
    """

    RECORDED_NAME: ClassVar[str] = "SFTDataset"
    samples_differ = True

    config: GPTDatasetConfig
    dataset: SFTLowLevelDataset

    def _load_index(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
            if getattr(self.config, name):
                raise ConfigError(f"{name}: found True, packed samples have cu_seqlens instead; leave it")
        if self.num_samples and not len(self.indices):
            split = self.index_split.name
            raise IndexBuildError(f"{self.dataset_path}: no rows in the {split} split, needs {self.num_samples}")

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: SFTLowLevelDataset) -> int:
        """Return the number of rows, which splits divide.

        Args:
            low_level_dataset: the chat file.

        Returns:
            Number of rows.
        """
        return len(low_level_dataset)

    @staticmethod
    @with_context
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig, context: BuildContext = DEFAULT_CONTEXT
    ) -> SFTLowLevelDataset:
        """Open the chat file of a URI.

        Args:
            dataset_path: path or URI of the file.
            config: `path_to_cache`, `mmap_bin_files` and `storage_options` are used.
            context: options of the build.

        Returns:
            The opened file.
        """
        return SFTLowLevelDataset(
            required(dataset_path),
            path_to_cache=config.path_to_cache,
            mmap=config.mmap_bin_files,
            storage_options=config.storage_options,
            context=context,
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices) if self.num_samples is None else self.num_samples

    @property
    def order_identity(self) -> dict[str, Any]:
        """All values that decide which row a sample is, in JSON values; equal for a copied or moved file."""
        return {
            "class": recorded_name(type(self)),
            **self.dataset.identity,
            "indices": describe_documents(self.indices),
            "shuffled_by": self.config.random_seed if self._is_shuffled else None,
            **self._sample_version,
        }

    @property
    def _is_shuffled(self) -> bool:
        return isinstance(self.config, SFTDatasetConfig) and self.config.shuffle

    def find_row(self, idx: int | None) -> int:
        """Return the row of the file that a sample is made of.

        Args:
            idx: number of the sample; None is sample 0.

        Returns:
            Number of the row, from 0.

        Raises:
            IndexError: there is no such sample.
        """
        epoch, position = divmod(self._position(idx), len(self.indices))
        if self._is_shuffled:
            position = int(shuffle_rows(len(self.indices), self.config.random_seed, epoch)[position])
        return int(self.indices[position])

    def spans(self, idx: int | None) -> list[Span]:
        """Return the span of the bytes of a sample's row.

        Args:
            idx: number of the sample; None is sample 0.

        Returns:
            A list of (row, 0, number of bytes).
        """
        row = self.find_row(idx)
        return [(row, 0, int(self.dataset.sequence_lengths[row]))]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the sample made of a row.

        Args:
            idx: number of the sample; None is sample 0 without loss.
            sequences: the bytes of its row.

        Returns:
            The dict described at the class.

        Raises:
            FormatError: the row is not a JSON object of a known schema.
        """
        conversation = self.dataset.parse(self.find_row(idx), sequences[0])
        length = self.config.sequence_length
        (tokens, targets), positions, is_real, bounds = pack_conversations(
            map(self._tokenize, split_conversations(conversation)),
            length,
            pad=self.pad,
            multiple=self._padding_multiple,
        )
        longest = np.array(np.diff(bounds).max())
        if self.config.megatron_samples == "main":
            bounds = np.pad(bounds, (0, max(0, length + 1 - len(bounds))), constant_values=length)
        labels = targets[1:]
        return {
            "tokens": as_tensor(tokens[:-1]),
            "labels": as_tensor(labels),
            "loss_mask": as_tensor(self._loss_mask(idx, labels, is_real[1:])),
            "position_ids": as_tensor(positions),
            "cu_seqlens": as_tensor(bounds),
            "max_seqlen": as_tensor(longest),
        }

    @property
    def _padding_multiple(self) -> int:
        """Number of tokens of which each conversation is a multiple: in main not one for sequence parallelism."""
        hybrid = self.config.hybrid_context_parallel
        counts = hybrid or self.config.megatron_samples != "main"
        return padding_multiple(self.config, hybrid=hybrid, sequence_parallel=counts)

    @property
    def pad(self) -> int:
        """Id that fills rows: the tokenizer's pad, or its EOD if it has no pad."""
        pad = find_token(self.config.tokenizer, "pad")
        return int(self.config.tokenizer.eod if pad is None or pad < 0 else pad)

    def _tokenize(self, conversation: Conversation | str) -> Tokenized:
        """Return tokens and targets of one conversation, or of a text and its EOD, all of which is trained on.

        Raises:
            ConfigError: the tokenizer cannot tokenize conversations.
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
                    f"{name}: has no tokenize_conversation; give binidx.ChatTokenizer(tokenizer)"
                ) from None
            tokens, targets = tokenize(conversation, return_target=True, add_generation_prompt=False)
        both = np.asarray(tokens, np.int64), np.asarray(targets, np.int64)
        needs_eod = self.config.megatron_samples != "main" or isinstance(conversation, str)
        return append_eod(*both, tokenizer.eod) if needs_eod else both

    def _loss_mask(self, idx: int | None, labels: Ids, is_real: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return 1 for each label that is trained on, else 0; all 0 for the padding sample (None)."""
        is_trained: NDArray[np.bool_] = is_real & (labels != IGNORE) & (labels != self._masked_id)
        return (is_trained & (idx is not None)).astype(np.float32)

    @property
    def _masked_id(self) -> int:
        """Id that is not trained on, wherever it is."""
        return self._pad_token_id


@lru_cache(maxsize=4)
def shuffle_rows(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of the rows in an epoch, shape (num_rows,), read-only."""
    order = np.random.RandomState([seed, epoch]).permutation(num_rows)
    order.flags.writeable = False
    return order
