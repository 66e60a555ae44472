"""Files of ranks give the ids of the tokenizer.json that they were made of."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import EOT, buffers, hard_texts, lists, plain_texts, save, save_ranks
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import FormatError
from binidx.prepare.tokenizers.describe import describe_tokenizer
from binidx.prepare.tokenizers.engine import CL100K, GPT2, LibraryError, parse_ranks
from binidx.prepare.tokenizers.engine_choice import choose_engine


@given(st.binary(max_size=30))
def test_a_file_of_ranks_is_one_or_a_format_error(content: bytes) -> None:
    with contextlib.suppress(FormatError):
        ranks = parse_ranks("x", content)
        lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        assert parse_ranks("x", b"\n".join(lines)) == ranks


def test_a_file_of_ranks_gives_the_ids_of_the_tokenizer_json_it_is_of(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("gpt2", tmp_path), specials="text")
    texts = buffers(hard_texts(100))
    ranks = describe_tokenizer(save_ranks("gpt2", tmp_path / "mine.tiktoken"), pattern="gpt2")
    assert (ranks.pattern, ranks.vocab_size) == (GPT2, spec.vocab_size)
    assert choose_engine(ranks).name == "tiktoken"
    assert lists(choose_engine(ranks).encode(*texts)) == lists(choose_engine(spec, "hf").encode(*texts))
    assert EOT not in dict(ranks.special_tokens)


def test_no_texts_empty_texts_and_texts_from_the_middle_of_a_buffer(tmp_path: Path) -> None:
    engine = choose_engine(describe_tokenizer(save_ranks("gpt2", tmp_path / "mine.tiktoken"), pattern="gpt2"))
    assert lists(engine.encode(np.empty(0, np.uint8), np.zeros(1, np.int64))) == []
    assert lists(engine.encode(np.empty(0, np.uint8), np.zeros(4, np.int64))) == [[]] * 3
    texts, offsets = buffers(["left out", "Hello world", "", "\U00016ea0 and more", "left out too"])
    whole = lists(engine.encode(texts, offsets))
    assert lists(engine.encode(texts, offsets[1:5])) == whole[1:4]


def test_a_text_of_megabytes_and_a_word_without_end(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("cl100k", tmp_path), specials="text")
    ranks = describe_tokenizer(save_ranks("cl100k", tmp_path / "mine.tiktoken"), pattern=CL100K)
    rng = random.Random(1)
    long = " ".join(rng.choice(plain_texts())[:40] for _ in range(30_000))
    texts = buffers([long, "ab" * 20_000, " " * 20_000, "é" * 20_000])
    assert lists(choose_engine(ranks).encode(*texts)) == lists(choose_engine(spec, "hf").encode(*texts))


@pytest.mark.parametrize("policy", ["parse", "text"])
def test_policies_decide_what_becomes_of_a_special_token_in_text(policy: str, tmp_path: Path) -> None:
    uri = save_ranks("gpt2", tmp_path / "r50k_base.tiktoken")
    spec = describe_tokenizer(uri, specials=policy)
    (ids,) = lists(choose_engine(spec).encode(*buffers([f"a {EOT} b"])))
    assert ids.count(dict(spec.special_tokens)[EOT]) == (0 if policy == "text" else 1)


def test_a_panic_of_the_library_is_one_error_that_pickles(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_text("YQ== 0\nYg== 1\n")  # a and b: no entry for any other byte
    engine = choose_engine(describe_tokenizer(str(path), pattern="gpt2"))
    assert lists(engine.encode(*buffers(["ab"]))) == [[0, 1]]
    with pytest.raises(LibraryError, match=r"^tiktoken: PanicException: ") as caught:
        engine.encode(*buffers(["abc"]))
    pickler = pickle.Pickler(data := io.BytesIO())
    pickler.dispatch_table = {}  # without tblib's, which distributed installs: it pickles contexts, too
    pickler.dump(caught.value)
    assert "PanicException" in str(pickle.loads(data.getvalue()))
    path.write_text("YQ== 0\nYg== 0\n")
    with pytest.raises(FormatError, match=r"mine.tiktoken: tiktoken does not read it: "):
        choose_engine(describe_tokenizer(str(path), pattern="gpt2"))
