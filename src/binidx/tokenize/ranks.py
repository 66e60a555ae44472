"""When a tokenizer.json is byte-level BPE by ranks, as tiktoken runs it: the proof, and the ranks.

tiktoken has no list of merges. It joins the two neighbours whose bytes together have the lowest id, and looks up a
whole word before that. A tokenizer.json lists the pairs that may be joined. Both give the same ids if

    the pattern that splits text is one whose meaning both regular expression libraries share (PATTERNS)
    alone     each entry's bytes, joined by ranks until two parts are left, leave a pair that is in the list
    rising    these pairs stand in the list in the order of the ids they give

because whenever two neighbours in any text form an entry, the joins inside them were those of the entry alone, so they
are its one pair. Entries that nothing joins into (some tokenizers keep spare ones) are left out; where the file says
`ignore_merges` a word may be looked up as one of them, and they are refused.

Cost: 5 us an entry, 0.3 s for 50,000. Source: us; tiktoken 0.14 and tokenizers 0.23 behave so.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from binidx.tokenize.patterns import PATTERNS
from binidx.tokenize.spec import TokenizerSpec
from binidx.tokenize.tokenizer_json import added_tokens

PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}
"""GPT-2's letters for bytes: what a byte-level vocabulary is written in."""
# What a merge of bytes must not have; a file may leave them out.
PLAIN = {"unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False}
FLAGS = ("lstrip", "rstrip", "single_word")


class NotRanks(Exception):  # a reason, not an error
    """Why tiktoken would not give the same ids."""


class Ranks(NamedTuple):
    """What tiktoken.Encoding takes."""

    pattern: str
    mergeable: dict[bytes, int]
    added: dict[str, int]  # found in the text before it is split


@lru_cache(maxsize=1)  # asked for a refusal, then for the engine
def ranks_of(spec: TokenizerSpec, content: bytes) -> Ranks:
    """The tokenizer for tiktoken.

    Raises:
        NotRanks: it is none.
    """
    if spec.kind == "tiktoken":
        return Ranks(spec.pattern, parse_ranks(content), dict(spec.special_tokens))
    parsed = json.loads(content)
    added = _added(parsed)
    return Ranks(_pattern(parsed), _mergeable(parsed["model"], set(added), spec.specials != "text"), added)


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """A file of ranks: lines of base64 and a number.

    Raises:
        NotRanks: it is none.
    """
    try:
        rows = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
    except ValueError as error:
        raise NotRanks(f"is no file of ranks: {error}") from error


def _pattern(parsed: Mapping[str, Any]) -> str:
    """What splits the text, as tiktoken is told."""
    if parsed.get("normalizer"):
        raise NotRanks(f"normalises text by {parsed['normalizer']['type']}, which it cannot")
    first = parsed.get("pre_tokenizer") or {"type": "nothing"}
    steps = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    in_bytes = steps and steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"]
    pattern = _regex(steps) if in_bytes else None
    if not pattern:
        raise NotRanks(f"splits text by {' and '.join(step['type'] for step in steps)} in another way than it knows")
    return PATTERNS[pattern]


def _regex(steps: list[Mapping[str, Any]]) -> str | None:
    """The one regular expression among the steps before and in ByteLevel, if it is known."""
    if len(steps) == 1:
        return "gpt2" if steps[0].get("use_regex", True) else None
    split = steps[0]
    isolates = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    regex: str | None = split["pattern"].get("Regex") if isolates else None
    return regex if len(steps) == 2 and not steps[1].get("use_regex", True) and regex in PATTERNS else None


def _added(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Tokens found in the text, where it is clear which."""
    tokens = added_tokens(parsed)
    for token in tokens:
        if any(token.get(flag) for flag in FLAGS):
            raise NotRanks(f"finds {token['content']!r} with {' '.join(flag for flag in FLAGS if token.get(flag))}")
    contents = {token["content"]: token["id"] for token in tokens}
    for short, long in pairwise(sorted(contents)):
        if long.startswith(short):
            raise NotRanks(f"finds both {short!r} and {long!r}, and it does not take the longer one")
    return contents


def _mergeable(model: Mapping[str, Any], added: set[str], unseen: bool) -> dict[bytes, int]:
    """Bytes and id of every entry that merges, proved to be ranks; `unseen`: no added token is left in text."""
    strange = [name for name, plain in PLAIN.items() if (model.get(name) or plain) != plain]
    if model["type"] != "BPE" or strange:
        raise NotRanks(f"is {model['type']} {' '.join(strange)}, which it does not run")
    entries = {spell(entry): number for entry, number in model["vocab"].items() if entry not in added or plain(entry)}
    missing = 256 - sum(len(entry) == 1 for entry in entries)
    if missing:
        raise NotRanks(f"has no entry for {missing} of the 256 bytes")
    spare = {content.encode() for content in added} if unseen else set()
    return _proved(entries, _listed(model["merges"]), spare, bool(model.get("ignore_merges")))


def plain(entry: str) -> bool:
    """Whether it is spelt in GPT-2's letters."""
    return all(letter in BYTES for letter in entry)


def spell(entry: str) -> bytes:
    """The bytes of an entry.

    Raises:
        NotRanks: its letters are no bytes.
    """
    try:
        return bytes(BYTES[letter] for letter in entry)
    except KeyError as error:
        raise NotRanks(f"is not byte-level: its vocabulary has {error}") from error


def _listed(merges: list[Any]) -> dict[tuple[bytes, bytes], int]:
    """Each pair that may be joined, and its place in the list."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return {(spell(left), spell(right)): place for place, (left, right) in enumerate(pairs)}


def _proved(
    entries: dict[bytes, int], listed: dict[tuple[bytes, bytes], int], spare: set[bytes], whole_words: bool
) -> dict[bytes, int]:
    """The entries, if the list joins what ranks join, in the order of ranks."""
    before = -1
    reached = {}
    for entry, number in sorted(entries.items(), key=lambda item: item[1]):
        if len(entry) > 1:
            pair = last_pair(entry, entries)
            if pair is None and whole_words and entry not in spare:
                raise NotRanks(f"looks up {entry!r}, which no merges give, whole")
            if pair is None:
                continue
            if listed.get(pair, -1) <= before:
                raise NotRanks(f"joins {entry!r} from other parts, or in another order, than by its id {number}")
            before = listed[pair]
        reached[entry] = number
    return reached


def last_pair(entry: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that joining by ranks leaves of the entry's bytes before it is whole; None if it stops earlier."""
    parts = [entry[place : place + 1] for place in range(len(entry))]
    while len(parts) > 2:
        ranked = [ranks.get(left + right, -1) for left, right in pairwise(parts)]
        lowest = min((rank for rank in ranked if rank >= 0), default=None)
        if lowest is None:
            return None
        place = ranked.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]
