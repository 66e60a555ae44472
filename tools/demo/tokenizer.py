"""A byte-level BPE tokenizer, trained by the demo, and datasets written with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import binidx

VOCAB_SIZE = 4096
EOD = "<eod>"


def train_bpe(documents: Iterable[str], path: Path, *, vocab_size: int = VOCAB_SIZE) -> Any:
    """Learn merges from the documents, write a tokenizer.json to `path`, and return the `tokenizers.Tokenizer`.

    Bytes are the alphabet, so every text can be encoded and there is no unknown token.

    Source: Sennrich et al. 2016, over bytes as in GPT-2; computed by Hugging Face tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD, "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.save(str(path))
    bpe.encode_special_tokens = True  # a text that contains <eod> has five characters there
    return bpe


def write_dataset(prefix: str, documents: Iterable[str], tokenizer: Any) -> dict[str, int]:
    """Tokenize documents into `prefix.bin` and `prefix.idx`, an EOD after each, and return the counts.

    Args:
        prefix: path or any URI.
        tokenizer: a result of `train_bpe`.
    """
    eod, counts = tokenizer.token_to_id(EOD), {"documents": 0, "text_bytes": 0, "tokens": 0}
    dtype = binidx.DType.optimal_dtype(tokenizer.get_vocab_size())
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        for text in documents:
            tokens = [*tokenizer.encode(text).ids, eod]
            builder.add_document(tokens, [len(tokens)])
            counts["documents"] += 1
            counts["text_bytes"] += len(text.encode())
            counts["tokens"] += len(tokens)
        builder.finalize(f"{prefix}.idx")
    return counts
