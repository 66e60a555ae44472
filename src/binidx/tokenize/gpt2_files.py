"""GPT-2's two files, `vocab.json` and `merges.txt`, as the tokenizer.json that Hugging Face makes of them.

Source: transformers, GPT2Tokenizer; tokenizers, models/bpe/model.rs, which reads merges.txt.
"""

from __future__ import annotations

import json

from binidx.errors import FormatError
from binidx.json_models import JsonFile

END = "<|endoftext|>"
"""The one special token, if the vocabulary has it."""


VOCAB_FILE = JsonFile(dict[str, int], hint="needed a vocab.json, an object of entries and their ids")


def gpt2_json(uri: str, vocab: bytes, merges: bytes) -> bytes:
    """The tokenizer.json.

    Raises:
        FormatError: they are no such files.
    """
    entries = VOCAB_FILE.decode(vocab, uri)
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "vocab": entries, "merges": _merges(uri, merges, entries),
    }  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
        "added_tokens": [{"id": entries[END], "content": END, **end}] if END in entries else [],
        "post_processor": {**level, "trim_offsets": False}, "decoder": level, "model": model,
    }).encode()  # fmt: skip


def _merges(uri: str, merges: bytes, entries: dict[str, int]) -> list[list[str]]:
    """Pairs of entries, in their order."""
    # Lines of bytes end at newlines alone; those of a str at others too, which a merge may have.
    lines = [line.decode(errors="replace") for line in merges.splitlines()]
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2 or any(part not in entries for part in (*pair, "".join(pair))):
            raise FormatError(f"merges of {uri}: {' '.join(pair)!r}, needs two entries of it whose union is a third")
    return pairs
