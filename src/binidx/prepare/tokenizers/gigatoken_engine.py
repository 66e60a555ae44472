"""gigatoken as an engine: what it reads as the reference does, and the texts that go through the reference instead.

gigatoken encodes byte-level BPE at hundreds of megabytes a second, with a cache of known words and SIMD to find them.
Texts go in and ids come out as Arrow arrays, without a copy, through awkward. gigatoken runs no post-processor, so we
add its ids. Tokenizers that it cannot read are refused when they are loaded; `known_differences` refuses those that it
reads differently from `tokenizers`.

Code points of different Unicode versions: gigatoken 0.10 knows the letters and marks of Unicode 17, tokenizers 0.23
those of 16, and its normal forms are older still: it splits a word at U+16EA0, which gigatoken takes for a letter, and
puts U+0897 elsewhere in NFC. Texts with such a code point go through the reference instead; ordinary text has none.

`RUNS` was found by encoding every code point through both, alone, in words, doubled and among combining marks; blocks
of scripts that brought new compositions are included as a whole. tests/prepare/tokenizers/test_unicode_versions.py
repeats this for the others.

Cost of the search: a pass for bytes that begin three or four, 0.05 ms a megabyte of English; a table look-up for each
such byte, 1 to 2 ms a megabyte of Thai.

Source: gigatoken 0.10.0, encode_batch over an awkward string array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.text.batch import cumulative_offsets
from binidx.prepare.tokenizers.engine import Encoded, HuggingFace, add_special_ids, decode_texts
from binidx.tokenizers.library import LibraryError, missing_package
from binidx.tokenizers.spec import TokenizerSpec, added_tokens


class Gigatoken:
    """Engine for byte-level BPE with the usual patterns, and for SentencePiece BPE with byte fallback."""

    name = package = "gigatoken"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind not in ("json", "sentencepiece"):
            return f"reads a tokenizer.json or a .model here, not {spec.kind}"
        if missing := missing_package(cls.package):
            return missing
        try:
            with LibraryError.of_library("does not read it"):
                load_gigatoken(spec, content)
                return known_differences(spec, json.loads(convert_to_json(spec, content)))
        except LibraryError as error:
            return str(error)

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        self.spec, self.content = spec, content
        self.reference: HuggingFace | None = None
        self.tokenizer = load_gigatoken(spec, content)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        # gigatoken's threads would compete with the other processes of the job.
        with LibraryError.of_library(self.name):
            rows = self.tokenizer.encode_batch(string_array(texts, offsets), parallel=False).layout
        encoded = add_special_ids(rows.content.data, rows.offsets.data, self.spec)
        if self.spec.kind == "sentencepiece":  # splits by no pattern and normalises nothing
            return encoded
        numbers = find_new_code_points(texts, offsets)
        return self._encode_by_reference(encoded, texts, offsets, numbers) if len(numbers) else encoded

    def _encode_by_reference(
        self, encoded: Encoded, texts: NDArray[np.uint8], offsets: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> Encoded:
        """Return `encoded` with the ids of the numbered texts replaced by the reference's."""
        if self.reference is None:
            self.reference = HuggingFace(self.spec, self.content)
        rows = np.split(encoded[0][: encoded[1][-1]], encoded[1][1:-1])
        for number in numbers:
            start, stop = offsets[number : number + 2]
            rows[number], _ = self.reference.encode(texts[start:stop], np.array([0, stop - start], np.int64))
        return np.concatenate(rows), cumulative_offsets([len(row) for row in rows])


def known_differences(spec: TokenizerSpec, parsed: Mapping[str, Any]) -> str | None:
    """Return the first feature of a tokenizer that gigatoken reads without an error, but differently; else None.

    Args:
        spec: tokenizer to run.
        parsed: its tokenizer.json.
    """
    tokens, normalizer = added_tokens(parsed), json.dumps(parsed.get("normalizer"))
    words = [token["content"] for token in tokens if token.get("single_word")]
    if words:
        return f"finds {words[0]!r} inside words, where it is to be a word"
    strips = any(token.get("lstrip") or token.get("rstrip") for token in tokens)
    blank = [token["content"] for token in tokens if token["content"] != token["content"].strip()]
    if strips and blank:
        return f"takes blanks around a token in another way, where {blank[0]!r} is a token, too"
    if tokens != (parsed.get("added_tokens") or []):
        return "gives added tokens the ids that stand in the file, which the reference does not read"
    if not parsed["model"].get("byte_fallback") and not splits_like_reference(parsed):
        return "splits text in another way: its steps are not those of GPT-2, nor isolating patterns before ByteLevel"
    if any(parsed["model"].get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")):
        return "marks the parts of words in another way"
    if '"Precompiled"' in normalizer:
        return "normalises text by a map of characters in another way"
    if spec.kind == "sentencepiece" and '"Strip"' in normalizer:
        return "removes extra blanks in another way"
    if spec.kind == "sentencepiece" and not all(token["special"] for token in tokens):
        return "cuts user-defined symbols out of the text in another way"
    return None


def splits_like_reference(parsed: Mapping[str, Any]) -> bool:
    """Return whether gigatoken follows all steps that split the text; it silently ignores some kinds of steps."""
    first = parsed.get("pre_tokenizer") or {"type": "nothing"}
    *before, last = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    isolating = all(
        step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] for step in before
    )
    if last["type"] != "ByteLevel" or not isolating:
        return False
    return not last["add_prefix_space"] if before else bool(last.get("use_regex", True))


