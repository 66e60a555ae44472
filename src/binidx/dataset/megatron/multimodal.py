"""Samples of text and images: each is a document of a multimodal `.bin`/`.idx`, whose sequences have modes.

    sequences of a document     text 0   image 1   text 0   image 1        mode
    text                        ──────             ──────                  concatenated, S tokens
    images                               ▲                  ▲              as stored, with the number of tokens before

Megatron Core writes such files (`preprocess_mmdata.py`) and has a config and made-up samples for them, but no dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, open_tokens, with_context
from binidx.dataset.megatron.mock import MockGPTDataset
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext
from binidx.index.documents import new_array
from binidx.native.permutations import RandomState

TEXT = 0
"""Mode of text; all others are images, or whatever the user stores."""


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample without a change.

    Args:
        sample: a sample.

    Returns:
        The same object.
    """
    return sample


@dataclass
class MultimodalDatasetConfig(GPTDatasetConfig):
    """Config of multimodal samples: `GPTDatasetConfig` and options of the images.

    Args:
        image_h: height of the model's images in pixels, for `preprocess_func` and `MockMultimodalDataset`. Required.
        image_w: width of these images in pixels. Required.
        preprocess_func: converts each sample into the model's input. With spawned workers it must pickle: a function of
            a module, or `functools.partial` of one.

    The other arguments are those of `GPTDatasetConfig`.

    Raises:
        ConfigError: `image_h` or `image_w` is missing.

    Source: Megatron Core, `MultimodalDatasetConfig`. Difference: errors instead of assertions.
    """

    image_h: int | None = None
    image_w: int | None = None
    preprocess_func: Callable[[dict[str, Any]], dict[str, Any]] = unchanged

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_h", "image_w"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: must be given for a multimodal dataset")


class MockMultimodalDataset(MockGPTDataset):
    """GPT samples of made-up tokens, each with a black `image`: float32, shape (3, image_h, image_w).

    The arguments are those of `MockGPTDataset`, with a `MultimodalDatasetConfig`.

    Source: Megatron Core, `MockMultimodalDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "MockMultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        """Return a sample; None is sample 0 without loss."""
        shape = 3, self.config.image_h or 0, self.config.image_w or 0
        image = as_tensor(np.zeros(shape, np.float32))
        return self.config.preprocess_func({**super().__getitem__(idx), "image": image})


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
        ...     binidx.MultimodalDataset, [1000, 0, 0], lambda: True, config
        ... )
        >>> train, _, _ = builder.build()
        >>> image = image_bytes(train[0]["images"][0])

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "MultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig
    dataset: IndexedDataset

    def _load_index(self) -> None:
        bounds = self.dataset.document_indices
        documents = self.indices[bounds[self.indices] < bounds[self.indices + 1]]
        try:
            self.document_index = build_serving_order(documents, self.num_samples, self.config.random_seed)
        except IndexBuildError as error:
            raise IndexBuildError(f"{self.dataset_path}, {self.index_split.name} split: {error}") from None

    @cached_property
    def _assemble_text(self) -> GPTAssemble:
        return GPTAssemble.of(self.config, self._pad_token_id)

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
    @with_context
    def build_low_level_dataset(
        dataset_path: str | None, config: MultimodalDatasetConfig, context: BuildContext = DEFAULT_CONTEXT
    ) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair of a prefix; it must have modes.

        Args:
            dataset_path: prefix, a path or any URI.
            config: `mmap_bin_files` and `storage_options` are used.
            context: options of the build.

        Returns:
            The opened pair.
        """
        return open_tokens(IndexedDataset, dataset_path, config, context, multimodal=True)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.document_index)

    def find_sequences(self, idx: int | None) -> tuple[int, int]:
        """Return (start, stop) of the sequences of a sample's document.

        Args:
            idx: number of the sample; a negative one counts from the end, None is sample 0.

        Returns:
            Numbers of stored sequences.

        Raises:
            IndexError: there is no such sample.
        """
        document = self.document_index[self._position(idx)]
        first, end = self.dataset.document_indices[document : document + 2].tolist()
        return first, end

    def spans(self, idx: int | None) -> list[Span]:
        """Return the spans of whole images and of the text that fits.

        Args:
            idx: number of the sample; None is sample 0.

        Returns:
            (sequence, 0, number of its tokens) of each sequence of the document.
        """
        first, end = self.find_sequences(idx)
        lengths = self.dataset.sequence_lengths[first:end].astype(np.int64)
        is_text = self.dataset.sequence_modes[first:end] == TEXT
        capacity = self.config.sequence_length + self.config.add_extra_token_to_sequence
        before = np.cumsum(np.where(is_text, lengths, 0)) - np.where(is_text, lengths, 0)
        counts = np.where(is_text, np.clip(capacity - before, 0, lengths), lengths)
        return [(sequence, 0, count) for sequence, count in zip(range(first, end), counts.tolist(), strict=True)]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the GPT sample of the text, and the images, converted by `preprocess_func`.

        Args:
            idx: number of the sample; None is sample 0 without loss.
            sequences: the contents of its spans.

        Returns:
            The result of `preprocess_func` for the dict described at the class.
        """
        first, end = self.find_sequences(idx)
        modes = self.dataset.sequence_modes[first:end]
        lengths = np.where(modes == TEXT, self.dataset.sequence_lengths[first:end], 0)
        text = [sequence for sequence, mode in zip(sequences, modes, strict=True) if mode == TEXT]
        joined = np.concatenate([np.empty(0, self.dataset.index.dtype), *text])
        sample: dict[str, Any] = {
            **self._assemble_text.assemble_one([joined], joined.dtype, is_padding=idx is None),
            "images": [sequence for sequence, mode in zip(sequences, modes, strict=True) if mode != TEXT],
            "image_modes": as_tensor(modes[modes != TEXT].astype(np.int64)),
            "image_positions": as_tensor(np.cumsum(lengths, dtype=np.int64)[modes != TEXT]),
        }
        return self.config.preprocess_func(sample)


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


def image_bytes(item: NDArray[Any]) -> bytes:
    """Return the image file in an item: bytes stored as uint8, or as int32 by Megatron's `preprocess_mmdata.py`.

        int32    number of padding bytes at the end, 0 to 3; then the file and the padding, four bytes a number

    Args:
        item: one of `images` of a sample, shape (n,).

    Raises:
        FormatError: the item has neither of these two forms.
    """
    if item.dtype == np.uint8:
        return item.tobytes()
    if item.dtype != np.int32 or not len(item) or not 0 <= item[0] <= min(3, 4 * (len(item) - 1)):
        start = f"of {item[0]} first" if len(item) else "without tokens"
        raise FormatError(f"image: {item.dtype} {start}, needs uint8, or int32 that begin with 0 to 3 bytes of padding")
    content = item[1:].tobytes()
    return content[: len(content) - int(item[0])]
