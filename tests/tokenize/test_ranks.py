"""What the proof lets through, tiktoken encodes as tokenizers does; and what it must not, it refuses."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.trained_tokenizers import EOT, buffers, hard_texts, lists, save
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from binidx.tokenize.describe import describe_tokenizer
from binidx.tokenize.engines import choose
from binidx.tokenize.patterns import GPT2
from binidx.tokenize.ranks import BYTES, NotRanks, ranks_of
from binidx.tokenize.spec import TokenizerSpec, read_content
from binidx.tokenize.tiktoken_engine import Tiktoken

SPEC = TokenizerSpec("made up", "json", "", 0)
LETTERS = {byte: letter for letter, byte in BYTES.items()}


def made_up(seed: int, size: int) -> dict[str, Any]:
    """A tokenizer.json of merges of a, b and c that a seed draws, as no training would give: most are no ranks."""
    rng = random.Random(seed)
    vocab = {letter: byte for byte, letter in sorted(LETTERS.items())}
    parts, merges = ["a", "b", "c"], []
    for _ in range(size):
        pair = rng.choice(parts), rng.choice(parts)
        if "".join(pair) not in vocab and len("".join(pair)) < 8:
            vocab["".join(pair)] = len(vocab)
            parts.append("".join(pair))
            merges.append(pair)
    if rng.random() < 0.3:  # all ways to make an entry, as Llama 3 lists them
        merges = [
            (entry[:cut], entry[cut:])
            for entry in list(vocab)[256:]
            for cut in range(1, len(entry))
            if entry[:cut] in vocab and entry[cut:] in vocab
        ]
    if rng.random() < 0.3:
        rng.shuffle(merges)
    return {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": rng.random() < 0.3},
    }  # fmt: skip


def test_merges_that_pass_the_proof_give_the_same_ids() -> None:
    passed, rng = 0, random.Random(0)
    for seed in range(600):
        content = json.dumps(made_up(seed, rng.choice([1, 2, 3, 4, 6, 9]))).encode()
        if Tiktoken.refusal(SPEC, content):
            continue
        passed += 1
        texts = ["".join(rng.choice("abc") for _ in range(rng.randrange(12))) for _ in range(60)]
        needed = [encoding.ids for encoding in Tokenizer.from_buffer(content).encode_batch(texts)]
        assert lists(Tiktoken(SPEC, content).encode(*buffers(texts))) == needed, seed
    assert 100 < passed < 500


def changed(content: bytes, **model: Any) -> bytes:
    parsed = json.loads(content)
    parsed["model"] |= model
    return json.dumps(parsed).encode()


def test_what_is_no_ranks_is_refused_with_what_it_is(tmp_path: Path) -> None:
    content = read_content(describe_tokenizer(save("gpt2", tmp_path)))
    model = json.loads(content)["model"]
    vocab, merges = model["vocab"], model["merges"]
    swapped = [merges[1], merges[0], *merges[2:]]
    whole = {**vocab, "ZQXJ": len(vocab)}
    for reason, broken in {
        "or in another order": changed(content, merges=swapped),
        "from other parts": changed(content, merges=merges[1:]),
        "1 of the 256 bytes": changed(content, vocab={entry: n for entry, n in vocab.items() if entry != "!"}),
        "not byte-level: its vocabulary has '漢'": changed(content, vocab={**vocab, "漢": len(vocab)}),
        "looks up b'ZQXJ'": changed(content, vocab=whole, ignore_merges=True),
        "is BPE byte_fallback": changed(content, byte_fallback=True),
        "is WordPiece": changed(content, type="WordPiece"),
    }.items():
        assert reason in str(Tiktoken.refusal(SPEC, broken))
    assert Tiktoken.refusal(SPEC, changed(content, ignore_merges=True)) is None
    assert b"ZQXJ" not in ranks_of(SPEC, changed(content, vocab=whole)).mergeable


@given(st.binary(max_size=30))
def test_a_file_of_ranks_is_one_or_a_reason(content: bytes) -> None:
    reason = Tiktoken.refusal(TokenizerSpec("x", "tiktoken", "", 0), content)
    assert reason is None or "is no file of ranks" in reason


def test_a_file_of_ranks_gives_the_ids_of_the_tokenizer_json_it_is_of(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("gpt2", tmp_path), specials="text")
    rows = ranks_of(spec, read_content(spec)).mergeable.items()
    file = tmp_path / "mine.tiktoken"
    file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(entry), rank) for entry, rank in rows))
    texts = buffers(hard_texts(100))
    ranks = describe_tokenizer(str(file), pattern="gpt2")
    assert (ranks.pattern, ranks.vocab_size) == (GPT2, spec.vocab_size)
    assert lists(choose(ranks).encode(*texts)) == lists(choose(spec, "hf").encode(*texts))
    assert EOT not in dict(ranks.special_tokens)


def test_a_strange_pretokenizer_is_a_reason_and_no_error() -> None:
    for steps in ([], [{"type": "Split"}], [{"type": "Metaspace"}, {"type": "Digits"}]):
        parsed = made_up(0, 3) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        with pytest.raises(NotRanks, match="in another way"):
            ranks_of(SPEC, json.dumps(parsed).encode())
