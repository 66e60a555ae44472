"""The library's exceptions and warnings, and the removal of secrets from messages.

    BinidxError
    ├── ConfigError        ValueError         options contradict each other or the data
    ├── FormatError        ValueError         bytes contradict their header or index
    ├── IndexBuildError    ValueError         an index cannot be built from the given data
    │   ├── BlendError     IndexError         a blend needs more samples of a dataset than it has
    │   └── PeerError                         another process of the run failed; its traceback is in the message
    ├── MismatchError      ValueError         a tokenizer engine returned other ids than its reference
    ├── MissingDriverError ImportError        a package that the call needs is not installed
    ├── WorkerError        RuntimeError       a worker process died repeatedly, or has another binidx
    └── StorageError       OSError
        ├── ObjectNotFoundError FileNotFoundError
        ├── ObjectExistsError   FileExistsError   a put-if-absent, or a target that may not be replaced
        ├── ObjectChangedError                    the stored object is not the opened version
        ├── AccessError         PermissionError   the store refuses the credentials, or there are none
        ├── UnreachableError    ConnectionError   the store does not respond
        ├── SlowCopyError       TimeoutError      the store did not copy bytes in time
        ├── CancelledReadError                    the scope of the read was cancelled
        └── ShortReadError      EOFError          fewer bytes than requested

Messages read `subject: problem (found, needed); the way out`. Each class also derives from the builtin beside it, so
code that catches `ValueError` or `OSError` goes on working. Every message passes through `redacted_text`, the text of
drivers included, and has at most 10,000 characters, as the names and values that it quotes may be hostile. Secrets:

    https://user:password@host/en.jsonl                       https://host/en.jsonl
    https://bucket.host/en.jsonl?X-Amz-Signature=...&part=2   https://bucket.host/en.jsonl?part=2

A warning is logged once for its subject in a process: `warn_once`.

Tracebacks end at the public function that the user called, as its message says the rest; `BINIDX_TRACEBACK=full` keeps
the frames below it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SECRETS = re.compile(
    r"x-(amz|goog|oss)-.*|.*(signature|token|secret|password|credential).*|.*api_?key|key|auth.*|policy|expires"
    r"|(aws|oss)accesskeyid|googleaccessid|key-pair-id|sig|s[evprst]|sdd|sip|spr|srt|sk(oid|tid|t|e|s|v)",
    re.IGNORECASE,
)
"""Query parameters that sign a request or grant access. Source: URLs of S3, GCS, OSS, CloudFront; Azure's SAS."""


def redacted(uri: str) -> str:
    """Return a URI without user, password and signature; URLs of one object signed at different times become equal."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = rest.partition("/")
    path, mark, query = path.partition("?") if scheme in ("http", "https") else (path, "", "")
    host = authority if scheme in AZURE else authority.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{path}{_without_secrets(query) if mark else ''}"


def redacted_text(text: str) -> str:
    """Return a text without the secrets in its URLs: from the first HTTP URL on, all queries lose their signatures."""
    text = USER.sub("", text)
    start = URL.search(text)
    if start is None:
        return text
    # To the end of the text, not of the URL: a URL with a space in its path has no recognizable end.
    return text[: start.start()] + QUERY.sub(lambda query: _without_secrets(query[1]), text[start.start() :])


AZURE = ("abfs", "abfss", "az")
"""Schemes in which the container, not a user, stands before the host: abfs://CONTAINER@HOST/key."""
USER = re.compile(r"""(?<=://)(?<!\babfs://)(?<!\babfss://)(?<!\baz://)[^/\s'"]*@""")
URL = re.compile(r"https?://", re.IGNORECASE)
QUERY = re.compile(r"""\?([^#\s'"<>]+?)(?=[]):;,.?}]*(?:[#\s'"<>]|$))""")
"""Query of a URL within a text, without the punctuation that follows the URL in a sentence."""


def _without_secrets(query: str) -> str:
    """Return the non-secret parameters of a query, after a question mark; "" if there are none."""
    kept = [pair for pair in query.split("&") if pair and not SECRETS.fullmatch(pair.partition("=")[0])]
    return f"?{'&'.join(kept)}" if kept else ""


MOST_CHARACTERS, LONGEST_PATH = 10_000, 4096
LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_PATH},}}")
"""Text without a space that is longer than any path or key of an object."""


