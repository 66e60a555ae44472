"""Tokenizers of many kinds, trained on a little text, and texts that are hard on them."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo.corpus import build_corpus
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from binidx.prepare.tokenizers.engine import Encoded
from binidx.prepare.tokenizers.engine_choice import ENGINES
from binidx.tokenizers.describe import QWEN2
from binidx.tokenizers.spec import TokenizerSpec

EOT = "<|endoftext|>"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Patterns of encodings of tiktoken, and of the tokenizers of many models after them."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def refusals(spec: TokenizerSpec, content: bytes) -> dict[str, str | None]:
    """For each engine the reason why it cannot be used; None if it gives the reference's ids."""
    return {name: row.refusal(spec, content) for name, row in ENGINES.items()}


@functools.cache
def plain_texts() -> list[str]:
    return build_corpus()["en"][:150]


def byte_level(pre: Any = None, norm: Any = None, added: Sequence[AddedToken] = (), post: Any = None) -> Tokenizer:
    """Byte-level BPE of 1,200 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if norm is not None:
        tokenizer.normalizer = norm
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    train(tokenizer, trainers.BpeTrainer(
        vocab_size=1200, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False,
    ))  # fmt: skip
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(plain_texts(), trainer)
    return tokenizer


def split(pattern: str) -> Any:
    """As the tokenizers of GPT-4, Llama 3 and Qwen split text."""
    byte_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", False), byte_letters])


def sentencepiece_like(pre: Any = None, norm: Any = None) -> Tokenizer:
    """BPE with byte fallback, as Llama 2 has it in its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if norm is not None:
        tokenizer.normalizer = norm
    specials = ["<unk>", "<s>", "</s>", *BYTES]
    return train(tokenizer, trainers.BpeTrainer(
        vocab_size=1200, special_tokens=specials, max_token_length=16, show_progress=False,
    ))  # fmt: skip


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return train(tokenizer, trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False,
    ))  # fmt: skip


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    train(tokenizer, trainers.WordPieceTrainer(
        vocab_size=1200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False,
    ))  # fmt: skip
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def around(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[(EOT, 0)])


SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "gpt2": byte_level,
    "gpt2 with a space before": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "cl100k": lambda: byte_level(split(CL100K)),
    "qwen2": lambda: byte_level(split(QWEN2), normalizers.NFC()),
    "o200k": lambda: byte_level(split(O200K)),
    "another pattern": lambda: byte_level(split("[a-z]+|[^a-z]+")),
    "nfkc": lambda: byte_level(norm=normalizers.NFKC()),
    "digits": lambda: byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])),
    "no pattern": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "digits, then a pattern": lambda: byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), split(CL100K),
    ])),
    "what a pattern finds is dropped": lambda: byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CL100K), "removed", False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])),
    "added tokens": lambda: byte_level(added=[AddedToken("<tool>", normalized=False), AddedToken("the of")]),
    "added words": lambda: byte_level(added=[AddedToken("the", single_word=True)]),
    "strips": lambda: byte_level(added=[AddedToken("<mask>", special=True, lstrip=True)]),
    "strips, and blanks are a token": lambda: byte_level(added=[AddedToken("</tool>", rstrip=True), AddedToken("  ")]),
    "one begins another": lambda: byte_level(
        added=[AddedToken("<|end", special=True), AddedToken("<|endof", special=True)]
    ),
    "bos": lambda: byte_level(split(CL100K), post=around(f"{EOT} $A")),
    "bos eos": lambda: byte_level(post=processors.Sequence([processors.ByteLevel(), around(f"{EOT} $A {EOT}")])),
    "sentencepiece-like": lambda: sentencepiece_like(norm=SPACES),
    "sentencepiece-like, words": lambda: sentencepiece_like(pre=pre_tokenizers.Metaspace()),
    "unigram": unigram,
    "wordpiece": wordpiece,
}  # fmt: skip


def save(kind: str, folder: Path) -> str:
    """A tokenizer.json of this kind."""
    path = folder / "tokenizer.json"
    path.write_text(json_of(kind))
    return str(path)


@functools.cache
def json_of(kind: str) -> str:
    """Of this kind's tokenizer.json; some take seconds to train."""
    return str(KINDS[kind]().to_str())


def train_sentencepiece(path: Path, **options: Any) -> str:
    """A .model."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    lines = [line for text in plain_texts() for line in text.split("\n") if line]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=1000, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return str(path)


HARD = [
    EOT, "<tool>", "</tool>  ", "<mask>", "the", "the of", "<|end", "<|endof", "[UNK]", "[SEP]", "<s>", "</s>",
    "<unk>", "<0x0A>", " ", "  ", "\n", "\r\n", "\t", "'s", "'S", "'ſ", "don't", "123456", "é",
    "e\u0301", "ﬁ", "İ", "漢字", "👩\u200d👧", "\x00", "\u2028", "\u00a0", "\u3000", "١٢٣", "Ⅷ", "abc",
    "Hello", "_", " the", "...", "ｆｕｌｌ", "กำ", "\ufeff", "𝕏", "½", "नमस्ते", "\u0897", "\U00016ea0",
    "▁", "▁▁",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Of what tokenizers trip over, and of any code points."""
    count = rng.choice([0, 1, 2, 5, 20, 100])
    return "".join(rng.choice(HARD) if rng.random() < 0.7 else chr(any_code_point(rng)) for _ in range(count))


def any_code_point(rng: random.Random) -> int:
    point = rng.choice([rng.randrange(1, 0x80), rng.randrange(0x80, 0x3000), rng.randrange(0x110000)])
    return 0xFFFD if 0xD800 <= point < 0xE000 else point


def hard_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [random_text(rng) for _ in range(count)] + plain_texts()[:20]


def buffers(texts: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One buffer of UTF-8, and where each text begins."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def lists(encoded: Encoded) -> list[list[int]]:
    """The ids of each text, as Python's."""
    ids, offsets = encoded
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert len(ids) == offsets[-1]
    assert offsets[0] == 0
    return [row.tolist() for row in np.split(ids, offsets[1:-1])] if len(offsets) > 1 else []
