"""Samples of text and images, with Megatron's arguments: `assemble.text_and_images`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.assemble.text_and_images import TEXT, MultimodalAssemble, MultimodalDatasetConfig
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, open_tokens
from binidx.dataset.megatron.ordered_dataset import index_array
from binidx.dataset.token_dataset import Assemble
from binidx.errors import IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.documents import Documents, compact_documents, new_array
from binidx.native.permutations import RandomState
from binidx.order.sequences import DocumentOrder
from binidx.order.source_order import join_ranges


class MultimodalDataset(MegatronDataset):
    """Samples of one document each: its text as a GPT sample of S tokens, and its images.

    A sample has the keys of a `GPTDataset`'s (`tokens`, `labels`, `loss_mask`, `position_ids`, ...), for the text of
    the document truncated or padded to S tokens, and

        images            list of arrays as stored, one for each sequence with another mode than 0
        image_modes       int64 (num_images,), modes of the images
        image_positions   int64 (num_images,), number of text tokens before each image, truncated tokens included

    Then `preprocess_func` converts the sample into the model's input. Batches are stacked from the converted samples,
    so their images must be tensors of one shape. `image_bytes` returns the image file in an item of `images`.

    Splits divide documents; documents without sequences are left out. Each epoch serves all documents in an order of
    its own, a function of the seed.

    Args:
        dataset: the multimodal `.bin`/`.idx` pair.
        dataset_path: its prefix, as given by the user; part of the identity.
        indices: documents of the split, shape (num_in_split,) int32.
        num_samples: number of samples; None is one epoch.
        index_split: the split.
        config: `MultimodalDatasetConfig`.

    Attributes:
        document_index: the document of each sample, shape (num_samples,) int32.

    Raises:
        IndexBuildError: samples are requested of a split without documents.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.megatron.MultimodalDataset, [1000, 0, 0], lambda: True, config
        ... )
        >>> train, _, _ = builder.build()
        >>> image = image_bytes(train[0]["images"][0])

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "MultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig
    dataset: IndexedDataset

    document_index = index_array("document_index")

    def _list_sequences(self) -> Documents:
        bounds = self.dataset.document_indices.astype(np.int64)
        return compact_documents(join_ranges(bounds[self.indices], bounds[self.indices + 1]).astype(np.int32))

    def _open_order(self) -> DocumentOrder:
        bounds = self.dataset.document_indices
        documents = self.indices[bounds[self.indices] < bounds[self.indices + 1]]
        with self.naming_split():
            order = build_serving_order(documents, self.num_samples, self.config.random_seed)
        capacity = self.config.sequence_length + self.config.add_extra_token_to_sequence
        return DocumentOrder(self._source, self.sample_identifiers, order, len(documents), capacity, TEXT)

    def _make_assemble(self) -> Assemble:
        rows = GPTAssemble.of(self.config, self._pad_token_id)
        return MultimodalAssemble(rows, self.dataset, self.config.preprocess_func)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of documents, which splits divide.

        Args:
            low_level_dataset: the `.bin`/`.idx` pair.

        Returns:
            Number of documents.
        """
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: MultimodalDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair of a prefix; it must have modes.

        Args:
            dataset_path: prefix, a path or any URI.
            config: `mmap_bin_files` and `storage_options` are used.

        Returns:
            The opened pair.
        """
        return open_tokens(IndexedDataset, dataset_path, config, multimodal=True)


def build_serving_order(documents: NDArray[np.int32], num_samples: int | None, seed: int) -> NDArray[np.int32]:
    """Return the document of each sample, epoch by epoch; each epoch is shuffled by itself.

    Args:
        documents: the documents of an epoch, shape (num_documents,).
        num_samples: number of samples; None is one epoch.
        seed: seed of the shuffles.

    Returns:
        Shape (num_samples,).

    Raises:
        IndexBuildError: samples are requested, but there are no documents.
    """
    count = len(documents) if num_samples is None else num_samples
    if count and not len(documents):
        raise IndexBuildError(f"no document has a sequence, {count} samples are requested")
    rng, order = RandomState(seed), new_array("order of documents", count, np.int32)
    for first in range(0, count, max(len(documents), 1)):
        epoch = np.ascontiguousarray(documents, np.int32).copy()
        rng.shuffle(epoch)
        order[first : first + len(epoch)] = epoch[: count - first]
    return order
