"""Random datasets, and the two builders that write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from binidx.format.idx import DType
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder

DTYPES = [np.dtype(kind.name).type for kind in DType]


@dataclass
class Document:
    tokens: Any
    lengths: list[int]
    modes: list[int]


def random_documents(rng: np.random.Generator, dtype: Any, count: int) -> list[Document]:
    """Documents with empty sequences, and empty documents, among them; tokens up to the limits of the dtype."""
    documents = []
    for _ in range(count):
        lengths = rng.integers(0, 9, rng.integers(0, 5)).tolist()
        total = sum(lengths)
        if np.dtype(dtype).kind == "f":
            tokens = rng.standard_normal(total).astype(dtype)
        else:
            limits = np.iinfo(dtype)
            tokens = rng.integers(limits.min, limits.max, total, dtype=dtype, endpoint=True)
        documents.append(Document(tokens, lengths, rng.integers(-128, 128, len(lengths)).tolist()))
    return documents


def write(builder: Any, documents: list[Document], multimodal: bool, by_item: bool = False) -> None:
    """Every document through one of the two ways in; with Megatron's builder items must be tensors."""
    for document in documents:
        if by_item:
            starts = np.cumsum([0, *document.lengths])
            for start, length, mode in zip(starts, document.lengths, document.modes, strict=False):
                item = document.tokens[start : start + length]
                builder.add_item(Tensor(item), mode if multimodal else 0)
            builder.end_document()
        else:
            builder.add_document(document.tokens, document.lengths, document.modes if multimodal else None)


class Tensor:
    """What both builders need of a torch tensor, for the dtypes torch lacks, too."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def numpy(self) -> Any:
        return self._array


def build_theirs(
    prefix: Any, documents: list[Document], dtype: Any, multimodal: bool = False, by_item: bool = False
) -> str:
    from helpers.oracle import megatron  # 3 s of CPU time, which most users of this module do not need

    builder = megatron.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal)
    write(builder, documents, multimodal, by_item)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def build_ours(
    prefix: Any, documents: list[Document], dtype: Any, multimodal: bool = False, by_item: bool = False
) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal) as builder:
        write(builder, documents, multimodal, by_item)
        builder.finalize(f"{prefix}.idx")
    return str(prefix)
