"""GPT samples with moved middles, with padded documents, or of packed documents: Megatron's arguments of each kind."""

from __future__ import annotations

from typing import ClassVar

from binidx.dataset.assemble.fill_in_middle import FIMAssemble, FIMTransform, GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble, PaddedAssemble
from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.megatron.gpt import GPTDataset, gpt_parameters
from binidx.dataset.megatron.ordered_dataset import index_array
from binidx.dataset.megatron_releases import Rule
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError
from binidx.index.packing import ARRAYS
from binidx.order.document_packing import PackedOrder, PackRule
from binidx.order.requests import SourceRule
from binidx.order.source_order import SourceOrder


class GPTFIMDataset(GPTDataset):
    """GPT samples with middles moved to the end; keys, shapes, indices and arguments are those of `GPTDataset`.

    Special tokens are left out of a text before it is cut, if `ids_to_text` has the argument `remove_special_tokens`;
    with `megatron_samples="0.16"` the tokenizer decides.

    Raises:
        ConfigError: raised by a sample if the tokenizer lacks one of the extra tokens, or cannot decode.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.GPTFIMDataset, [1000, 10, 0], lambda: True, config)
        >>> train, valid, _ = builder.build()

    Source: Megatron-LM, `GPTFIMDataset`. Differences: the draws of a sample are a function of (seed, number of the
    sample); given the same draws the samples are equal. There a dataset draws from one RandomState, so a sample depends
    on all samples read before it, on the number of workers, and on the position at which the run was resumed. The extra
    token is read only if configured, partial samples are padded, and ids that exceed the stored dtype stay as they are.
    """

    RECORDED_NAME: ClassVar[str] = "GPTFIMDataset"

    config: GPTFIMDatasetConfig
    config_class = GPTFIMDatasetConfig
    release_rules = frozenset({Rule.fim_no_special_tokens})

    def _open_order(self) -> SourceOrder:
        order = super()._open_order()
        if order.ends_documents:
            raise ConfigError("order: GPTFIMDataset moves text across the documents of a packed sample; leave it")
        return order

    def assemble_for(self, config: GPTFIMDatasetConfig) -> Assemble:
        rows = GPTAssemble.of(config, self._pad_token_id)
        return FIMAssemble(rows, FIMTransform(config), config.random_seed)


class VarlenGPTDataset(GPTDataset):
    """GPT samples as padded documents and their lengths; the tokens and their order are those of `GPTDataset`.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (T,),
    where T is the sum of `padded_seq_len`; `original_seq_len` and `padded_seq_len` int32, each of shape (n,) for the n
    documents of the sample. Pads are token 0 without loss; positions continue through the pads of a document.

    The constructor has the arguments of `GPTDataset`. `padding_multiple` of the config is the multiple of tokens.

    Raises:
        ConfigError: the config has no `inter_document_masking`, without which samples have no documents.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.VarlenGPTDataset, [1000, 0, 0], lambda: True, config  # inter_document_masking=True
        ... )
        >>> train, _, _ = builder.build()

    Source: ours. Megatron-LM's `inter_document_masking` does not pad documents, so the ranks of a context parallel
    group cannot share them; its `VarlenDataset` of chats pads in this way and has these keys.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenGPTDataset"

    def _open_order(self) -> SourceOrder:
        if not self.config.inter_document_masking:
            raise ConfigError("inter_document_masking: found False, samples of documents need True")
        return super()._open_order()

    def assemble_for(self, config: GPTDatasetConfig) -> Assemble:
        rows = GPTAssemble.of(config, self._pad_token_id, masks_ends=self._order.ends_documents)
        return PaddedAssemble(rows, config.padding_multiple)


class BestFitGPTDataset(GPTDataset):
    """GPT samples of whole documents, padded at the end; only documents longer than a sample are cut.

    Samples have the keys and shapes of `GPTDataset`'s. With `inter_document_masking` attention stays within a document.
    The order is not Megatron's. Each epoch is served completely before the next, so a run that is extended keeps its
    order.

    Args:
        indexed_dataset: the stored sequences, one document each.
        dataset_path: their prefix, as the user wrote it; part of the identity.
        indexed_indices: sequences of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `GPTDatasetConfig`.

    Attributes:
        pieces: (sequence, first token, number of tokens) of each piece, shape (num_pieces, 3), int32.
        bounds: index in `pieces` of each sample's first piece, then the end, shape (samples of an epoch + 1,), int64.
        shuffle_index: the sample served at each position, shape (num_samples,).

    Raises:
        IndexBuildError: samples are requested of a split without tokens.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.BestFitGPTDataset, [1000, 0, 0], lambda: True, config
        ... )
        >>> train, _, _ = builder.build()

    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling".
    """

    RECORDED_NAME: ClassVar[str] = "BestFitGPTDataset"
    PACKING: ClassVar[str] = "best_fit"

    pieces, bounds, shuffle_index = map(index_array, ARRAYS)

    @property
    def fill(self) -> float:
        """Fraction of the tokens of samples that are not pads, 0 to 1."""
        order: PackedOrder = self._order
        return order.fill

    @classmethod
    def _rule(cls, num_samples: int | None, split: Split, config: GPTDatasetConfig) -> SourceRule:
        # Its samples have labels across documents, as in the runs that began with it; order="best_fit" has none.
        return PackRule(gpt_parameters(cls, num_samples, split, config), cls.PACKING, is_option=False)
