"""The C functions over NumPy arrays: the only package that imports the compiled core, a file for each of its C files.

Each wrapper checks dtype, contiguity and bounds before it takes a pointer; the GIL is released inside every call. The
rules of each algorithm, its picture and its price stand at the top of its file in `native/`.
"""

from __future__ import annotations

from binidx.native.arguments import MAX_COUNT
from binidx.native.blend_index import blend_exhaustive, blend_weighted
from binidx.native.check_index import check_documents, check_sequences
from binidx.native.copy_pieces import copy_pieces
from binidx.native.document_sample import MOST_RECORDS, fill_records, shuffle_records
from binidx.native.locate import Orders, Sequences
from binidx.native.masked_mapping import MaskedDocuments, shuffle_rows
from binidx.native.random_state import RandomState
from binidx.native.randperm import torch_randperm
from binidx.native.sample_index import Samples, fill_rows, put_end, sample_index, token_sum

__all__ = [
    "MAX_COUNT",
    "MOST_RECORDS",
    "MaskedDocuments",
    "Orders",
    "RandomState",
    "Samples",
    "Sequences",
    "blend_exhaustive",
    "blend_weighted",
    "check_documents",
    "check_sequences",
    "copy_pieces",
    "fill_records",
    "fill_rows",
    "put_end",
    "sample_index",
    "shuffle_records",
    "shuffle_rows",
    "token_sum",
    "torch_randperm",
]
