"""GPT-2's vocab.json and merges.txt give the ids that Hugging Face's GPT-2 tokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.trained_tokenizers import EOT, buffers, byte_level, hard_texts, lists, plain_texts, refusals

from binidx import describe_tokenizer
from binidx.errors import FormatError
from binidx.prepare.tokenizers.engine_choice import choose_engine

TEXTS = ["Hello  world\n\n\tof 123456 tokens", f"one{EOT}two", "naïve 東京 🙂 \u2028x", "", " it's", "\x00\x1f"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("gpt2")
    byte_level().model.save(str(folder))
    return folder


@pytest.mark.parametrize("engine", ["gigatoken", "hf"])
def test_both_files_give_the_ids_of_transformers(engine: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    library = transformers.GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    spec = describe_tokenizer(str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert refusals(spec, spec.read_content())[engine] is None
    texts = [*TEXTS, *plain_texts()[:20], *hard_texts(200)]
    assert lists(choose_engine(spec, engine).encode(*buffers(texts))) == [library(text).input_ids for text in texts]
    assert (spec.vocab_size, spec.eod) == (len(library), library.eos_token_id)


def test_a_changed_merges_file_is_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "merges.txt").read_text().splitlines()
    fewer = tmp_path / "merges.txt"
    fewer.write_text("\n".join(lines[:-1]))
    vocab = str(folder / "vocab.json")
    digests = {describe_tokenizer(vocab, merges=str(path)).digest for path in (folder / "merges.txt", fewer)}
    assert len(digests) == 2


@pytest.mark.parametrize("vocab", [b"[]", b"{", json.dumps({"a": "b"}).encode()])
def test_what_is_no_vocabulary_is_refused(vocab: bytes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes(vocab)
    with pytest.raises(FormatError, match=r"vocab.json: .*; give a vocab.json"):
        describe_tokenizer(str(tmp_path / "vocab.json"), merges=str(folder / "merges.txt"))


@pytest.mark.parametrize("line", ["a", "a b c", "never seen"])
def test_a_merge_of_what_is_no_entry_is_refused(line: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{line}\n")
    with pytest.raises(FormatError, match="need two entries"):
        describe_tokenizer(str(folder / "vocab.json"), merges=str(tmp_path / "merges.txt"))
