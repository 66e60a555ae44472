"""GPT samples of whole documents, packed by best fit, with Megatron's arguments: `index.packing`."""

from __future__ import annotations

from typing import ClassVar

from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.ordered_dataset import index_array
from binidx.errors import ConfigError, IndexBuildError
from binidx.index.packing import ARRAYS
from binidx.order.document_packing import PACKINGS, PackedOrder, load_or_build_packed_index
from binidx.order.order_options import OrderOption


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
        ...     binidx.BestFitGPTDataset, [1000, 0, 0], lambda: True, config
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

    def _open_order(self) -> PackedOrder:
        option = self.config.order
        if option is not None and type(option).open_source is not OrderOption.open_source:
            raise ConfigError(f"order: {type(self).__name__} packs documents by itself; use GPTDataset")
        try:
            arrays = load_or_build_packed_index(
                PACKINGS[self.PACKING], self._parameters, self._source, self._index_options
            )
        except IndexBuildError as error:
            raise IndexBuildError(f"{self.dataset_path}, {self.index_split.name} split: {error}") from None
        # Its samples have labels across documents, as in the runs that began with it; order="best_fit" has none.
        return PackedOrder(self._parameters, self._source, arrays, ends_documents=False)
