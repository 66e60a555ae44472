"""gigatoken: byte-level BPE at hundreds of megabytes a second, with a cache of words it has met and SIMD to find them.

Its arrays are Arrow's: the UTF-8 goes in and the ids come out as they lie in memory, through awkward. It runs no
post-processor, so what that puts around a text is put here. What it does not know it refuses when it is loaded; what
it does in another way than `tokenizers` is in `wrongly`, and code points that it sees in another way in `unsettled.py`.

Source: gigatoken 0.10.0; its encode_batch over an awkward string array.

Code points that libraries read by different versions of Unicode.

gigatoken 0.10 knows the letters and marks of Unicode 17, tokenizers 0.23 those of 16, and its normal forms are older
still: it splits a word at U+16EA0, which gigatoken takes for a letter, and puts U+0897 elsewhere in NFC. Texts that
have one go through the reference instead (in ordinary text there are none).

Found by encoding every code point through both, alone, in words, doubled and among combining marks; blocks of scripts
that brought new compositions are in as a whole. tests/tokenize/test_unsettled.py does it again for those outside.

Cost: one pass for bytes that begin three or four, 0.05 ms a megabyte of English; a look at each, 1 to 2 ms, of Thai.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.tokenizers.engine import Encoded, first_line, missing, surround
from binidx.prepare.tokenizers.hf_engine import HuggingFace
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.prepare.tokenizers.tokenizer_json import added_tokens

if TYPE_CHECKING:
    from gigatoken import Tokenizer


class Gigatoken:
    """Byte-level BPE of the usual patterns, and SentencePiece BPE with byte fallback."""

    name = "gigatoken"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind not in ("json", "sentencepiece"):
            return f"reads a tokenizer.json or a .model here, not {spec.kind}"
        if not importlib.util.find_spec("gigatoken"):
            return missing("gigatoken", "gigatoken")
        try:
            parsed = json.loads(found_json(spec, content))
            load_gigatoken(spec, content)
        except Exception as error:  # a RuntimeError, ValueError or its own, by what it stumbles over
            return f"does not read it: {first_line(error)}"
        return wrongly(spec, parsed)

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        self.spec, self.content = spec, content
        self.reference: HuggingFace | None = None
        self.tokenizer = load_gigatoken(spec, content)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        # Its threads would compete with the other processes of the job.
        found = self.tokenizer.encode_batch(string_array(texts, offsets), parallel=False).layout
        encoded = surround(found.content.data, found.offsets.data, self.spec)
        if self.spec.kind == "sentencepiece":  # splits by no pattern and normalises nothing
            return encoded
        unsettled = unsettled_texts(texts, offsets)
        return self._by_reference(encoded, texts, offsets, unsettled) if len(unsettled) else encoded

    def _by_reference(
        self, encoded: Encoded, texts: NDArray[np.uint8], offsets: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> Encoded:
        """Encoded, but these texts by tokenizers."""
        if self.reference is None:
            self.reference = HuggingFace(self.spec, self.content)
        rows = np.split(encoded[0][: encoded[1][-1]], encoded[1][1:-1])
        for number in numbers:
            start, stop = offsets[number : number + 2]
            rows[number], _ = self.reference.encode(texts[start:stop], np.array([0, stop - start], np.int64))
        bounds = np.zeros(len(offsets), np.int64)
        np.cumsum([len(row) for row in rows], out=bounds[1:])
        return np.concatenate(rows), bounds


def wrongly(spec: TokenizerSpec, parsed: Mapping[str, Any]) -> str | None:
    """What it reads and then does in another way than the reference."""
    words = [token["content"] for token in added_tokens(parsed) if token.get("single_word")]
    if words:
        return f"finds {words[0]!r} inside words, where it is to be a word"
    strips = [token["content"] for token in added_tokens(parsed) if token.get("lstrip") or token.get("rstrip")]
    if any(content != content.strip() for content in strips):
        return "takes blanks around a token that has blanks in another way"
    if added_tokens(parsed) != (parsed.get("added_tokens") or []):
        return "gives added tokens the ids that stand in the file, which the reference does not read"
    if not parsed["model"].get("byte_fallback") and not plainly_split(parsed):
        return "splits text in another way: its steps are not those of GPT-2, nor isolating patterns before ByteLevel"
    if any(parsed["model"].get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")):
        return "marks the parts of words in another way"
    if '"Precompiled"' in json.dumps(parsed.get("normalizer")):
        return "normalises text by a map of characters in another way"
    if spec.kind == "sentencepiece" and '"Strip"' in json.dumps(parsed.get("normalizer")):
        return "removes extra blanks in another way"
    if spec.kind == "sentencepiece" and not all(token["special"] for token in added_tokens(parsed)):
        return "cuts user-defined symbols out of the text in another way"
    return None


def plainly_split(parsed: Mapping[str, Any]) -> bool:
    """Whether it takes the steps that split a byte-level tokenizer's text as they are; it drops some others unsaid."""
    first = parsed.get("pre_tokenizer") or {"type": "nothing"}
    *before, last = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    isolating = all(
        step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] for step in before
    )
    if last["type"] != "ByteLevel" or not isolating:
        return False
    return not last["add_prefix_space"] if before else bool(last.get("use_regex", True))


