"""GPT samples whose documents each fill a multiple of tokens, for THD attention under context parallelism.

    GPT sample     A A A B B B B B C C      S tokens in `GPTDataset`'s order
    here           A A A p B B B B B p p p C C p p      each to a multiple of 4: 2 for each of 2 ranks

Source: ours. Megatron-LM's `inter_document_masking` leaves documents as long as they are, which the ranks of a context
parallel group cannot share; its samples of chats, `VarlenDataset`, are padded so, and have these keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import Request
from binidx.dataset.split import Split
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset

IN_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")


class VarlenGPTDataset(GPTDataset):
    """Samples as documents and their lengths; which tokens a sample has, and their order, is `GPTDataset`'s.

    `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (T,), where T is the sum of
    `padded_seq_len`; `original_seq_len` and `padded_seq_len` int32, each of shape (n,) for the n documents in the
    sample. Pads are token 0 without loss, and count on in their document's positions. `collate` makes one row of a
    batch, with `cu_seqlens`.

    Raises:
        ConfigError: the config has no `inter_document_masking`, so documents would not be told apart.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenGPTDataset"

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        if not config.inter_document_masking:
            raise ConfigError("inter_document_masking: found False, samples of documents need True")
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    def read_one(self, idx: int | None) -> Sample:
        return apart(super().read_one(idx), self.config.padding_multiple)

    @classmethod
    def read_together(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        multiples = [0] * num_rows
        for dataset, _, rows in requests:
            for row in rows:
                multiples[row] = dataset.config.padding_multiple
        return [*map(apart, super().read_together(requests, num_rows), multiples)]


def apart(sample: Mapping[str, Any], multiple: int) -> Sample:
    """A sample with bounds of documents as one with documents padded, and their lengths."""
    bounds = np.unique(np.asarray(sample["cu_seqlens"]))
    original = np.diff(bounds)
    padded = -(-original // multiple) * multiple
    starts = np.cumsum(padded) - padded
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], original)
    found: Sample = {}
    for name in IN_TOKENS:
        values = np.asarray(sample[name])
        spread = np.zeros(padded.sum(), values.dtype)
        spread[places] = values
        found[name] = as_tensor(spread)
    found["position_ids"] = as_tensor(np.arange(padded.sum()) - np.repeat(starts, padded))
    lengths = {"original_seq_len": original, "padded_seq_len": padded}
    return found | {name: as_tensor(each.astype(np.int32)) for name, each in lengths.items()}
