"""Libraries of Hugging Face and Google that run tokenizers: loaded, and asked for the text of ids."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from binidx.errors import BinidxError, ConfigError, FormatError
from binidx.tokenizers.spec import TokenizerSpec, wordpiece_json


def missing_package(package: str) -> str | None:
    """Return a message with the install command if a package, with an extra of the same name, is missing; else None."""
    return None if importlib.util.find_spec(package) else f"{package} is not installed; pip install 'binidx[{package}]'"


class LibraryError(FormatError):
    """Failure of a tokenizer's library on the tokenizer's file or on a text."""

    @classmethod
    @contextlib.contextmanager
    def of_library(cls, subject: str) -> Iterator[None]:
        """Raise this error for the exceptions of a library, also for a panic of Rust code, which is no Exception.

        A PanicException cannot be pickled, so a worker that raised one would look like a killed worker.
        """
        try:
            yield
        except (BinidxError, MemoryError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            kind = "" if type(error) in (Exception, RuntimeError, ValueError) else f"{type(error).__name__}: "
            raise cls(f"{subject}: {kind}{[*str(error).strip().splitlines(), ''][0][:300]}") from None


@functools.lru_cache(maxsize=1)
def load_library(spec: TokenizerSpec, content: bytes) -> Any:
    """Return the tokenizer of its library: a `tokenizers.Tokenizer`, or a `SentencePieceProcessor` for a .model.

    Truncation and padding of a tokenizer.json are left out, which Megatron ignores, too. The last tokenizer is cached:
    it is a process's reference, and encodes texts with new code points for gigatoken.
    """
    if spec.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=content)
    from tokenizers import Tokenizer

    # The library's threads would compete with the other processes of a job; it reads the variable at each call.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.kind == "wordpiece":
        content = wordpiece_json(spec.uri, content, lowercase=spec.lowercase)
    tokenizer: Any = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = spec.specials == "text"
    return tokenizer


def open_decoder(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> Callable[[list[int]], str]:
    """Return a function that decodes ids to readable text, without special tokens and bytes that are not UTF-8.

    The function raises ConfigError for an id outside the vocabulary.

    Args:
        spec: tokenizer of the ids.
        storage_options: fsspec's options of the tokenizer's store.

    Raises:
        ConfigError: the package of the library is not installed.
    """
    content = spec.read_content(storage_options)
    package = "sentencepiece" if spec.kind == "sentencepiece" else "tokenizers"
    if missing_package(package):
        raise ConfigError(f"{spec.uri}: no engine that reads it is installed; pip install 'binidx[{package}]'")
    with LibraryError.of_library(f"{spec.uri}: {package} does not read it"):
        library = load_library(spec, content)

    def decode(ids: list[int]) -> str:
        try:
            if package == "tokenizers" and None in map(library.id_to_token, ids):
                raise IndexError  # it would leave these ids out
            return str(library.decode(ids))
        except (IndexError, KeyError) as error:
            raise ConfigError(
                f"{spec.uri}: id outside the vocabulary (found {max(ids)}, need less than {spec.vocab_size}); "
                "give the tokenizer that made the ids"
            ) from error

    return decode
