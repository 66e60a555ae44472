"""Samples of text and images: each a document of a multimodal `.bin`/`.idx`, whose sequences have modes.

    sequences of a document     text 0   image 1   text 0   image 1        mode
    text                        ──────             ──────                  one after the other, S tokens
    images                               ▲                  ▲              as stored, and how much text is before each

Megatron Core writes such files (`preprocess_mmdata.py`) and has a config and made-up samples for them, but no dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.gpt import assemble_gpt_sample, build_attention_mask, gpt_recipe
from binidx.dataset.kinds.mock import MockGPTDataset
from binidx.dataset.megatron_dataset import MegatronDataset, required
from binidx.dataset.torch_bridge import Sample, Tensor, as_tensor
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.native.gpt_samples import Recipe
from binidx.native.permutations import RandomState

if TYPE_CHECKING:
    from binidx.dataset.gpt import GPTDataset


TEXT = 0


"""The mode of text; all others are images, or what their user takes them for."""


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample itself."""
    return sample


@dataclass
class MultimodalDatasetConfig(GPTDatasetConfig):
    """What multimodal samples need to know besides.

    Args:
        image_h, image_w: pixels of the images that the model takes; must be given. For `preprocess_func`, and for the
            made-up images of `MockMultimodalDataset`.
        preprocess_func: makes of each sample what the model takes. With workers that are spawned it must pickle: a
            function of a module, or `functools.partial` of one.

    Source: Megatron Core, `MultimodalDatasetConfig`.
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
    """GPT samples of made-up tokens, each with a black `image` of float32, shape (3, image_h, image_w).

    Source: Megatron Core, `MockMultimodalDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "MockMultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        shape = 3, self.config.image_h or 0, self.config.image_w or 0
        image = as_tensor(np.zeros(shape, np.float32))
        return self.config.preprocess_func({**super().__getitem__(idx), "image": image})


class MultimodalDataset(MegatronDataset):
    """Samples of one document each: its text as a GPT sample of S tokens, and its images.

    A sample has what a `GPTDataset`'s has (`tokens`, `labels`, `loss_mask`, `position_ids`, ...), of the text of the
    document cut off or padded to S, and

        images            list of arrays as they are stored, whole, one for each sequence of another mode than 0
        image_modes       int64 (num_images,), their modes
        image_positions   int64 (num_images,), tokens of text before each, also where some of it is cut off

    Then `preprocess_func` makes of it what the model takes; batches are stacked of what it returns, so there the images
    have to be tensors of one shape. `image_bytes` gives the image file in an item.

    Splits divide documents; those without sequences are left out. Every epoch serves all documents in an order of its
    own, a function of the seed.

    Raises:
        IndexBuildError: the split has no documents, and samples were asked of it.

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "MultimodalDataset"

    config: MultimodalDatasetConfig
    config_class = MultimodalDatasetConfig
    dataset: IndexedDataset

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: MultimodalDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        bounds = indexed_dataset.document_indices
        documents = indexed_indices[bounds[indexed_indices] < bounds[indexed_indices + 1]]
        try:
            self.document_index = serving_order(documents, num_samples, config.random_seed)
        except IndexBuildError as error:
            raise IndexBuildError(f"{dataset_path}, {index_split.name} split: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        # What is bound for C holds addresses of this process.
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Documents."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: MultimodalDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair under a prefix, at any URI; it must have been written multimodal."""
        prefix, options = required(dataset_path), config.storage_options
        return IndexedDataset(prefix, multimodal=True, mmap=config.mmap_bin_files, storage_options=options)

    def __len__(self) -> int:
        return len(self.document_index)

    def sequences_of(self, idx: int | None) -> tuple[int, int]:
        """First sequence of the document of a sample, and the end; None is sample 0.

        Raises:
            IndexError: there is no such sample.
        """
        number = 0 if idx is None else int(idx)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {idx}, there are {len(self)}")
        document = self.document_index[number]
        first, end = self.dataset.document_indices[document : document + 2].tolist()
        return first, end

    def spans(self, idx: int | None) -> list[Span]:
        """Whole items, and of the text what fits."""
        first, end = self.sequences_of(idx)
        lengths = self.dataset.sequence_lengths[first:end].astype(np.int64)
        is_text = self.dataset.sequence_modes[first:end] == TEXT
        room = self.config.sequence_length + self.config.add_extra_token_to_sequence
        before = np.cumsum(np.where(is_text, lengths, 0)) - np.where(is_text, lengths, 0)
        counts = np.where(is_text, np.clip(room - before, 0, lengths), lengths)
        return [(sequence, 0, count) for sequence, count in zip(range(first, end), counts.tolist(), strict=True)]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """The GPT sample of the text, and the images."""
        first, end = self.sequences_of(idx)
        modes = self.dataset.sequence_modes[first:end]
        lengths = np.where(modes == TEXT, self.dataset.sequence_lengths[first:end], 0)
        text = [sequence for sequence, mode in zip(sequences, modes, strict=True) if mode == TEXT]
        joined = np.concatenate([np.empty(0, self.dataset.index.dtype), *text])
        sample: dict[str, Any] = {
            **assemble_gpt_sample(cast("GPTDataset", self), idx, [joined]),
            "images": [sequence for sequence, mode in zip(sequences, modes, strict=True) if mode != TEXT],
            "image_modes": as_tensor(modes[modes != TEXT].astype(np.int64)),
            "image_positions": as_tensor(np.cumsum(lengths, dtype=np.int64)[modes != TEXT]),
        }
        return self.config.preprocess_func(sample)

    @cached_property
    def recipe(self) -> Recipe:
        """What C makes of the text."""
        return gpt_recipe(self.config, self._pad_token_id)

    @cached_property
    def shared_attention_mask(self) -> Tensor:
        """Forbids the future, shape (1, S, S)."""
        return as_tensor(build_attention_mask(np.arange(self.config.sequence_length)))


def serving_order(documents: NDArray[np.int32], num_samples: int | None, seed: int) -> NDArray[np.int32]:
    """The document of each sample, shape (num_samples,): epoch by epoch, each shuffled; None is one epoch.

    Raises:
        IndexBuildError: there are no documents, and samples are asked for.
    """
    asked = len(documents) if num_samples is None else num_samples
    if asked and not len(documents):
        raise IndexBuildError(f"no document has a sequence, {asked} samples are asked for")
    rng, order = RandomState(seed), np.empty(asked, np.int32)
    for first in range(0, asked, max(len(documents), 1)):
        epoch = np.ascontiguousarray(documents, np.int32).copy()
        rng.shuffle(epoch)
        order[first : first + len(epoch)] = epoch[: asked - first]
    return order


def image_bytes(item: NDArray[Any]) -> bytes:
    """The image file in an item: bytes stored as uint8, or as int32 by Megatron's `preprocess_mmdata.py`.

        int32    how many bytes of padding are at the end, 0 to 3; then the file and them, four bytes a number

    Raises:
        FormatError: neither of the two.
    """
    if item.dtype == np.uint8:
        return item.tobytes()
    if item.dtype != np.int32 or not len(item) or not 0 <= item[0] <= min(3, 4 * (len(item) - 1)):
        start = f"of {item[0]} first" if len(item) else "without tokens"
        raise FormatError(f"image: {item.dtype} {start}, needs uint8, or int32 that begin with 0 to 3 bytes of padding")
    content = item[1:].tobytes()
    return content[: len(content) - int(item[0])]
