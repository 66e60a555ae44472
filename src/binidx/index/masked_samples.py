"""Sample index of a masked dataset (BERT, T5): the sequences of each sample.

A sample is a run of whole sequences (sentences) of one document, which ends where it has reached its target of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.documents import ArrayAllocator, check_array
from binidx.native.arguments import MAX_COUNT
from binidx.native.mappings import MaskedDocuments, shuffle_mapping_rows

ARRAYS = ("sample_index",)

ALL_EPOCHS = 2**31 - 2
"""Largest number of epochs that Megatron goes through to reach a number of samples."""


@dataclass(frozen=True)
class MappingPlan:
    """Plan of the samples of a masked dataset: their number, and their `sample_index`.

    Args:
        documents: documents of the split.
        seed: seed of the samples' target lengths; seed + 1 is that of their order.
        num_epochs: number of whole epochs that are served.
        num_samples: number of rows of the index.
    """

    documents: MaskedDocuments
    seed: int
    num_epochs: int
    num_samples: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_samples, self.documents.columns

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Megatron's dtype of the rows: uint64 beyond 2^32 - 1 sequences, else uint32."""
        return np.uint64 if self.documents.c.num_sequences > np.iinfo(np.uint32).max else np.uint32

    def fill(self, rows: NDArray[Any]) -> None:
        """Write the rows in document order, then shuffle them in place."""
        self.documents.fill(rows, self.seed, self.num_epochs)
        shuffle_mapping_rows(rows, self.seed + 1)


def plan_mapping(documents: MaskedDocuments, seed: int, num_samples: int | None) -> MappingPlan:
    """Return the plan of the fewest whole epochs that give `num_samples`; of one epoch for None.

    Args:
        documents: documents of the split.
        seed: seed of the samples' target lengths.
        num_samples: number of requested samples.

    Raises:
        IndexBuildError: samples were requested of documents that have none (Megatron loops over 2^31 epochs).
    """
    epochs, samples = (1, MAX_COUNT - 1) if num_samples is None else (ALL_EPOCHS, num_samples)
    available, num_epochs = documents.count(seed, epochs, samples)
    if available < (num_samples or 0):
        least = documents.c.least
        found = f"found {available} samples in {documents.c.num_documents} documents, need {num_samples}"
        rule = f"a document has some if it has {least} or more sequences, none of them of more than 512 tokens"
        raise IndexBuildError(f"{found}: {rule}")
    return MappingPlan(documents, seed, num_epochs, available)


def build_masked_sample_index(allocator: ArrayAllocator, plan: MappingPlan) -> None:
    """Build the `sample_index` of a masked dataset: (first sequence, end, target of tokens), shape (num_samples, 3).

    Args:
        allocator: provides the array, and publishes it when it is complete.
        plan: of the samples.

    Cost: 3 ns a sequence, for every epoch if short samples are drawn, else for one epoch; and 5 ns a row.

    Source: Megatron Core, `build_mapping`.
    """
    with allocator.array("sample_index", plan.shape, plan.dtype, in_order=False) as rows:
        plan.fill(rows)


def short_ratio(probability: float) -> int:
    """Return n if one sample in n is short; 0 if none is.

    Source: Megatron Core: C's `round`, which takes halves away from zero.
    """
    return floor(min(1.0 / probability, 2.0**52) + 0.5) if probability > 0 else 0


def build_mapping(
    docs: NDArray[np.int64],
    sizes: NDArray[np.int32],
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool,
    min_num_sent: int,
) -> NDArray[Any]:
    """Return the samples of a masked dataset, shape (num_samples, 3): first sequence, end, target of tokens.

    Source: Megatron Core's helper of this name, argument by argument; `verbose` prints nothing here.
    """
    rules = {"sequence_length": max_seq_length, "least": min_num_sent, "short_ratio": short_ratio(short_seq_prob)}
    return _build_rows(docs, sizes, num_epochs, max_num_samples, seed, rules)


def build_blocks_mapping(
    docs: NDArray[np.int64],
    sizes: NDArray[np.int32],
    titles_sizes: NDArray[np.int32],
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    verbose: bool,
    use_one_sent_blocks: bool,
) -> NDArray[Any]:
    """Return blocks of sentences that fit into a sample with their document's title, for inverse cloze tasks.

    Returns:
        Shape (num_blocks, 4): first sequence, end, document, number of the block within its epoch.

    Source: Megatron Core's helper of this name, argument by argument; `verbose` prints nothing here.
    """
    titles, least = np.ascontiguousarray(titles_sizes, np.int32), 1 if use_one_sent_blocks else 2
    rules = {"sequence_length": max_seq_length, "least": least, "titles": titles}
    return _build_rows(docs, sizes, num_epochs, max_num_samples, seed, rules)


def _build_rows(
    docs: NDArray[Any], sizes: NDArray[Any], num_epochs: int, max_num_samples: int, seed: int, rules: dict[str, Any]
) -> NDArray[Any]:
    """Return the rows of documents by the `rules`, keyword arguments of `MaskedDocuments`."""
    documents = MaskedDocuments(np.ascontiguousarray(docs, np.int64), np.ascontiguousarray(sizes, np.int32), **rules)
    num_samples, epochs = documents.count(seed, num_epochs, min(max_num_samples, MAX_COUNT - 1))
    plan = MappingPlan(documents, seed, epochs, num_samples)
    rows = np.empty(plan.shape, plan.dtype)
    plan.fill(rows)
    return rows


def check_sample_index(rows: NDArray[Any], first: int, end: int, sequence_length: int) -> None:
    """Raise ValueError unless the rows can be a `sample_index` of sequences `first` to `end` - 1.

    Args:
        rows: (first sequence, end, target of tokens), shape (num_samples, 3).
        first, end: sequences of the split, half open.
        sequence_length: the largest target of tokens.
    """
    check_array("sample_index", rows, (np.uint32, np.uint64), 2)
    if rows.shape[1] != 3:
        raise ValueError(f"sample_index: found shape {rows.shape}, need (num_samples, 3)")
    firsts, ends, targets = rows.T
    if len(rows) and not (firsts.min() >= first and (firsts < ends).all() and ends.max() <= end):
        raise ValueError(f"sample_index: found sequences {firsts.min()} to {ends.max()}, need some of {first} to {end}")
    if len(rows) and targets.max() > sequence_length:
        raise ValueError(f"sample_index: found a sample of {targets.max()} tokens, need at most {sequence_length}")
