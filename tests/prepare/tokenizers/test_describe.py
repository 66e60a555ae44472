"""What a tokenizer is called says what it is; a spec survives pickle and JSON, and notices another content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.trained_tokenizers import EOT, KINDS, buffers, hard_texts, json_of, lists, save, train_sentencepiece
from tokenizers import Tokenizer

from binidx import describe_tokenizer
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.prepare.tokenizers.engine_choice import reference_engine
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object
from binidx.tokenizers.describe import REBUILT
from binidx.tokenizers.spec import TokenizerSpec, parse_vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_json_is_as_large_as_the_library_says(kind: str, tmp_path: Path) -> None:
    spec = describe_tokenizer(save(kind, tmp_path))
    library = Tokenizer.from_file(spec.uri)
    assert spec.vocab_size == library.get_vocab_size(with_added_tokens=True)
    assert spec.digest == hashlib.sha256(Path(spec.uri).read_bytes()).hexdigest()
    bare = library.encode("a", add_special_tokens=False).ids
    assert [*spec.prefix, *bare, *spec.suffix] == library.encode("a").ids


def test_a_spec_survives_pickle_and_is_json(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("bos eos", tmp_path), eod=EOT, specials="error")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert json.loads(json.dumps(spec.to_json()))["prefix"] == [0]
    assert hash(spec)
    assert (spec.eod, spec.prefix, spec.suffix, spec.specials) == (0, (0,), (0,), "error")
    assert describe_tokenizer(spec.uri, post_processor=False).prefix == ()


def test_the_eod_is_what_was_named_or_what_the_config_beside_it_says(tmp_path: Path) -> None:
    uri = save("gpt2", tmp_path)
    assert describe_tokenizer(uri).eod is None
    assert describe_tokenizer(uri, eod=7).eod == 7
    for eod in ("<eos>", 99_999, -1):
        with pytest.raises(ConfigError, match=f"no token {eod!r} in the vocabulary"):
            describe_tokenizer(uri, eod=eod)
    for token in (EOT, {"content": EOT}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert describe_tokenizer(str(tmp_path)).eod == 0


def test_a_folder_in_a_bucket_is_described_as_on_disk(s3: Bucket, tmp_path: Path) -> None:
    save("bos", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOT}))
    folder = s3.fresh()
    for file in tmp_path.iterdir():
        with create_object(Location.of(f"{folder}/{file.name}")) as target:
            target.write(file.read_bytes())
    found = describe_tokenizer(folder)
    assert {**found.to_json(), "uri": ""} == {**describe_tokenizer(str(tmp_path)).to_json(), "uri": ""}
    assert found.read_content() == (tmp_path / "tokenizer.json").read_bytes()
    alone = f"{s3.fresh()}/tokenizer.json"
    with create_object(Location.of(alone)) as target:
        target.write((tmp_path / "tokenizer.json").read_bytes())
    assert describe_tokenizer(alone).eod is None


def test_another_content_under_the_name_is_an_error(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("gpt2", tmp_path))
    Path(spec.uri).write_text("{}")
    with pytest.raises(ObjectChangedError, match="changed since it was described"):
        spec.read_content()


def test_a_sentencepiece_model_with_an_entry_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = Path(train_sentencepiece(tmp_path / "t.model", model_type="unigram"))
    path.write_bytes(path.read_bytes().replace("▁".encode(), b"\xe2\x96\xff"))
    with pytest.raises(FormatError, match=r"t.model: not a SentencePiece model, or damaged; "):
        describe_tokenizer(str(path))


def test_a_sentencepiece_model_tells_its_size_and_eos(tmp_path: Path) -> None:
    spec = describe_tokenizer(train_sentencepiece(tmp_path / "t.model", model_type="unigram"))
    assert (spec.kind, spec.vocab_size, spec.eod, spec.special_tokens) == ("sentencepiece", 1000, 2, ())


def test_a_name_on_the_hub_is_found_in_its_cache_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ObjectNotFoundError, match=r"org/model: no file, .* hf download org/model fetches it"):
        describe_tokenizer("org/model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ObjectNotFoundError, match=f"did you mean {tmp_path}/tokenizer.json"):
        describe_tokenizer(f"{tmp_path}/tokenizer.js")
    (tmp_path / "text.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"found a file of no known kind, need a tokenizer.json, a .model"):
        describe_tokenizer(f"{tmp_path}/text.jsonl")
    model = tmp_path / "models--org--model"
    for folder in ("refs", "snapshots/abc"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    save("gpt2", model / "snapshots" / "abc")
    assert describe_tokenizer("org/model").uri == f"{model}/snapshots/abc/tokenizer.json"


def test_lines_of_a_vocabulary_end_as_those_of_a_text_file_do(tmp_path: Path) -> None:
    """As in open(), by which Google's BERT reads it: str.splitlines ends one at U+2028 too, and shifts all after it."""
    entries = ["[UNK]", "[CLS]", "a\u2028b", "\x85c", "d\x1ce", "world"]
    for newline in ("\n", "\r\n"):
        content = newline.join(entries).encode()
        (tmp_path / "vocab.txt").write_bytes(content)
        with (tmp_path / "vocab.txt").open(encoding="utf-8") as file:
            needed = {line.strip(): number for number, line in enumerate(file)}
        assert parse_vocabulary("vocab.txt", content) == needed
        assert needed["world"] == 5


