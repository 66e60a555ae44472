"""Which sequences make which sample of a masked dataset: BERT, T5.

A sample is a run of whole sequences (sentences) of one document, cut where it has met its target of tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.cache.building import Building
from binidx.native.arguments import MAX_COUNT
from binidx.native.mappings import MaskedDocuments, shuffle_mapping_rows

ARRAYS = ("sample_index",)


ALL_EPOCHS = 2**31 - 2


"""As many as Megatron tries, to reach a number of samples."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MappingPlan:
    """The samples of a masked dataset before they are written.

    Args:
        documents: the documents, judged.
        seed: of the targets; the order has seed + 1.
        num_epochs: whole epochs that are served.
        num_samples: rows of the index.
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
        """Megatron's: uint64 beyond 2^32 - 1 sequences."""
        return np.uint64 if self.documents.c.num_sequences > np.iinfo(np.uint32).max else np.uint32

    def fill(self, rows: NDArray[Any]) -> None:
        """Rows in document order, then shuffled in place."""
        self.documents.fill(rows, self.seed, self.num_epochs)
        shuffle_mapping_rows(rows, self.seed + 1)


def plan_mapping(documents: MaskedDocuments, seed: int, num_samples: int | None) -> MappingPlan:
    """As many whole epochs as give `num_samples`, or one for None.

    Raises:
        IndexBuildError: samples are asked of documents that have none (Megatron loops over 2^31 epochs).
    """
    asked = (1, MAX_COUNT - 1) if num_samples is None else (ALL_EPOCHS, num_samples)
    made, num_epochs = documents.count(seed, *asked)
    if made < (num_samples or 0):
        least = documents.c.least
        raise IndexBuildError(
            f"found {made} samples in {documents.c.num_documents} documents, needs {num_samples}: a document has some "
            f"if it has {least} or more sequences, none of them of more than 512 tokens"
        )
    return MappingPlan(documents, seed, num_epochs, made)


def build_masked_sample_index(building: Building, plan: MappingPlan) -> None:
    """The `sample_index` of a masked dataset: (first sequence, end, tokens aimed at), shape (num_samples, 3).

    Cost: 3 ns a sequence and epoch where short samples are drawn, else of one epoch; 5 ns a row.

    Source: Megatron Core, `build_mapping`.
    """
    with building.array("sample_index", plan.shape, plan.dtype, in_order=False) as rows:
        plan.fill(rows)


def short_ratio(probability: float) -> int:
    """One sample in so many is short. Source: Megatron Core: C's `round`, which takes halves away from zero."""
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
    """Megatron's helper of this name, argument by argument; `verbose` logs where its prints."""
    documents = MaskedDocuments(
        np.ascontiguousarray(docs, np.int64),
        np.ascontiguousarray(sizes, np.int32),
        sequence_length=max_seq_length,
        least=min_num_sent,
        short_ratio=short_ratio(short_seq_prob),
    )
    return _mapped(documents, seed, num_epochs, max_num_samples, verbose)


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
    """Megatron's helper of this name: blocks of a document beside its title, for inverse cloze tasks.

    Returns:
        Shape (num_blocks, 4): first sequence, end, document, number of the block within its epoch.
    """
    documents = MaskedDocuments(
        np.ascontiguousarray(docs, np.int64),
        np.ascontiguousarray(sizes, np.int32),
        sequence_length=max_seq_length,
        least=1 if use_one_sent_blocks else 2,
        titles=np.ascontiguousarray(titles_sizes, np.int32),
    )
    return _mapped(documents, seed, num_epochs, max_num_samples, verbose)


def _mapped(
    documents: MaskedDocuments, seed: int, num_epochs: int, max_num_samples: int, verbose: bool
) -> NDArray[Any]:
    made, epochs = documents.count(seed, num_epochs, min(max_num_samples, MAX_COUNT - 1))
    plan = MappingPlan(documents, seed, epochs, made)
    if verbose:
        logger.info(
            "%d documents (%d empty, %d of one sentence, %d with long sentences): %d samples of %d epochs, %s",
            documents.c.num_documents,
            documents.num_empty,
            documents.num_single,
            documents.num_long,
            made,
            epochs,
            np.dtype(plan.dtype).name,
        )
    rows = np.empty(plan.shape, plan.dtype)
    plan.fill(rows)
    return rows


def check_sample_index(rows: NDArray[Any], first: int, end: int, sequence_length: int) -> None:
    """Raise ValueError unless the rows may be a `sample_index` of sequences `first` .. `end` - 1."""
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype not in (np.uint32, np.uint64):
        raise ValueError(
            f"sample_index: shape {rows.shape} of {rows.dtype}, needs (num_samples, 3) of uint32 or uint64"
        )
    firsts, ends, targets = rows.T
    if len(rows) and not (firsts.min() >= first and (firsts < ends).all() and ends.max() <= end):
        raise ValueError(f"sample_index: sequences {firsts.min()} to {ends.max()}, needs some of {first} to {end}")
    if len(rows) and targets.max() > sequence_length:
        raise ValueError(f"sample_index: a sample of {targets.max()} tokens, needs at most {sequence_length}")
