"""Tokenizer engines: UTF-8 in one buffer with offsets in, token ids in one buffer with offsets out.

No text and no token becomes a Python object on the way, unless the engine's library offers nothing else.

`build_stored_tokens` turns ids into the contents of `.bin` and `.idx`, with Megatron's dtype, EOD and empty documents:

    texts         "a b" | ""  | "c"  | ""           ids      5 6 | | 7 |
    documents     ----------  ------   --           tokens   5 6 0 | 7 0 |      EOD 0
                                                    sequence_lengths   3 | 2
                                                    document_indices   0 1 2 2

A text without tokens is not a sequence. A document without a sequence stays a document and gets no EOD: Megatron Core's
tools/preprocess_data.py, Encoder.encode. With `empty_too` it has one sequence, an EOD: preprocess_data_fast.py.

The ids of the reference engines are right by definition:

`tokenizers`      tokenizer.json and WordPiece vocabularies. Its fastest call, `encode_batch_fast`, computes no offsets
                  but still makes a Python list of ints for each text: 0.015 s for 10^6 tokens, whose encoding takes
                  0.8 s.
`sentencepiece`   a .model of any type. The library treats control symbols inside text as text, as Megatron's
                  SentencePiece tokenizer does, so the three policies for special tokens are the same.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.native.token_files import wrap_rows
from binidx.prepare.text.batch import cumulative_offsets
from binidx.tokenizers.library import LibraryError, load_library, missing_package
from binidx.tokenizers.spec import TokenizerSpec

# Token ids, shape (num_tokens,); start of each text's ids, then the end, shape (num_texts + 1,), from 0.
Encoded: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]


class Engine(Protocol):
    """Tokenizer loaded in this process; it runs in one thread."""

    name: str

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """Return the ids of each text, with those that the post-processor adds around them.

        Args:
            texts: valid UTF-8, shape (num_bytes,).
            offsets: first byte of each text, then the end of the last; rising, shape (num_texts + 1,).
        """


def decode_texts(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """Return the texts as Python strings, for libraries that accept nothing else.

    Args:
        texts: valid UTF-8, shape (num_bytes,).
        offsets: first byte of each text, then the end of the last, shape (num_texts + 1,).
    """
    whole = memoryview(texts.data)
    return [str(whole[start:stop], "utf-8") for start, stop in pairwise(offsets.tolist())]


def add_special_ids(ids: NDArray[np.uint32], bounds: NDArray[np.int64], spec: TokenizerSpec) -> Encoded:
    """Return ids with the post-processor's ids around those of each text, for libraries without a post-processor.

    Args:
        ids: ids of all texts, shape (num_ids,).
        bounds: start of each text's ids, then the end of the last, shape (num_texts + 1,).
        spec: its prefix and suffix are added.
    """
    around = len(spec.prefix) + len(spec.suffix)
    if not around:
        return ids, bounds
    wrapped = wrap_rows(ids, bounds, np.uint32, prefix=spec.prefix, suffix=spec.suffix, empty_too=True)
    return wrapped, bounds - bounds[0] + around * np.arange(len(bounds))


def concatenate_ids(lists: list[list[int]]) -> Encoded:
    """Return the ids of Python lists as arrays."""
    bounds = cumulative_offsets([len(ids) for ids in lists])
    return np.fromiter(chain.from_iterable(lists), np.uint32, int(bounds[-1])), bounds


def count_specials(ids: NDArray[np.uint32], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """Return the number of special ids in each text, without those of the post-processor, shape (num_texts,).

    Args:
        ids: ids of all texts, shape (num_ids,).
        offsets: start of each text's ids, then the end of the last, shape (num_texts + 1,).
        spec: their tokenizer.
    """
    numbers = [number for _, number in spec.special_tokens]
    counts = np.diff(cumulative_offsets(np.isin(ids, numbers))[offsets])
    return counts - np.count_nonzero(np.isin([*spec.prefix, *spec.suffix], numbers))


def count_unknown(texts: NDArray[np.uint8], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """Return how often each text spells out the unknown token, shape (num_texts,).

    Args:
        texts: UTF-8 of all texts, shape (num_bytes,).
        offsets: first byte of each text, then the end of the last, shape (num_texts + 1,).
        spec: their tokenizer.
    """
    token = spec.unknown.encode()
    if not token:
        return np.zeros(len(offsets) - 1, np.int64)
    data = texts.tobytes()
    return np.array([data.count(token, first, stop) for first, stop in pairwise(offsets.tolist())], np.int64)


class Stored(NamedTuple):
    """Documents in the form in which a dataset stores them."""

    tokens: NDArray[Any]  # of all sequences
    sequence_lengths: NDArray[np.int32]  # (num_sequences,)
    document_indices: NDArray[np.int64]  # (num_documents + 1,)


def build_stored_tokens(
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


class ReferenceEngine(Engine):
    """Engine whose ids are right by definition.

    Attributes:
        package: name of the package that it needs, and of the extra that installs it.
        reference_for: kinds of tokenizers whose ids this engine defines.
        reads: files of these tokenizers, for messages.
    """

    package: str
    reference_for: tuple[str, ...]
    reads: str

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        """Return the reason why this engine cannot be used for this tokenizer; None if it can."""
        return missing_package(cls.package) if spec.kind in cls.reference_for else f"reads {cls.reads}, not {spec.kind}"

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        self.tokenizer, self.wrapped = load_library(spec, content), bool(spec.prefix or spec.suffix)


class HuggingFace(ReferenceEngine):
    """Engine for any tokenizer.json or WordPiece vocab.txt. It uses one thread, as a job has many processes."""

    name, package = "hf", "tokenizers"
    reference_for, reads = ("json", "wordpiece"), "a tokenizer.json or a vocab.txt"

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        strings = decode_texts(texts, offsets)
        with LibraryError.of_library(self.name):
            encodings = self.tokenizer.encode_batch_fast(strings, add_special_tokens=self.wrapped)
        return concatenate_ids([encoding.ids for encoding in encodings])


class SentencePiece(ReferenceEngine):
    """Engine for a .model, through Google's library, which returns lists of ints."""

    name = package = "sentencepiece"
    reference_for, reads = ("sentencepiece",), "a .model"

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        with LibraryError.of_library(self.name):
            ids = self.tokenizer.encode(decode_texts(texts, offsets), out_type=int, num_threads=1)
        return concatenate_ids(ids)
