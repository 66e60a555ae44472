"""What an engine is: UTF-8 in one buffer with offsets in, token ids in one buffer with offsets out.

No text and no token becomes a Python object on the way, unless the engine's library has no other door.

From token ids to what `.bin` and `.idx` hold: Megatron's dtype, its EOD, its rule for texts of no tokens.

    texts         "a b" | ""  | "c"  | ""           ids      5 6 | | 7 |
    documents     ----------  ------   --           tokens   5 6 0 | 7 0 |      EOD 0
                                                    sequence_lengths   3 | 2
                                                    document_indices   0 1 2 2

A text of no tokens is no sequence, and a document without a sequence stays a document and gets no EOD: Megatron Core's
tools/preprocess_data.py, Encoder.encode. With `empty_too` it has one of an EOD, as in its preprocess_data_fast.py.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.native.token_files import wrap_rows
from binidx.prepare.tokenizers.spec import TokenizerSpec

# Token ids, shape (num_tokens,); where each text's begin and the end of the last, shape (num_texts + 1,), from 0.
Encoded: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]


class Engine(Protocol):
    """A tokenizer made ready in this process, on one thread. Rows of ENGINES make them: `Row(spec, content)`."""

    name: str

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """The ids of each text, with what the post-processor puts around them.

        Args:
            texts: valid UTF-8, shape (num_bytes,).
            offsets: bytes where each text begins, and the end of the last; rising, shape (num_texts + 1,).
        """
        ...


class Reference(Engine, Protocol):
    """One whose ids are right by definition, and which turns them back."""

    def decode(self, ids: list[int]) -> str:
        """Their text, for people: bytes that are no UTF-8 and special tokens may be lost."""
        ...


class EngineRow(Protocol):
    """A class of engines, as the table has it."""

    name: str

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        """Why this engine would not give the reference's ids, or cannot run here; None if it would."""
        ...

    def __call__(self, spec: TokenizerSpec, content: bytes) -> Engine: ...


def text_strings(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """The texts as Python's, for libraries that take nothing else."""
    whole = memoryview(texts.data)
    bounds = offsets.tolist()
    return [str(whole[start:stop], "utf-8") for start, stop in pairwise(bounds)]


def surround(ids: NDArray[np.uint32], bounds: NDArray[np.int64], spec: TokenizerSpec) -> Encoded:
    """What the post-processor makes of each text's ids, for libraries that have none."""
    around = len(spec.prefix) + len(spec.suffix)
    if not around:
        return ids, bounds
    wrapped = wrap_rows(ids, bounds, np.uint32, prefix=spec.prefix, suffix=spec.suffix, empty_too=True)
    return wrapped, bounds - bounds[0] + around * np.arange(len(bounds))


def flat(lists: list[list[int]]) -> Encoded:
    """Python's ids as arrays."""
    bounds = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=bounds[1:])
    return np.fromiter(chain.from_iterable(lists), np.uint32, int(bounds[-1])), bounds


def first_line(error: Exception) -> str:
    """What an error of somebody else's says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def missing(package: str, extra: str) -> str:
    """How a refusal says that a library is not there."""
    return f"{package} is not installed; pip install 'binidx[{extra}]'"


class Stored(NamedTuple):
    """Documents as a dataset has them."""

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
    """The tokens and the index columns of these documents.

    Args:
        ids: what an engine gave, shape (num_ids,).
        offsets: where each text's ids begin, and the end of the last, shape (num_texts + 1,).
        documents: the first text of each document, then num_texts, shape (num_documents + 1,).
        eod: ends each document that has tokens; None: nothing does.
        empty_too: it is all that a document of no tokens has; needs an `eod`.

    Raises:
        FormatError: an id that the dtype does not hold.
    """
    bounds = offsets[documents]
    tokens = wrap_rows(ids, bounds, dtype, suffix=() if eod is None else (eod,), empty_too=empty_too)
    lengths = np.diff(offsets)
    full = lengths > 0
    sequences = np.zeros(len(offsets), np.int64)
    np.cumsum(full, out=sequences[1:])
    document_indices = sequences[documents]
    sequence_lengths = lengths[full].astype(np.int32)
    if eod is not None:
        sequence_lengths[document_indices[1:][np.diff(bounds) > 0] - 1] += 1
    if empty_too:
        empty = np.diff(bounds) == 0
        sequence_lengths = np.insert(sequence_lengths, document_indices[:-1][empty], 1)
        document_indices[1:] += np.cumsum(empty)
    return Stored(tokens, sequence_lengths, document_indices)
