"""Every engine gives the reference's ids, or says why it would not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import (
    EOT,
    KINDS,
    buffers,
    hard_texts,
    json_of,
    lists,
    plain_texts,
    refusals,
    save,
    train_sentencepiece,
)
from tokenizers import Tokenizer, decoders

from binidx import describe_tokenizer
from binidx.errors import ConfigError
from binidx.prepare.tokenizers.engine_choice import ENGINES, REFERENCES, choose_engine, reference_engine
from binidx.tokenizers.library import open_decoder
from binidx.tokenizers.spec import POLICIES, TokenizerSpec

# Why gigatoken refuses these kinds of tokenizer.json; it takes the others.
REASONS = {
    "another pattern": "Unknown pre_tokenizer Split",
    "nfkc": "Unsupported normalizer",
    "digits": "no Split regex",
    "no pattern": "splits text in another way",
    "digits, then a pattern": "in another way",
    "what a pattern finds is dropped": "in another way",
    "added words": "inside words",
    "strips, and blanks are a token": "blanks around a token in another way, where '  ' is",
    "unigram": "Unsupported model type",
    "wordpiece": "Unsupported model type",
}


@pytest.mark.parametrize("kind", KINDS)
def test_engines_refuse_with_a_reason_or_give_the_ids_of_the_reference(kind: str, tmp_path: Path) -> None:
    uri = save(kind, tmp_path)
    texts, offsets = buffers(hard_texts(250))
    for policy in ("parse", "text"):
        spec = describe_tokenizer(uri, specials=policy)
        content = spec.read_content()
        needed = lists(reference_engine(spec).encode(texts, offsets))
        for name, reason in refusals(spec, content).items():
            expected = {"gigatoken": REASONS.get(kind), "hf": None}.get(name, "not json")
            assert (reason is None) == (expected is None), (name, reason)
            assert expected is None or expected in str(reason)
            if reason is None:
                assert lists(ENGINES[name](spec, content).encode(texts, offsets)) == needed, name


@pytest.mark.parametrize("kind", ["gpt2", "bos", "bos eos", "wordpiece", "sentencepiece-like"])
def test_the_reference_gives_what_the_library_gives_text_by_text(kind: str, tmp_path: Path) -> None:
    uri = save(kind, tmp_path)
    library = Tokenizer.from_file(uri)
    texts = hard_texts(100)
    for wrapped in (True, False):
        spec = describe_tokenizer(uri, post_processor=wrapped)
        needed = [library.encode(text, add_special_tokens=wrapped).ids for text in texts]
        assert lists(reference_engine(spec).encode(*buffers(texts))) == needed


MODELS = {
    "llama 2": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False},
    "blanks removed": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "characters mapped": {"model_type": "bpe", "byte_fallback": True},
    "symbols of the user": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                            "user_defined_symbols": ["<tool>", "the"]},
    "unigram": {"model_type": "unigram"},
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_engines_of_a_sentencepiece_model_agree(kind: str, tmp_path: Path) -> None:
    spec = describe_tokenizer(train_sentencepiece(tmp_path / "t.model", **MODELS[kind]))
    content = spec.read_content()
    texts, offsets = buffers(hard_texts(300))
    needed = lists(reference_engine(spec).encode(texts, offsets))
    taken = {name for name, reason in refusals(spec, content).items() if reason is None}
    assert taken == ({"sentencepiece", "gigatoken"} if kind == "llama 2" else {"sentencepiece"})
    for name in taken:
        assert lists(ENGINES[name](spec, content).encode(texts, offsets)) == needed


@pytest.mark.parametrize("number", [5000, 3])
def test_ids_of_added_tokens_that_the_reference_does_not_read_are_not_believed(number: int, tmp_path: Path) -> None:
    path = Path(save("added tokens", tmp_path))
    parsed = json.loads(path.read_text())
    parsed["added_tokens"][-1] |= {"id": number, "special": True}
    path.write_text(json.dumps(parsed))
    spec = describe_tokenizer(str(path))
    library, texts = Tokenizer.from_file(str(path)), ["the of", "x <tool> the of"]
    assert dict(spec.special_tokens)["the of"] == library.token_to_id("the of") != number
    assert "stand in the file" in str(refusals(spec, spec.read_content())["gigatoken"])
    assert choose_engine(spec).name == "hf"
    assert lists(choose_engine(spec).encode(*buffers(texts))) == lists(reference_engine(spec).encode(*buffers(texts)))


def test_a_wordpiece_vocabulary_finds_no_special_tokens_and_puts_none_around(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nhel\n##lo\n[\n]\nclesep\nsep\nÀ\na\n")
    texts = buffers(["Hello [SEP]", "", "hello sep À", "x"])
    lowered = describe_tokenizer(str(tmp_path / "vocab.txt"), lowercase=True, eod="[SEP]")
    assert lists(choose_engine(lowered).encode(*texts)) == [[4, 5, 6, 9, 7], [], [4, 5, 9, 11], [1]]
    cased = describe_tokenizer(str(tmp_path / "vocab.txt"))
    assert lists(choose_engine(cased).encode(*texts)) == [[1, 6, 1, 7], [], [4, 5, 9, 10], [1]]
    assert (lowered.eod, cased.eod, cased.vocab_size) == (3, None, 12)


def decodable(kind: str, folder: Path) -> str:
    """A tokenizer of each kind that `describe_tokenizer` knows, of ids that give back ASCII as it was."""
    if kind == "sentencepiece":
        return train_sentencepiece(folder / "t.model", model_type="unigram")
    if kind == "wordpiece":
        (folder / "vocab.txt").write_text("[UNK]\nhel\n##lo\nthe\nsea\n")
        return str(folder / "vocab.txt")
    tokenizer = Tokenizer.from_file(save("gpt2", folder))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("kind", REFERENCES)
def test_ids_of_every_kind_become_text_again_and_those_of_another_tokenizer_are_named(
    kind: str, tmp_path: Path
) -> None:
    spec = describe_tokenizer(decodable(kind, tmp_path))
    decode = open_decoder(spec)
    [ids] = lists(reference_engine(spec).encode(*buffers(["hello the sea"])))
    assert decode(ids) == "hello the sea"
    with pytest.raises(ConfigError, match=r"found 999999, need less than \d+.; give the tokenizer that made"):
        decode([*ids, 999_999])


@pytest.mark.parametrize("name", ["gigatoken", "hf"])
def test_no_texts_empty_texts_and_texts_from_the_middle_of_a_buffer(name: str, tmp_path: Path) -> None:
    engine = choose_engine(describe_tokenizer(save("bos eos", tmp_path)), name)
    assert lists(engine.encode(np.empty(0, np.uint8), np.zeros(1, np.int64))) == []
    assert lists(engine.encode(np.empty(0, np.uint8), np.zeros(4, np.int64))) == [[0, 0]] * 3
    texts, offsets = buffers(["left out", "Hello world", "", "\U00016ea0 and more", "left out too"])
    whole = lists(engine.encode(texts, offsets))
    assert lists(engine.encode(texts, offsets[1:5])) == whole[1:4]


def test_a_text_of_megabytes_and_a_word_without_end(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("cl100k", tmp_path))
    rng = random.Random(1)
    long = " ".join(rng.choice(plain_texts())[:40] for _ in range(30_000))
    texts = buffers([long, "ab" * 20_000, " " * 20_000, "é" * 20_000])
    assert lists(choose_engine(spec, "gigatoken").encode(*texts)) == lists(reference_engine(spec).encode(*texts))


def test_what_a_tokenizer_json_says_of_length_is_not_followed(tmp_path: Path) -> None:
    uri = save("gpt2", tmp_path)
    parsed = json.loads(Path(uri).read_text())
    cut, padded = Tokenizer.from_file(uri), Tokenizer.from_file(uri)
    cut.enable_truncation(2)
    padded.enable_padding(length=50)
    needed = lists(reference_engine(describe_tokenizer(uri)).encode(*buffers(["a long text of many words"])))
    for tokenizer in (cut, padded):
        tokenizer.save(uri)
        assert json.loads(Path(uri).read_text()) != parsed
        assert (
            lists(reference_engine(describe_tokenizer(uri)).encode(*buffers(["a long text of many words"]))) == needed
        )


def test_the_fastest_exact_engine_is_chosen_and_all_reasons_are_told(tmp_path: Path) -> None:
    assert choose_engine(describe_tokenizer(save("gpt2", tmp_path))).name == "gigatoken"
    strange = describe_tokenizer(save("digits", tmp_path))
    assert choose_engine(strange).name == "hf"
    with pytest.raises(ConfigError, match=r"sentencepiece: reads a \.model, not json"):
        choose_engine(strange, "sentencepiece")
    with pytest.raises(ConfigError, match="found turbo, need auto or one of gigatoken, sentencepiece"):
        choose_engine(strange, "turbo")


def test_the_table_has_a_reference_for_every_kind_and_rows_under_their_names() -> None:
    assert {row.name for row in REFERENCES.values()} <= set(ENGINES)
    for name, row in ENGINES.items():
        assert row.name == name
    for kind in REFERENCES:
        spec = TokenizerSpec("nowhere", kind, "", 1)
        others = {
            name for name, row in ENGINES.items() if f"not {kind}" in str(row.refusal(spec, json_of("gpt2").encode()))
        }
        assert REFERENCES[kind].name not in others


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_decide_what_becomes_of_a_special_token_in_text(policy: str, tmp_path: Path) -> None:
    spec = describe_tokenizer(save("bos", tmp_path), specials=policy)
    for name in ("gigatoken", "hf"):
        (ids,) = lists(choose_engine(spec, name).encode(*buffers([f"a {EOT} b"])))
        assert ids[0] == 0
        assert ids[1:].count(0) == (0 if policy == "text" else 1)
