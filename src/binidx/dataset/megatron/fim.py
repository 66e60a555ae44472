"""Megatron's constructor of GPT samples with the middle of segments moved to the end: `assemble.fill_in_middle`."""

from __future__ import annotations

from typing import ClassVar

from binidx.dataset.assemble.fill_in_middle import FIMAssemble, FIMTransform, GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError
from binidx.order.source_order import SourceOrder


class GPTFIMDataset(GPTDataset):
    """GPT samples with middles moved to the end; keys, shapes, indices and arguments are those of `GPTDataset`.

    Special tokens are left out of a text before it is cut, if `ids_to_text` has the argument `remove_special_tokens`;
    with `megatron_samples="0.16.1"` the tokenizer decides.

    Raises:
        ConfigError: raised by a sample if the tokenizer lacks one of the extra tokens, or cannot decode.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTFIMDataset, [1000, 10, 0], lambda: True, config)
        >>> train, valid, _ = builder.build()

    Source: Megatron-LM, `GPTFIMDataset`. Differences: the draws of a sample are a function of (seed, number of the
    sample); given the same draws the samples are equal. There a dataset draws from one RandomState, so a sample depends
    on all samples read before it, on the number of workers, and on the position at which the run was resumed. The extra
    token is read only if configured, partial samples are padded, and ids that exceed the stored dtype stay as they are.
    """

    RECORDED_NAME: ClassVar[str] = "GPTFIMDataset"

    config: GPTFIMDatasetConfig
    config_class = GPTFIMDatasetConfig
    samples_differ = True

    def _open_order(self) -> SourceOrder:
        order = super()._open_order()
        if order.ends_documents:
            raise ConfigError("order: GPTFIMDataset moves text across the documents of a packed sample; leave it")
        return order

    def _make_assemble(self) -> Assemble:
        rows = GPTAssemble.of(self.config, self._pad_token_id)
        return FIMAssemble(rows, FIMTransform(self.config), self.config.random_seed)
