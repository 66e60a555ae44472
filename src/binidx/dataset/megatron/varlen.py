"""GPT samples as padded documents and their lengths, with Megatron's arguments: `assemble.padded_documents`."""

from __future__ import annotations

from typing import ClassVar

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.assemble.padded_documents import PaddedAssemble
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError
from binidx.order.source_order import SourceOrder


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
        ...     binidx.VarlenGPTDataset, [1000, 0, 0], lambda: True, config  # inter_document_masking=True
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

    def _make_assemble(self) -> Assemble:
        rows = GPTAssemble.of(self.config, self._pad_token_id, masks_ends=self._order.ends_documents)
        return PaddedAssemble(rows, self.config.padding_multiple)
