"""Bytes of each token of a tokenizer, so that C decodes stored tokens to text without the tokenizer's library.

    byte-level BPE     "Ġsea"  ─►  b" sea"        a letter of the entry stands for a byte, as in GPT-2
    SentencePiece      "▁sea"  ─►  b" sea"        and with byte fallback "<0x0A>" ─► b"\\n"
    added tokens       "<|endoftext|>"            their content, special ones too

The text of a document is that of its tokens, one after the other: what `decode` of the library returns with special
tokens, before it replaces bytes that are no UTF-8, and with the blank that SentencePiece puts before a text.

Source: Hugging Face tokenizers, `ByteLevel`, `Metaspace` and `ByteFallback` of its decoders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from binidx.errors import ConfigError
from binidx.native.token_search import TokenTable
from binidx.tokenizers.spec import TokenizerSpec, added_tokens, model_vocabulary, parse_json

SPACE = "▁"
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
"""Bytes that stand for themselves in entries of byte-level BPE; the others follow from U+0100 on, in their order."""

HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(HIDDEN)}


def token_table(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> TokenTable:
    """Return the bytes of each token.

    Args:
        spec: tokenizer of the tokens.
        storage_options: fsspec's options of the tokenizer's store.

    Raises:
        ConfigError: the text of a token depends on its neighbours, as that of WordPiece does.
    """
    content = spec.read_content(storage_options)
    if spec.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_proto=content)
        pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
        return TokenTable.of([_decode_piece(piece, has_bytes=True) for piece in pieces])
    parsed = parse_json(spec.uri, content) if spec.kind == "json" else {}
    decode = _choose_decoding(parsed)
    if decode is None:
        raise ConfigError(
            f"{spec.uri}: tokens have no bytes of their own (found {spec.kind}, need byte-level BPE or SentencePiece); "
            "search for token ids: --tokens"
        )
    entries = {number: decode(entry) for entry, number in model_vocabulary(parsed).items()}
    added = str.encode if decode is _decode_letters else decode
    entries |= {token["id"]: added(token["content"]) for token in added_tokens(parsed)}
    return TokenTable.of([entries.get(number, b"") for number in range(max(entries) + 1)])


def _choose_decoding(parsed: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    steps = json.dumps([parsed.get(step) for step in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in steps:
        return _decode_letters
    has_bytes = bool(parsed.get("model", {}).get("byte_fallback"))
    return (lambda entry: _decode_piece(entry, has_bytes)) if SPACE in steps or has_bytes else None


def _decode_letters(entry: str) -> bytes:
    known = all(letter in BYTE_OF for letter in entry)
    return bytes(BYTE_OF[letter] for letter in entry) if known else entry.encode()


def _decode_piece(piece: str, has_bytes: bool) -> bytes:
    if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()