def clipped(text: str, most: int) -> str:
    """Return a text of at most about `most` characters: of a longer one the beginning and the end."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]}[{left_out:,} more characters]{text[-(most // 2) :]}"


def _bounded(message: str) -> str:
    if len(message) < LONGEST_PATH:
        return message
    return clipped(LONG_WORD.sub(lambda word: clipped(word[0], 400), message), MOST_CHARACTERS)


class BinidxError(Exception):
    """Base class: `except BinidxError` catches all errors that this library raises, and no others."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_bounded(redacted_text(value)) if isinstance(value, str) else value for value in args))


class ConfigError(BinidxError, ValueError):
    """Options contradict each other or the data."""


class FormatError(BinidxError, ValueError):
    """Stored bytes contradict their header or index."""


class IndexBuildError(BinidxError, ValueError):
    """An index cannot be built from the given data."""


class BlendError(IndexBuildError, IndexError):
    """A blend needs more samples of a dataset than it has."""


class PeerError(IndexBuildError):
    """Another process of the run failed or died; its traceback is in the message."""


class MismatchError(BinidxError, ValueError):
    """A tokenizer engine returned other ids than its reference."""


class MissingDriverError(BinidxError, ImportError):
    """A package that the call needs is not installed; the message has the extra that brings it."""


class WorkerError(BinidxError, RuntimeError):
    """A worker process died repeatedly, or has another binidx."""


class StorageError(BinidxError, OSError):
    """A request to a store failed."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """There is no object under this URI."""


class ObjectExistsError(StorageError, FileExistsError):
    """There is an object under this URI already."""


class ObjectChangedError(StorageError):
    """The stored object is not the version that was opened."""


class AccessError(StorageError, PermissionError):
    """The store refuses these credentials, or there are none."""


class UnreachableError(StorageError, ConnectionError):
    """The store does not respond: another endpoint, host or network is needed."""


class SlowCopyError(StorageError, TimeoutError):
    """A store did not copy bytes in time; it may still be copying."""


class ShortReadError(StorageError, EOFError):
    """A response has fewer bytes than were requested, or a range leaves its object."""


class CancelledReadError(StorageError):
    """A read was cancelled: the `Scope` (`storage.requests.cancellation`) in which it ran was cancelled."""


TRIMMED = (BinidxError, IndexError, KeyboardInterrupt)
"""Errors whose tracebacks are trimmed: an IndexError only if this library raised it, Ctrl-C wherever it came."""


def trim_traceback(error: BaseException) -> None:
    """Remove the frames below this one from the traceback of an error, and from those of its causes.

    Of the causes, the first that is no BinidxError remains: what a driver or the system raised.
    """
    if not isinstance(error, TRIMMED) or os.environ.get("BINIDX_TRACEBACK") == "full":
        return
    if isinstance(error, IndexError) and not _raised_here(error):
        return
    cause = error.__cause__
    while isinstance(cause, BinidxError):
        cause = cause.__cause__
    error.__traceback__, error.__cause__ = None, cause
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def _raised_here(error: BaseException) -> bool:
    """Return whether the frame that raised an error is one of this package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("binidx.")


def trims_traceback(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a public function: of its errors, a traceback shows the user's frames, the call and the cause."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TRIMMED as error:
            trim_traceback(error)
            raise

    return call


def warn_once(subject: str, message: str) -> None:
    """Log a warning, unless this process has already logged one for the subject."""
    mark = object()
    if _warned.setdefault(subject, mark) is mark:  # one step, as files are opened by many threads
        logging.getLogger("binidx").warning("%s: %s", subject, message)


_warned: dict[str, object] = {}
"""Subjects of which this process has logged a warning."""


def check_option_names(
    subject: str, names: Collection[str], known: Collection[str], others: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError if some options are unknown: `did you mean random_seed?` for `seed`.

    Args:
        subject: function that was called.
        names: of the options that were given.
        known: names of all options.
        others: where all are named, for an option that none is similar to.
        hints: name of an unknown option -> what to do.
    """
    if unknown := sorted({*names}.difference(known)):
        from difflib import get_close_matches

        first = unknown[0]
        near = [each for each in known if each.endswith(f"_{first}")] or get_close_matches(first, known, 1)
        way = (hints or {}).get(first) or (f"did you mean {near[0]}?" if near else others)
        raise ConfigError(f"{subject}: unknown option {', '.join(unknown)}; {way}")