def load_gigatoken(spec: TokenizerSpec, content: bytes) -> Tokenizer:
    """Its tokenizer; under the policy `text` it knows of no special tokens."""
    from gigatoken import Tokenizer

    content = found_json(spec, content)
    if spec.specials == "text" or spec.kind == "sentencepiece":
        parsed = json.loads(content)
        parsed["added_tokens"] = [token for token in added_tokens(parsed) if not token.get("special")]
        content = json.dumps(parsed).encode()
    return Tokenizer.from_json(content)


def found_json(spec: TokenizerSpec, content: bytes) -> bytes:
    """The tokenizer.json, or what gigatoken makes of a SentencePiece model."""
    if spec.kind == "json":
        return content
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    return str(sentencepiece_to_tokenizer_json(content)).encode()


def string_array(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
    """The texts as an array of strings, without a copy."""
    import awkward

    characters = awkward.contents.NumpyArray(texts, parameters={"__array__": "char"})
    bounds = awkward.index.Index64(offsets)
    return awkward.Array(awkward.contents.ListOffsetArray(bounds, characters, parameters={"__array__": "string"}))


# First of each run and the one after its last.
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
FIRST_LEAD = 0xDF


"""The first byte of the lowest of them, in UTF-8."""


def begins_of(code_points: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first two bytes of each in UTF-8, as one number; of those from U+0080 on."""
    two = (0xC0 | code_points >> 6) << 8 | 0x80 | code_points & 0x3F
    three = (0xE0 | code_points >> 12) << 8 | 0x80 | code_points >> 6 & 0x3F
    four = (0xF0 | code_points >> 18) << 8 | 0x80 | code_points >> 12 & 0x3F
    return np.where(code_points < 0x800, two, np.where(code_points < 0x10000, three, four))


BEGINS = np.zeros(1 << 16, bool)


BEGINS[begins_of(np.concatenate([np.arange(first, stop) for first, stop in RUNS]))] = True


def unsettled_texts(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The texts that have one, by number, rising."""
    first, stop = int(offsets[0]), int(offsets[-1])
    places = first + np.flatnonzero(texts[first : max(first, stop - 1)] >= FIRST_LEAD)
    places = places[BEGINS[texts[places].astype(np.int64) << 8 | texts[places + 1]]]
    found = code_points_at(texts, places)
    run = np.searchsorted(RUNS[:, 0], found, side="right") - 1
    places = places[(run >= 0) & (found < RUNS[run, 1])]
    return np.unique(np.searchsorted(offsets, places, side="right") - 1)


def code_points_at(texts: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """What begins at each of these bytes, each the first of two or more."""
    lead = texts[places].astype(np.int64)
    extra = 1 + (lead >= 0xE0) + (lead >= 0xF0)
    value = lead & (0x3F >> extra)
    for place in (1, 2, 3):
        more = extra >= place
        value[more] = value[more] << 6 | (texts[places[more] + place] & 0x3F)
    return value
