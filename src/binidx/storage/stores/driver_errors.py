"""Errors of drivers: their HTTP status, our error for each, and causes without secrets.

fsspec, s3fs, gcsfs and aiohttp raise dozens of classes; callers of this package see those of `binidx.errors`, which
name the object. A traceback shows causes, and aiohttp prints whole URLs, signatures and all: a cause that contains a
secret is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from binidx.errors import (
    AccessError,
    BinidxError,
    ConfigError,
    MissingDriverError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    UnreachableError,
    redacted_text,
)
from binidx.storage.store_protocols import DrivenStore, Driver
from binidx.storage.stores.registry import local_path, scheme_of, store_class

TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}
"""HTTP statuses after which the same request may succeed."""

NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
BAD_CREDENTIALS = {"ProfileNotFound", "CredentialRetrievalError", "TokenRetrievalError", "SSOError", "RefreshError"}
UNREACHABLE = {
    "ClientConnectorError",
    "ConnectError",
    "ConnectTimeoutError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "ProxyConnectionError",
    "gaierror",
}
"""Names of classes, or of their bases: botocore's, Google's, aiohttp's, httpx's, builtin."""


class HTTPStatusError(OSError):
    """A response with a status other than success."""

    def __init__(self, status: int, text: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {text}".rstrip())
        self.status, self.headers = status, headers


class FalseAbsenceError(OSError):
    """A 404 for a range of an object that exists."""


class DriverFaultError(ShortReadError):
    """A driver returns another number of bytes than its range has, always: no retry helps."""


class PartsLostError(StorageError):
    """The parts of an unfinished object are gone: another process has published or removed them."""


class DriverError(Exception):
    """Replacement of a driver's exception as the cause of an error: its text, without secrets.

    Attributes:
        status: HTTP status, if there was a response.
        names: names of the exception's class and of the bases of that class.
    """

    def __init__(self, text: str, status: int | None, names: frozenset[str]) -> None:
        super().__init__(text, status, names)
        self.status, self.names = status, names

    def __str__(self) -> str:
        return str(self.args[0])


@contextlib.contextmanager
def storage_errors(uri: str, need_bytes: int = 0) -> Iterator[None]:
    """Turn a driver's exception in the block into an error of `binidx.errors` that names the URI; it is the cause.

    Args:
        need_bytes: the least bytes that a file which the block writes will have, if known.
    """
    try:
        yield
    except BinidxError:
        raise
    except OSError as error:
        path = local_path(uri) if error.errno in NO_ROOM else None
        raise (translated(uri, error) if path is None else no_room(path, error, need_bytes)) from cause_of(error)
    except Exception as error:
        raise translated(uri, error) from cause_of(error)


def translated(uri: str, error: Exception) -> BinidxError:
    """Return the error of `binidx.errors` for a driver's exception."""
    if isinstance(error, ImportError):
        driver = _driver(uri)
        remedy = f"needs {driver.package}; pip install {driver.install}" if driver.package else error
        return MissingDriverError(f"{uri}: {remedy}")
    if isinstance(error, NotADirectoryError | FileNotFoundError) and (path := local_path(uri)) is not None:
        for folder in map(str, Path(path).parents):
            if os.path.isfile(folder):
                return AccessError(f"{folder}: is a file, needed a folder; name another place")
            if folder == error.filename:  # of os.makedirs, as in /proc
                return AccessError(f"{folder}: no folder can be made there; name another place")
    if isinstance(error, IsADirectoryError):
        return AccessError(f"{uri}: is a folder, needed the name of a file; name another place")
    if isinstance(error, FileNotFoundError):
        cause = hidden_cause(error)
        if "bucket does not exist" in str(error):
            return ObjectNotFoundError(
                f"{'/'.join(uri.split('/', 3)[:3])}: no such bucket; correct the name or make it"
            )
        return translated(uri, cause) if cause else ObjectNotFoundError(f"{uri}: no such object")
    if http_status(error) == 404:
        return ObjectNotFoundError(f"{uri}: no such object")
    forbidden = http_status(error) in (401, 403) or str(error).startswith("Forbidden: ")  # the latter is gcsfs'
    names = class_names(error)
    if isinstance(error, PermissionError) or forbidden:
        if local_path(uri) is not None:
            return access_denied(uri)
        return AccessError(
            f"{uri}: access denied ({driver_text(error)}); check the credentials, {_driver(uri).credentials}"
        )
    if names & NO_CREDENTIALS:
        return AccessError(f"{uri}: no credentials found; set {_driver(uri).credentials}")
    if names & BAD_CREDENTIALS:
        return AccessError(f"{uri}: {driver_text(error)}; check the credentials, {_driver(uri).credentials}")
    if str(error).startswith("Invalid endpoint: "):  # botocore's, of a URL without its scheme
        return ConfigError(f"{uri}: {driver_text(error)}; AWS_ENDPOINT_URL or endpoint_url must begin with http(s)://")
    if names & UNREACHABLE:
        way = f", or name a local copy of {uri.rpartition('/')[2]}" if uri.startswith("hf://") else ""
        return UnreachableError(f"{uri}: {driver_text(error)}; check the endpoint and the network{way}")
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        way = f"correct storage_options, which are those of {_driver(uri).package}"
        return ConfigError(f"{uri}: {driver_text(error)}; {way}")
    return StorageError(f"{uri}: {driver_text(error)}")


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def no_room(path: str, error: OSError, need_bytes: int) -> StorageError:
    """Return the error for a local file that does not fit its disk, or whose disk cannot be written."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    need = f", need {need_bytes:,} or more" if need_bytes else ""
    room, way = f" (found {shutil.disk_usage(folder).free:,} bytes free{need})", "make room, or "
    if error.errno == errno.EROFS:
        room = way = ""
    return StorageError(f"{path}: {error.strerror}: {folder}{room}; {way}name a place on another disk")


def access_denied(path: str) -> AccessError:
    """Return the error for a local file that this user may not read or write."""
    return AccessError(
        f"{path}: {os.strerror(errno.EACCES)}; check owner and mode of the file and its folders (ls -ld)"
    )


def _driver(uri: str) -> Driver:
    """Return the driver that the class of a URI's stores names."""
    kind = store_class(scheme_of(uri))
    return kind.driver if isinstance(kind, DrivenStore) else Driver()