def test_what_is_no_tokenizer_says_so(tmp_path: Path) -> None:
    for name, content, error in (
        ("tokenizer.json", "[]", r"tokenizer.json: \$: expected object \(found \[\]\); give a tokenizer.json"),
        ("vocab.json", '{"a": 0}', "a vocab.json needs --merge-file"),
        ("t.model", "nothing", "not a SentencePiece model"),
        ("vocab.txt", "a\nb\n", r"not a WordPiece vocabulary"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(FormatError, match=error):
            describe_tokenizer(str(tmp_path / name))
    with pytest.raises(ObjectNotFoundError):
        describe_tokenizer(str(tmp_path / "missing.json"))


def test_a_tokenizer_that_draws_lots_or_has_an_unknown_post_processor_is_refused(tmp_path: Path) -> None:
    uri = save("gpt2", tmp_path)
    parsed = json.loads(Path(uri).read_text())
    for change, error in (
        ({"model": {**parsed["model"], "dropout": 0.1}}, "dropout 0.1"),
        ({"post_processor": {"type": "Perhaps"}}, "found Perhaps"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [], "special_tokens": {}}}, "the text 0 times"),
    ):
        Path(uri).write_text(json.dumps({**parsed, **change}))
        with pytest.raises(ConfigError, match=error):
            describe_tokenizer(uri)
    with pytest.raises(ConfigError, match=r"specials: unknown .found maybe, need one of parse, text, error"):
        TokenizerSpec("x", "json", "", 1, specials="maybe")


def test_a_folder_whose_config_changes_ids_is_refused(tmp_path: Path) -> None:
    uri = save("gpt2", tmp_path)
    same = {"add_prefix_space": False, "added_tokens_decoder": {"0": {"content": EOT}}}
    for change, error in (
        ({}, None),
        ({"add_prefix_space": True}, "sets add_prefix_space to True"),
        ({"added_tokens_decoder": {"9999": {"content": "<tool>"}}}, "adds the token '<tool>'"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**same, **change}))
        assert describe_tokenizer(uri)
        if error is None:
            assert describe_tokenizer(str(tmp_path))
            continue
        with pytest.raises(ConfigError, match=f"{error}; .*save_pretrained"):
            describe_tokenizer(str(tmp_path))


LLAMA = {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
         "split": False}}  # fmt: skip
SPACES = {"normalizer": {"type": "Prepend", "prepend": "▁"}, "pre_tokenizer": None}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
OWN = {f"{role}_token": "<unk>" for role in ("bos", "unk", "pad", "sep", "cls", "mask")} | {"eos_token": "</s>"}
GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
}
CLASSES: dict[str, tuple[str | None, dict[str, Any], dict[str, Any], bool]] = {
    "none": (None, SPACES, {}, True),
    "the file's": ("PreTrainedTokenizerFast", SPACES, {}, True),
    "llama, other steps": ("LlamaTokenizer", SPACES, {}, False),
    "llama": ("LlamaTokenizer", LLAMA, {}, True),
    "llama, fast": ("LlamaTokenizerFast", LLAMA, {}, True),
    "llama, no space": ("LlamaTokenizer", LLAMA, {"add_prefix_space": False}, False),
    "llama, legacy": ("LlamaTokenizer", LLAMA, {"legacy": True}, False),
    "llama, byte level": ("LlamaTokenizer", {"normalizer": None, "pre_tokenizer": LEVEL}, {}, True),
    "llama, another eos": ("LlamaTokenizer", LLAMA, {"eos_token": "<end>"}, False),
    "llama, tokens left out": ("LlamaTokenizer", LLAMA, {"added_tokens_decoder": {"1": {"content": "<s>"}}}, False),
    "gpt2, other steps": ("GPT2Tokenizer", LLAMA, {}, False),
    "gemma": ("GemmaTokenizer", GEMMA, OWN, True),
    "gemma, its default tokens": ("GemmaTokenizer", GEMMA, {}, False),
    "one that we do not know": ("AlbertTokenizer", LLAMA, {}, False),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_folder_whose_class_is_rebuilt_by_transformers_is_exact_or_refused(case: str, tmp_path: Path) -> None:
    name, steps, config, exact = CLASSES[case]
    parsed = json.loads(json_of("sentencepiece-like")) | steps
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **config}))
    assert describe_tokenizer(f"{tmp_path}/tokenizer.json")
    if exact:
        assert describe_tokenizer(str(tmp_path))
    else:
        with pytest.raises(ConfigError, match=rf"names {name}, which transformers 5 rebuilds .* is used alone"):
            describe_tokenizer(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REBUILT, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_described_folder_has_the_ids_of_autotokenizer(kind: str, name: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save(kind, tmp_path)
    config = {} if name is None else {"tokenizer_class": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    texts = hard_texts(500)
    for folder in (tmp_path, tmp_path / "saved"):
        try:
            library = AutoTokenizer.from_pretrained(str(folder))
            theirs = [library(text)["input_ids"] for text in texts]
        except Exception:
            return  # a class that this kind is not for
        with contextlib.suppress(ConfigError):
            spec = describe_tokenizer(str(folder))
            ids = lists(reference_engine(spec).encode(*buffers(texts)))
            different = [text for text, our, their in zip(texts, ids, theirs, strict=True) if our != their]
            assert different == []
        library.save_pretrained(str(tmp_path / "saved"))
