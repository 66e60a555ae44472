"""Text of every Python installation, and its tokens: a byte-level BPE tokenizer, and datasets written with it.

The text is English from the manual and docstrings of Python, and code from its modules.

Nothing is downloaded, and the same Python gives the same documents in the same order:

    en     the language reference that `help()` prints (pydoc_data.topics), then every longer docstring of the
           standard library                                                                          about 2 MB
    code   every fourth module of the standard library, one document a file                          about 2.5 MB

Modules are read as files, never imported. A Python with its library in a zip archive has too little text, which is an
error.
"""

from __future__ import annotations

import ast
import contextlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import binidx
from binidx.errors import ConfigError

# Not written by hand, not always installed, or tables instead of text.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")

# Shorter docstrings are one line that says what the name says.
MIN_DOCSTRING_CHARACTERS = 200

# All of them would be 10 MB: more to move than a minute of training looks at.
MODULE_STRIDE = 4

# Below this a vocabulary of a few thousand entries and two hundred steps would go round in circles.
MIN_CORPUS_BYTES = 500_000


def build_corpus(library: Path | None = None) -> dict[str, list[str]]:
    """Return the documents of both datasets by name, "en" and "code".

    Args:
        library: folder of the standard library; None for this Python's.

    Raises:
        ConfigError: fewer than MIN_CORPUS_BYTES of text in one of them.

    Source: ours.
    """
    sources = read_sources(library or Path(sysconfig.get_path("stdlib")))
    corpus = {"en": [*manual_topics(), *docstrings(sources)], "code": list(sources.values())[::MODULE_STRIDE]}
    for name, documents in corpus.items():
        if (num_bytes := count_bytes(documents)) < MIN_CORPUS_BYTES:
            raise ConfigError(
                f"demo corpus {name!r}: {num_bytes:,} bytes of text in this Python's standard library, "
                f"needs {MIN_CORPUS_BYTES:,}; run the demo with a Python whose library lies in files"
            )
    return corpus


def read_sources(library: Path) -> dict[str, str]:
    """Return path -> text of the modules in UTF-8 below `library`, sorted by path; some folders are skipped."""
    sources = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and not name.name.startswith(SKIPPED_PREFIXES):
            with contextlib.suppress(UnicodeDecodeError, OSError):  # another encoding, a broken link
                sources[name.as_posix()] = path.read_text("utf-8")
    return {name: text for name, text in sources.items() if text}


def manual_topics() -> Iterator[str]:
    """Yield the chapters that `help("topic")` prints; none if the distribution lacks them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield topics[name].strip() + "\n"


def docstrings(sources: dict[str, str]) -> Iterator[str]:
    """Yield the longer docstrings of all modules; those that cannot be parsed, as templates, have none."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for text in sources.values():
        texts: list[str | None] = []
        with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
            warnings.simplefilter("ignore")  # about their escape sequences, which are not ours to mend
            texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        yield from (f"{docstring}\n" for docstring in texts if docstring and len(docstring) >= MIN_DOCSTRING_CHARACTERS)


def count_bytes(documents: list[str]) -> int:
    """Return the number of UTF-8 bytes of all documents."""
    return sum(len(document.encode()) for document in documents)


EOD = "<eod>"


def train_bpe(documents: Iterable[str], path: Path, *, vocab_size: int) -> Any:
    """Learn merges from the documents, write a tokenizer.json to `path`, and return the `tokenizers.Tokenizer`.

    Bytes are the alphabet, so every text can be encoded and there is no unknown token.

    Args:
        documents: texts to learn from.
        path: file to write.
        vocab_size: number of entries, with the special tokens.

    Source: Sennrich et al. 2016, over bytes as in GPT-2; computed by Hugging Face tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD, "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.save(str(path))
    bpe.encode_special_tokens = True  # a text that contains <eod> has five characters there
    return bpe


def write_dataset(prefix: str, documents: Iterable[str], tokenizer: Any) -> dict[str, int]:
    """Tokenize documents into `prefix.bin` and `prefix.idx`, an EOD after each, and return the counts.

    Args:
        prefix: path or any URI.
        documents: texts, one document each.
        tokenizer: a result of `train_bpe`.
    """
    eod, counts = tokenizer.token_to_id(EOD), {"documents": 0, "text_bytes": 0, "tokens": 0}
    dtype = binidx.DType.optimal_dtype(tokenizer.get_vocab_size())
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        for text in documents:
            tokens = [*tokenizer.encode(text).ids, eod]
            builder.add_document(tokens, [len(tokens)])
            counts["documents"] += 1
            counts["text_bytes"] += len(text.encode())
            counts["tokens"] += len(tokens)
        builder.finalize(f"{prefix}.idx")
    return counts