def hidden_cause(error: BaseException) -> Exception | None:
    """Return the cause of a FileNotFoundError if the object may exist, as fsspec's http raises it for any failure.

    Return None if there is no object.
    """
    cause = error.__cause__
    names = frozenset() if cause is None else class_names(cause)
    unreachable = bool(names & {"OSError", "ClientConnectionError"}) and "FileNotFoundError" not in names
    refused = getattr(cause, "status", 404) not in (404, 410)
    return cause if isinstance(cause, Exception) and (unreachable or refused) else None


def cause_of(error: BaseException) -> BaseException:
    """Return the error itself, or a `DriverError` in its place if its text or that of its causes contains a secret."""
    if all(redacted_text(text) == text for text in _texts(error)):
        return error
    replacement = DriverError(redacted_text(driver_text(error)), http_status(error), class_names(error))
    replacement.__cause__ = None if error.__cause__ is None else cause_of(error.__cause__)
    return replacement


def _texts(error: BaseException | None) -> Iterator[str]:
    """Yield the texts that a traceback of an error would print: its own, and those of its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def class_names(error: BaseException) -> frozenset[str]:
    """Return the names of an error's class and of its bases: as drivers may not be installed, names are compared."""
    return error.names if isinstance(error, DriverError) else frozenset([kind.__name__ for kind in type(error).__mro__])


def http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status behind a driver's exception; each driver has its own attribute."""
    for cause in causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            return int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
        # aiohttp uses 0 or 400 for a response that it cannot parse: no server sent that.
        carriers = ((cause, "status"), (cause, "code"), (response, "status_code"))
        for carrier, name in () if is_malformed(cause) else carriers:
            value = getattr(carrier, name, None)
            if str(value).isdigit():
                return int(str(value))
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on; nothing for None."""
    while error is not None:
        yield error
        error = error.__cause__


def is_malformed(error: BaseException | None) -> bool:
    """Return whether a driver could not parse a response: a broken status line, a header that is too long."""
    return "HttpProcessingError" in frozenset().union(*map(class_names, causes(error)))


def retry_after(error: BaseException | None) -> float:
    """Return for how many seconds a response forbids further requests: its Retry-After; 0 without one."""
    for cause in causes(error):
        headers, response = getattr(cause, "headers", None), getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's, whose headers are in lower case
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
        if isinstance(headers, Mapping) and headers.get("retry-after"):
            return _seconds_until(headers["retry-after"])
    return 0.0


def _seconds_until(text: str) -> float:
    """Return the seconds in a Retry-After header, which is a number or an HTTP date; 0 for any other text."""
    from email.utils import mktime_tz, parsedate_tz  # rarely needed, and slow to import

    try:
        date = parsedate_tz(text)
        return max(0.0, mktime_tz(date) - time.time() if date else float(text))
    except (ValueError, OverflowError):
        return 0.0


def driver_text(error: BaseException) -> str:
    """Return class and text of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
