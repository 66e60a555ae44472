"""Megatron's constructors of chat samples: packed (`SFTDataset`), or of their own length (`VarlenDataset`)."""

from __future__ import annotations

from typing import ClassVar

from binidx.dataset.assemble.chat import IGNORE, ChatAssemble, SFTDatasetConfig, SFTLowLevelDataset, VarlenChatAssemble
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, required
from binidx.dataset.megatron_releases import Rule, follows
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError, IndexBuildError
from binidx.index.cache.index_files import recorded_name
from binidx.order.sequences import RowOrder


class SFTDataset(MegatronDataset):
    """Chat samples: the conversations of one row of a file, packed into S tokens.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (S,);
    `cu_seqlens` int32 (S + 1,), the bounds of the conversations, then S; and `max_seqlen` int32 (). The labels of
    tokens that are not trained on are -100, with a loss mask of 0. With `megatron_samples="0.16"` each conversation
    ends with an EOD; with "0.16" to "0.18" `cu_seqlens` has the shape (n + 1,) for n conversations.

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
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.SFTDataset, [1000, 10, 0], lambda: True, config)
        >>> train, valid, _ = builder.build()

    Source: Megatron-LM, `SFTDataset`. Differences: any URI, and no table of the whole file in memory; several schemas,
    not `messages` alone; pads are recognised by position, not by id, so an EOD that is also the pad is trained on where
    it ends a conversation (unless `allow_ambiguous_pad_tokens`); with hybrid context parallelism conversations are
    padded to `padding_multiple` with "main", too, where Megatron pads since its pull request 6742; `collate` pads
    `cu_seqlens` of a batch to one length; rows can be shuffled. As there, the seed has no effect without `shuffle`, and
    `eod_mask_loss` has none.
    """

    RECORDED_NAME: ClassVar[str] = "SFTDataset"
    release_rules = frozenset(rule for rule in Rule if rule.startswith("sft_"))

    config: GPTDatasetConfig
    dataset: SFTLowLevelDataset

    def _open_order(self) -> RowOrder:
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask"):
            if getattr(self.config, name):
                raise ConfigError(f"{name}: found True, packed samples have cu_seqlens instead; leave it")
        if self.num_samples and not len(self.indices):
            split = self.index_split.name
            raise IndexBuildError(f"{self.dataset_path}: no rows in the {split} split, needs {self.num_samples}")
        is_shuffled = isinstance(self.config, SFTDatasetConfig) and self.config.shuffle
        seed = self.config.random_seed if is_shuffled else None
        return RowOrder(
            self._source, self.num_samples, seed, recorded_name(type(self)), self._describe_release(self.config)
        )

    def _make_assemble(self) -> Assemble:
        return ChatAssemble(self.config, self.dataset, self._pad_token_id)

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
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> SFTLowLevelDataset:
        """Open the chat file of a URI.

        Args:
            dataset_path: path or URI of the file.
            config: `path_to_cache`, `mmap_bin_files` and `storage_options` are used.

        Returns:
            The opened file.
        """
        return SFTLowLevelDataset(
            required(dataset_path),
            path_to_cache=config.path_to_cache,
            mmap=config.mmap_bin_files,
            storage_options=config.storage_options,
        )

    def find_row(self, idx: int | None) -> int:
        """Return the row of the file that a sample is made of.

        Args:
            idx: number of the sample; None is sample 0.

        Returns:
            Number of the row, from 0.

        Raises:
            IndexError: there is no such sample.
        """
        return self.find_sequences(idx)[0]


class VarlenDataset(SFTDataset):
    """Chat samples of their own length: each is one row of the file, tokenized whole.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape
    (padded_seq_len,), at most `sequence_length` and its padding; `original_seq_len` and `padded_seq_len` int32, each of
    shape (1,). With `varlen_sbhd_validation` the first four have shape (S,), and there are no lengths; `padding_mask`,
    bool (S,), is True at pads (Megatron has none since its pull request 6742). Pads are recognised by position alone:
    the pad id in a conversation is trained on. With `megatron_samples="0.16"` it is not, unless it is another special
    token, too, and there is no `padding_mask`.

    Args:
        dataset: the chat file.
        dataset_path: its URI; part of the identity.
        indices: rows of the split, shape (num_in_split,) int32.
        num_samples: number of samples; None is one epoch.
        index_split: the split.
        config: `GPTDatasetConfig` or `SFTDatasetConfig`.

    Raises:
        ConfigError: masks or resets of positions are requested, which these samples do not have.
        IndexBuildError: samples are requested of a split without rows.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.VarlenDataset, [1000, 0, 0], lambda: True, config)
        >>> train, _, _ = builder.build()

    Source: Megatron-LM, `VarlenDataset` of its branch dev (d48bd6be) and of its pull request 6742 (095c3613); no
    release has it. Differences: any URI, and rows of several schemas in one file, but neither Parquet nor names of the
    Hugging Face Hub; a conversation that its EOD makes one token too long is truncated, where Megatron-LM's sample is
    longer than S; a text of one EOD becomes an EOD that predicts another, where Megatron-LM's is empty.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenDataset"
    release_rules = frozenset({Rule.varlen_pads_by_position, Rule.varlen_padding_mask})

    def _make_assemble(self) -> Assemble:
        masked_id = IGNORE if follows(self.config, Rule.varlen_pads_by_position) else self._pad_token_id
        return VarlenChatAssemble(self.config, self.dataset, masked_id)
