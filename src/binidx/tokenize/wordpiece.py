"""A WordPiece vocabulary as the tokenizer.json of a BERT: what Megatron's BertWordPiece tokenizers read.

Nothing is put around a text and no special token is found in it: both are those tokenizers' way (tokenize() of Google's
BERT; [CLS] and [SEP] are put in by the dataset).
"""

from __future__ import annotations

import json

from binidx.errors import FormatError

UNKNOWN = "[UNK]"
LONGEST_WORD = 200


def parse_vocabulary(uri: str, content: bytes) -> dict[str, int]:
    """Entries by line.

    Raises:
        FormatError: it is no such file.
    """
    # Lines of bytes end at newlines alone; those of a str at U+2028 and others too, which an entry may have.
    lines = (line.decode(errors="replace") for line in content.splitlines())
    entries = {line.strip(): number for number, line in enumerate(lines)}
    if UNKNOWN not in entries:
        raise FormatError(f"{uri}: is no WordPiece vocabulary, needs an entry a line and {UNKNOWN} among them")
    return entries


def wordpiece_json(uri: str, content: bytes, *, lowercase: bool) -> bytes:
    """The tokenizer.json."""
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    model = {
        "type": "WordPiece", "unk_token": UNKNOWN, "continuing_subword_prefix": "##",
        "max_input_chars_per_word": LONGEST_WORD, "vocab": parse_vocabulary(uri, content),
    }  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "normalizer": {**normalizer, "strip_accents": lowercase, "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }).encode()  # fmt: skip
