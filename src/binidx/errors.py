"""URIs as they may be written down or said: without the passwords and signatures that some carry.

https://user:password@host/en.jsonl                       https://host/en.jsonl
https://bucket.host/en.jsonl?X-Amz-Signature=...&part=2   https://bucket.host/en.jsonl?part=2

Every error of ours goes through `redacted_text`, drivers' words in it too.

Every error this library raises on purpose.

    BinidxError
    ├── ConfigError        ValueError         the options contradict each other or the data
    ├── FormatError        ValueError         bytes that are not what their header or index says
    ├── IndexBuildError    ValueError         an index that cannot be built from what was given
    │   ├── BlendError     IndexError         a blend that needs more samples of a dataset than it has
    │   └── PeerError                         another process of the run could not build; its traceback is in the text
    ├── MismatchError      ValueError         a tokenizer engine gave other ids than its reference
    ├── MissingDriverError ImportError        a URI whose filesystem package is not installed
    ├── WorkerError        RuntimeError       a process that was to do the work died, again and again
    └── StorageError       OSError
        ├── ObjectNotFoundError FileNotFoundError
        ├── ObjectExistsError   FileExistsError   a put-if-absent, or a target nobody said to replace
        ├── ObjectChangedError                    not the object that was opened
        ├── AccessError         PermissionError   who asks may not, or nobody knows who asks
        ├── UnreachableError    ConnectionError   nobody answers where the store should be
        ├── CancelledReadError                    the reader was told to stop: storage.cancel
        └── ShortReadError      EOFError          fewer bytes than were asked

Messages read `subject: found, needed; the way out`. Each class is also the builtin it stands beside, so code that
catches `ValueError` or `OSError` goes on working. No message holds a password or a signature: see `redacted`.
"""

from __future__ import annotations

import re

SECRETS = re.compile(
    r"x-(amz|goog|oss)-.*|.*(signature|token|secret|password|credential).*|.*api_?key|key|auth.*|policy|expires"
    r"|(aws|oss)accesskeyid|googleaccessid|key-pair-id|sig|s[evprst]|sdd|sip|spr|srt|sk(oid|tid|t|e|s|v)",
    re.IGNORECASE,
)
"""Names in a query that sign it or grant access. Source: signed URLs of S3, GCS, OSS and CloudFront; Azure's SAS."""


def redacted(uri: str) -> str:
    """Equal for two URLs of the same object that were signed at different times; a path stays as it is."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = rest.partition("/")
    path, mark, query = path.partition("?") if scheme in ("http", "https") else (path, "", "")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{_without_secrets(query) if mark else ''}"


def redacted_text(text: str) -> str:
    """Words with URLs in them: from the first of HTTP on no query keeps what signs or grants."""
    text = USER.sub("", text)
    start = URL.search(text)
    if start is None:
        return text
    # To the end of the text, not of the URL: where that has a space in its path nobody can tell its end.
    return text[: start.start()] + QUERY.sub(lambda found: _without_secrets(found[1]), text[start.start() :])


USER = re.compile(r"""(?<=://)[^/\s'"]*@""")
URL = re.compile(r"https?://", re.IGNORECASE)
QUERY = re.compile(r"""\?([^#\s'"<>]+?)(?=[]):;,.?}]*(?:[#\s'"<>]|$))""")
"""Up to the punctuation behind it."""


def _without_secrets(query: str) -> str:
    """With its question mark, if anything is left."""
    told = [each for each in query.split("&") if each and not SECRETS.fullmatch(each.partition("=")[0])]
    return f"?{'&'.join(told)}" if told else ""


class BinidxError(Exception):
    """The root: `except BinidxError` catches what we raise and nothing else."""

    def __init__(self, *told: object) -> None:
        super().__init__(*(redacted_text(each) if isinstance(each, str) else each for each in told))


class ConfigError(BinidxError, ValueError):
    """The options contradict each other or the data."""


class FormatError(BinidxError, ValueError):
    """Bytes that are not what their header or index says."""


class IndexBuildError(BinidxError, ValueError):
    """An index that cannot be built from what was given."""


class BlendError(IndexBuildError, IndexError):
    """A blend that needs more samples of a dataset than it has."""


class PeerError(IndexBuildError):
    """Another process of the run could not build, or has died; what it raised is in the text."""


class MismatchError(BinidxError, ValueError):
    """A tokenizer engine gave other ids than its reference."""


class MissingDriverError(BinidxError, ImportError):
    """The filesystem package for this URI is not installed."""


class WorkerError(BinidxError, RuntimeError):
    """A process that was to do the work died, again and again."""


class StorageError(BinidxError, OSError):
    """The store did not do what was asked."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """There is no object under this URI."""


class ObjectExistsError(StorageError, FileExistsError):
    """There is an object under this URI already."""


class ObjectChangedError(StorageError):
    """The object under this URI is not the one that was opened."""


class AccessError(StorageError, PermissionError):
    """The store refuses these credentials, or there are none."""


class UnreachableError(StorageError, ConnectionError):
    """Nobody answers where the store should be: another endpoint, host or network is needed."""


class ShortReadError(StorageError, EOFError):
    """The store gave fewer bytes than were asked."""


class CancelledReadError(StorageError):
    """The reader was told to stop before its read had ended."""
