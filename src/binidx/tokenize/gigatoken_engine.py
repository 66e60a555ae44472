"""gigatoken: byte-level BPE at hundreds of megabytes a second, with a cache of words it has met and SIMD to find them.

Its arrays are Arrow's: the UTF-8 goes in and the ids come out as they lie in memory, through awkward. It runs no
post-processor, so what that puts around a text is put here. What it does not know it refuses when it is loaded; what
it does in another way than `tokenizers` is in `wrongly`, and code points that it sees in another way in `unsettled.py`.

Source: gigatoken 0.10.0; its encode_batch over an awkward string array.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.tokenize.engine import Encoded, first_line, missing, surround
from binidx.tokenize.hf_engine import HuggingFace
from binidx.tokenize.spec import TokenizerSpec
from binidx.tokenize.tokenizer_json import added_tokens
from binidx.tokenize.unsettled import unsettled_texts

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
            load(spec, content)
        except Exception as error:  # a RuntimeError, ValueError or its own, by what it stumbles over
            return f"does not read it: {first_line(error)}"
        return wrongly(spec, parsed)

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        self.spec, self.content = spec, content
        self.reference: HuggingFace | None = None
        self.tokenizer = load(spec, content)

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


def load(spec: TokenizerSpec, content: bytes) -> Tokenizer:
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
