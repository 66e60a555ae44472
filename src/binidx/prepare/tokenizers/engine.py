"""Tokenizer engines: UTF-8 in one buffer with offsets in, token ids in one buffer with offsets out.

No text and no token becomes a Python object on the way, unless the engine's library offers nothing else.

`as_stored_tokens` turns ids into the contents of `.bin` and `.idx`, with Megatron's dtype, EOD and empty documents:

    texts         "a b" | ""  | "c"  | ""           ids      5 6 | | 7 |
    documents     ----------  ------   --           tokens   5 6 0 | 7 0 |      EOD 0
                                                    sequence_lengths   3 | 2
                                                    document_indices   0 1 2 2

A text without tokens is not a sequence. A document without a sequence stays a document and gets no EOD: Megatron Core's
tools/preprocess_data.py, Encoder.encode. With `empty_too` it has one sequence, an EOD: preprocess_data_fast.py.
"""

from __future__ import annotations

import importlib.util
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.native.token_files import wrap_rows
from binidx.prepare.text.batch import cumulative_offsets
from binidx.prepare.tokenizers.spec import TokenizerSpec

# Token ids, shape (num_tokens,); start of each text's ids, then the end, shape (num_texts + 1,), from 0.
Encoded: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]


class Engine(Protocol):
    """Tokenizer loaded in this process; runs in one thread. Rows of ENGINES make them: `Row(spec, content)`."""

    name: str

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """Return the ids of each text, with those that the post-processor adds around them.

        Args:
            texts: valid UTF-8, shape (num_bytes,).
            offsets: first byte of each text, then the end of the last; rising, shape (num_texts + 1,).
        """
        ...


class ReferenceEngine(Engine, Protocol):
    """Engine whose ids are right by definition, and which decodes them."""

    def decode(self, ids: list[int]) -> str:
        """Return readable text; special tokens and bytes that are not UTF-8 may be lost."""
        ...


class EngineRow(Protocol):
    """Class of engines, as the table ENGINES holds it.

    Attributes:
        reference_for: kinds of tokenizers whose ids this engine defines.
    """

    name: str
    reference_for: tuple[str, ...]

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        """Return the reason why this engine cannot give the reference's ids here; None if it can."""
        ...

    def __call__(self, spec: TokenizerSpec, content: bytes) -> Engine: ...


def decode_texts(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """Return the texts as Python strings, for libraries that accept nothing else."""
    whole = memoryview(texts.data)
    return [str(whole[start:stop], "utf-8") for start, stop in pairwise(offsets.tolist())]


def add_special_ids(ids: NDArray[np.uint32], bounds: NDArray[np.int64], spec: TokenizerSpec) -> Encoded:
    """Add the post-processor's ids around each text, for libraries without a post-processor."""
    around = len(spec.prefix) + len(spec.suffix)
    if not around:
        return ids, bounds
    wrapped = wrap_rows(ids, bounds, np.uint32, prefix=spec.prefix, suffix=spec.suffix, empty_too=True)
    return wrapped, bounds - bounds[0] + around * np.arange(len(bounds))


def concatenate_ids(lists: list[list[int]]) -> Encoded:
    """Return the ids of Python lists as arrays."""
    bounds = cumulative_offsets([len(ids) for ids in lists])
    return np.fromiter(chain.from_iterable(lists), np.uint32, int(bounds[-1])), bounds


def missing_package(package: str, extra: str) -> str | None:
    """Return a message with the install command if a package is not installed; else None."""
    if importlib.util.find_spec(package):
        return None
    return f"{package} is not installed; pip install 'binidx[{extra}]'"


class Stored(NamedTuple):
    """Documents in the form in which a dataset stores them."""

    tokens: NDArray[Any]  # of all sequences
    sequence_lengths: NDArray[np.int32]  # (num_sequences,)
    document_indices: NDArray[np.int64]  # (num_documents + 1,)


def as_stored_tokens(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    documents: NDArray[np.int64],
    dtype: DTypeLike,
    eod: int | None = None,
    *,
    empty_too: bool = False,
) -> Stored:
    """Return the stored tokens and the index columns of documents.

    Args:
        ids: from an engine, shape (num_ids,).
        offsets: start of each text's ids, then the end of the last, shape (num_texts + 1,).
        documents: first text of each document, then num_texts, shape (num_documents + 1,).
        eod: id added to each document that has tokens; None: nothing is added.
        empty_too: a document without tokens becomes a sequence of one `eod`.

    Raises:
        FormatError: an id outside the dtype.
    """
    bounds = offsets[documents]
    tokens = wrap_rows(ids, bounds, dtype, suffix=() if eod is None else (eod,), empty_too=empty_too)
    lengths = np.diff(offsets)
    nonempty = lengths > 0
    document_indices = cumulative_offsets(nonempty)[documents]
    sequence_lengths = lengths[nonempty].astype(np.int32)
    empty = np.diff(bounds) == 0
    if eod is not None:
        sequence_lengths[document_indices[1:][~empty] - 1] += 1
    if empty_too:
        sequence_lengths = np.insert(sequence_lengths, document_indices[:-1][empty], 1)
        document_indices[1:] += np.cumsum(empty)
    return Stored(tokens, sequence_lengths, document_indices)
