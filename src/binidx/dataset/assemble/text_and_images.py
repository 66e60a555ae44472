"""Samples of text and images: each is a document of a multimodal `.bin`/`.idx`, whose sequences have modes.

    sequences of a document     text 0   image 1   text 0   image 1        mode
    text                        ──────             ──────                  concatenated, S tokens
    images                               ▲                  ▲              as stored, with the number of tokens before

Megatron Core writes such files (`preprocess_mmdata.py`) and has a config and made-up samples for them, but no dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, check_given
from binidx.dataset.token_dataset import Assemble, SampleAssemble, SourceRows, SourceTokens
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import FormatError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.order.order_protocols import Numbers

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


@dataclass(repr=False)
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

    image_h: int | None = field(default=None, metadata=affects("samples"))
    image_w: int | None = field(default=None, metadata=affects("samples"))
    preprocess_func: Callable[[dict[str, Any]], dict[str, Any]] = field(default=unchanged, metadata=affects("samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given(self, "a multimodal dataset", "image_h", "image_w")


@dataclass(frozen=True)
class MultimodalAssemble(SampleAssemble):
    """Function that makes the GPT sample of a document's text, and adds its images.

    Args:
        rows: makes the GPT sample.
        dataset: the stored sequences, which have modes.
        preprocess: converts a sample into the model's input.
    """

    rows: GPTAssemble
    dataset: IndexedDataset
    preprocess: Callable[[dict[str, Any]], dict[str, Any]]

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        modes = self.dataset.sequence_modes[spans[:, 0]]
        lengths = np.where(modes == TEXT, self.dataset.sequence_lengths[spans[:, 0]], 0)
        text = [piece for piece, mode in zip(pieces, modes, strict=True) if mode == TEXT]
        joined = np.concatenate([np.empty(0, self.dataset.index.dtype), *text])
        (rows,) = self.rows(SourceTokens(SourceRows(0, [number], [0]), spans[:0], np.array([0, 1]), [joined]))
        sample: dict[str, Any] = {
            **rows,
            "images": [piece for piece, mode in zip(pieces, modes, strict=True) if mode != TEXT],
            "image_modes": as_tensor(modes[modes != TEXT].astype(np.int64)),
            "image_positions": as_tensor(np.cumsum(lengths, dtype=np.int64)[modes != TEXT]),
        }
        return self.preprocess(sample)


@dataclass(frozen=True)
class BlackImageAssemble:
    """Function that adds a black `image` to GPT samples.

    Args:
        rows: makes the GPT samples.
        config: size of the image, and `preprocess_func`.
    """

    rows: Assemble
    config: MultimodalDatasetConfig

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        shape = 3, self.config.image_h or 0, self.config.image_w or 0
        samples = ({**sample, "image": as_tensor(np.zeros(shape, np.float32))} for sample in self.rows(tokens))
        return [*map(self.config.preprocess_func, samples)]


def image_bytes(item: NDArray[Any]) -> bytes:
    """Return the image file in an item: bytes stored as uint8, or as int32 by Megatron's `preprocess_mmdata.py`.

        int32    number of padding bytes at the end, 0 to 3; then the file and the padding, four bytes a number

    Args:
        item: one of `images` of a sample, shape (n,).

    Returns:
        The bytes of the file, without padding.

    Raises:
        FormatError: the item has neither of these two forms.

    Example:
        >>> picture = PIL.Image.open(io.BytesIO(binidx.megatron.image_bytes(train[0]["images"][0])))

    Source: ours; the padding is that of Megatron's script.
    """
    if item.dtype == np.uint8:
        return item.tobytes()
    if item.dtype != np.int32 or not len(item) or not 0 <= item[0] <= min(3, 4 * (len(item) - 1)):
        start = f"of {item[0]} first" if len(item) else "without tokens"
        raise FormatError(f"image: {item.dtype} {start}, needs uint8, or int32 that begin with 0 to 3 bytes of padding")
    content = item[1:].tobytes()
    return content[: len(content) - int(item[0])]
