"""The three indices of a GPT dataset, straight into their files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.index.building import Building
from binidx.index.document_sample import build_document_and_sample_index, goes_in_order, index_shapes
from binidx.index.documents import Documents
from binidx.index.epochs import EpochPlan
from binidx.index.sample import row_dtype
from binidx.index.shuffle import build_shuffle_index, shuffle_dtype
from binidx.native import RandomState

ARRAYS = ("document_index", "sample_index", "shuffle_index")


def build_gpt_index(
    building: Building,
    sequence_lengths: NDArray[np.int32],
    documents: Documents,
    plan: EpochPlan,
    rng: RandomState,
    sequence_length: int,
    *,
    add_extra_token: bool = True,
    threads: int = 1,
) -> None:
    """document_index, sample_index and shuffle_index; see the functions that build each.

    Memory: with n = len(documents) * plan.num_epochs and s = plan.num_samples, the anonymous memory of a build for a
    local disk is at most 2 MiB a thread and the larger of

        8 n bytes of records while n <= 2**27, above it 4 n of the document index, and
        4 s bytes of the shuffle index, where these are over 1 GiB (8 s from 2**32 samples on).

    The files are page cache: 4 n + 8 s + 4 s bytes, which the kernel writes out and drops at will. For 10**9 documents
    of 1,000 tokens in samples of 4,096: 4 GB of memory and 7 GB of files.

    Cost: 6 ns a document, and as much again for the first touch of its memory and file pages.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices, which goes by 27 n bytes of memory.
    """
    positions, rows = index_shapes(len(documents), plan)
    in_order = goes_in_order(len(documents), plan)
    with (
        building.array("document_index", positions, np.int32, in_order=in_order) as document_index,
        building.array("sample_index", rows, row_dtype(positions[0])) as sample_index,
    ):
        build_document_and_sample_index(
            sequence_lengths,
            documents,
            plan,
            rng,
            sequence_length,
            add_extra_token=add_extra_token,
            out=(document_index, sample_index),
            threads=threads,
        )
    del document_index, sample_index  # they are files by now, and what they were filled in goes
    size = plan.num_samples
    dtype: Any = shuffle_dtype(size)
    with building.array("shuffle_index", (size,), dtype, in_order=False) as shuffle_index:
        build_shuffle_index(plan.num_samples_shuffled_first, size, rng, out=shuffle_index, threads=threads)