def load_gigatoken(spec: TokenizerSpec, content: bytes) -> Any:
    """Return gigatoken's tokenizer; for SentencePiece, or if `spec.specials` is "text", without special tokens."""
    from gigatoken import Tokenizer

    content = convert_to_json(spec, content)
    if spec.specials == "text" or spec.kind == "sentencepiece":
        parsed = json.loads(content)
        parsed["added_tokens"] = [token for token in added_tokens(parsed) if not token.get("special")]
        content = json.dumps(parsed).encode()
    return Tokenizer.from_json(content)


def convert_to_json(spec: TokenizerSpec, content: bytes) -> bytes:
    """Return a tokenizer.json unchanged; convert a SentencePiece model with gigatoken's function."""
    if spec.kind == "json":
        return content
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    return str(sentencepiece_to_tokenizer_json(content)).encode()


def string_array(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
    """Return the texts as an awkward array of strings, without a copy."""
    import awkward

    characters = awkward.contents.NumpyArray(texts, parameters={"__array__": "char"})
    bounds = awkward.index.Index64(offsets)
    return awkward.Array(awkward.contents.ListOffsetArray(bounds, characters, parameters={"__array__": "string"}))


# First code point of each run, and the one after its last.
# fmt: off
RUNS = np.array([
    (0x7FD, 0x7FE), (0x88F, 0x8A0), (0x8CA, 0x8D4), (0x9FE, 0x9FF), (0xC3C, 0xC3D), (0xC5C, 0xC5D), (0xCDC, 0xCDD),
    (0xD3B, 0xD3D), (0xEBA, 0xEBB), (0x1715, 0x1716), (0x1ABF, 0x1AEC), (0x1DF6, 0x1DFB), (0xA7CE, 0xA7D5),
    (0xA7F1, 0xA7F2), (0xA82C, 0xA82D), (0x105C0, 0x10600), (0x10940, 0x1095A), (0x10D24, 0x10D28),
    (0x10D69, 0x10D6E), (0x10EAB, 0x10EAD), (0x10EC5, 0x10EC8), (0x10EFA, 0x10F00), (0x10F46, 0x10F51),
    (0x10F82, 0x10F86), (0x11070, 0x11071), (0x1133B, 0x1133C), (0x11380, 0x11400), (0x1145E, 0x1145F),
    (0x11839, 0x1183B), (0x11930, 0x11960), (0x119E0, 0x119E1), (0x11A34, 0x11A35), (0x11A47, 0x11A48),
    (0x11A99, 0x11A9A), (0x11B60, 0x11B68), (0x11D42, 0x11D46), (0x11D97, 0x11D98), (0x11DB0, 0x11DEA),
    (0x11F41, 0x11F43), (0x16100, 0x16140), (0x16D40, 0x16D80), (0x16EA0, 0x16ED4), (0x16FF0, 0x16FF7),
    (0x187F8, 0x18800), (0x18D09, 0x18D1F), (0x18D80, 0x18DF3), (0x1E08F, 0x1E090), (0x1E130, 0x1E137),
    (0x1E2AE, 0x1E2AF), (0x1E2EC, 0x1E2F0), (0x1E4EC, 0x1E4F0), (0x1E5EE, 0x1E5F0), (0x1E6C0, 0x1E700),
    (0x2B73A, 0x2B740), (0x2CEA2, 0x2CEAE), (0x323B0, 0x3347A),
])

# fmt: on
NEW_CODE_POINT = re.compile("[" + "".join(f"{chr(first)}-{chr(stop - 1)}" for first, stop in RUNS.tolist()) + "]")
FIRST_LEAD = 0xDF
"""First UTF-8 byte of the lowest code point in RUNS."""

LEADS = np.zeros(1 << 16, bool)
"""Table over two bytes, as one big-endian number: True if they begin the UTF-8 of a code point in RUNS."""

LEADS[[int.from_bytes(chr(code).encode()[:2], "big") for run in RUNS.tolist() for code in range(*run)]] = True


def find_new_code_points(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the texts with a code point in RUNS, rising.

    Args:
        texts: valid UTF-8, shape (num_bytes,).
        offsets: first byte of each text, then the end of the last, shape (num_texts + 1,).
    """
    first, stop = int(offsets[0]), int(offsets[-1])
    positions = first + np.flatnonzero(texts[first : max(first, stop - 1)] >= FIRST_LEAD)
    positions = positions[LEADS[texts[positions].astype(np.int64) << 8 | texts[positions + 1]]]
    candidates = np.unique(np.searchsorted(offsets, positions, side="right") - 1)
    numbers = [n for n in candidates.tolist() if NEW_CODE_POINT.search(decode_texts(texts, offsets[n : n + 2])[0])]
    return np.array(numbers, np.int64)
