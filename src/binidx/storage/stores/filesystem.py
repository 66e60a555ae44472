"""fsspec, met in one place: a URI becomes a filesystem and a path, and its many exceptions become our few.

Which options, endpoints, credentials and profiles hold is fsspec's business (storage_options, FSSPEC_* and AWS_*
variables, its config files); we only add what random reading needs and nobody sets: see `tuned`.

What we add to the options of a driver: what random reading needs and nobody sets. What the user gave wins.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from binidx.errors import (
    AccessError,
    BinidxError,
    ConfigError,
    MissingDriverError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from binidx.storage.settings import ReadSettings, drivers_own
from binidx.storage.stores.driver_errors import cause_of, driver_text, http_status, names_of

# protocol -> what to install, and the pip argument for it
DRIVERS = {
    "s3": ("s3fs", "'binidx[s3]'"),
    "s3a": ("s3fs", "'binidx[s3]'"),
    "gs": ("gcsfs", "'binidx[gcs]'"),
    "gcs": ("gcsfs", "'binidx[gcs]'"),
    "http": ("aiohttp", "aiohttp"),
    "https": ("aiohttp", "aiohttp"),
}

# Nothing is chained behind a store: :: in its name is part of the name.
STORES = {*DRIVERS, "memory"}
Row = TypeVar("Row")


def of_its_class(fs: Any, table: Mapping[str, Row]) -> Row | None:
    """What a table has for the class of a filesystem, or for a base of it: by name, as drivers may not be there."""
    return next((table[each.__name__] for each in type(fs).__mro__ if each.__name__ in table), None)


def links(uri: str) -> list[str]:
    """`simplecache::s3://b/k::l` -> ["simplecache", "s3://b/k::l"]."""
    if "::" not in uri:
        return [uri]
    parts = uri.split("::")
    store = next((place for place, part in enumerate(parts) if part.partition("://")[0] in STORES), len(parts) - 1)
    return [*parts[:store], "::".join(parts[store:])]


def protocols(uri: str) -> list[str]:
    """`simplecache::s3://b/k` -> ["simplecache", "s3"]; a plain path has none."""
    return [link.partition("://")[0] for link in links(uri)] if "://" in uri else []


def split_query(uri: str) -> tuple[str, str]:
    """What names the object in a URL of HTTP, and its query with the question mark; other URIs have none."""
    path, mark, query = uri.partition("?") if uri.startswith(("http://", "https://")) else (uri, "", "")
    return path, mark + query


def local_path(uri: str) -> str | None:
    """The path, if the URI names a file of this machine: without a protocol, or file://."""
    if "://" not in uri:
        return uri
    # Nothing is chained behind a file: :: in its name is part of the name.
    if uri.startswith(("file://", "local://")):
        from fsspec.implementations.local import LocalFileSystem

        return str(LocalFileSystem._strip_protocol(uri))
    return None


def open_filesystem(uri: str, storage_options: Mapping[str, Any], *, reading: int = 0) -> tuple[Any, str]:
    """The fsspec filesystem of this process for a URI, and the path there. No request is made.

    fsspec makes one instance for equal options and process, and a new one after a fork.

    Args:
        reading: requests in flight at once, of one who retries them himself; 0: for all else.

    Raises:
        MissingDriverError: the filesystem's package is not installed.
        ConfigError: no such protocol, or a URI that fsspec cannot read.
        AccessError: the profile that is asked for does not exist.
        StorageError: the driver refuses the options.
    """
    try:
        import fsspec

        if (local := local_path(uri)) is not None:
            return fsspec.filesystem("file"), os.path.abspath(local)
        options = tuned(uri, storage_options, reading=reading)
        fs, path = _open_literally(uri, options) if "::" in links(uri)[-1] else fsspec.url_to_fs(uri, **options)
    except BinidxError:
        raise
    except ImportError as error:
        raise missing_driver(uri, error) from error
    except ValueError as error:
        raise ConfigError(f"{uri}: {error}; needed a path or a protocol that fsspec knows") from error
    except Exception as error:
        raise translated(uri, error) from cause_of(error)
    _kept.setdefault(id(fs), fs)
    if reading and protocols(uri)[0] in ("s3", "s3a"):
        fs.retries = 1  # s3fs' own, around botocore's; this instance is ours alone, for its options are
    return fs, str(path)


def _open_literally(uri: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """fsspec takes :: for a chain wherever it stands, so it never sees this name as a URI."""
    from fsspec import filesystem, get_filesystem_class

    if len(links(uri)) > 1:
        raise ConfigError(f"{uri}: found :: in the name of a chained object, which fsspec cannot read; rename it")
    protocol = protocols(uri)[0]
    kind = get_filesystem_class(protocol)
    return filesystem(protocol, **{**kind._get_kwargs_from_urls(uri), **options}), kind._strip_protocol(uri)


def move(fs: Any, source: str, target: str) -> None:
    """Rename one object. fsspec's own `mv`, where a filesystem has no better, takes [ * ? in a name for a pattern."""
    from fsspec import AbstractFileSystem

    if getattr(fs.mv, "__func__", None) is AbstractFileSystem.mv:
        fs.cp_file(source, target)
        fs.rm_file(source)
    else:
        fs.mv(source, target)


# All filesystems this process or its parents opened, for ever; in one process fsspec's own cache holds them as long.
# After a fork fsspec drops those of the parent, and to collect one is to close its connections, which in a forked child
# takes the *parent's* sockets out of the epoll they share: the parent then waits for ever on the next answer.
_kept: dict[int, Any] = {}


def tuned(uri: str, storage_options: Mapping[str, Any], *, reading: int = 0) -> dict[str, Any]:
    """The options with our defaults for each filesystem in the chain; what the user gave wins."""
    first, *rest = protocols(uri)
    options = with_defaults(first, drivers_own(storage_options), reading)
    for protocol in rest:
        options[protocol] = with_defaults(protocol, options.get(protocol, {}))
    if reading and first in ("s3", "s3a") and not ("--x-s3/" in uri or "arn:" in uri):
        # Else botocore signs URLs as in 2006 where an endpoint is given. Express buckets have a signature of their own.
        options["config_kwargs"] = {"signature_version": "s3v4", **options["config_kwargs"]}
    return options


def max_in_flight(uri: str, storage_options: Mapping[str, Any], settings: ReadSettings) -> int:
    """Requests in flight at once for an object: our setting, else the pool the user grants to s3fs, else ours."""
    on_s3 = protocols(uri)[:1] in (["s3"], ["s3a"])
    pool = users_config(storage_options).get("max_pool_connections") if on_s3 else None
    ours = CONCURRENCY_WITHOUT_DRIVER if goes_direct(uri, settings) else CONCURRENCY
    return settings.concurrency or pool or ours


def goes_direct(uri: str, settings: ReadSettings) -> bool:
    """Whether its requests are to be sent without the driver, if that works: `direct`."""
    return settings.fast is not False and len(protocols(uri)) == 1 and protocols(uri)[0] in DRIVERS


def object_info(fs: Any, path: str, uri: str) -> dict[str, Any]:
    """What the store says of the object now, never from a listing remembered earlier.

    Raises:
        ObjectNotFoundError: nothing there, or a directory.
        StorageError: the store does not tell the size, or another failure.
    """
    with storage_errors(uri):
        fs.invalidate_cache()
        info: dict[str, Any] = fs.info(path)
    return checked_info(info, uri)


def checked_info(info: dict[str, Any], uri: str) -> dict[str, Any]:
    """Of an object with a size, or an error: see `object_info`."""
    if info.get("type") == "directory":
        raise ObjectNotFoundError(f"{uri}: found a directory, needed an object")
    if info.get("size") is None:
        raise StorageError(f"{uri}: the store does not tell its size; needed a server that sends Content-Length")
    return info


def identity_from_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the content, in JSON values: its size, and the store's own mark of it.

    The mark is an ETag or generation where there is one (S3, GCS, HTTP), else the time of the last change.
    """
    identity: dict[str, Any] = {"size": int(info["size"])}
    marks = {"etag": ("ETag", "etag"), "generation": ("generation",), "version": ("VersionId",)}
    times = {"mtime": ("mtime", "LastModified", "last_modified", "updated", "created")}
    for names in (marks, times):
        for name, keys in names.items():
            found = next((info[key] for key in keys if info.get(key)), None)
            if found is not None:
                identity[name] = found if isinstance(found, (int, float)) else str(found)
        if len(identity) > 1:
            break
    return identity


def same_identity(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two identities are of one content. A store may tell more by a look (a version) than in a list."""
    both = was.keys() & now.keys()
    return bool(both) and all(was[name] == now[name] for name in both)


PROVING = ("etag", "generation", "version", "inode")
"""One of these in an identity makes equal identities mean equal bytes, unless the ETag is a weak one. A size and a time
do not: a second is long."""


def proves_content(identity: Mapping[str, Any]) -> bool:
    """Whether an object with this very identity has the same bytes."""
    return any(not str(identity[name]).startswith("W/") for name in PROVING if name in identity)


def same_object(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two identities prove that the bytes are the same; one may tell more than the other (a version)."""
    was, now = one or {}, other or {}
    return proves_content({name: was[name] for name in was if name in now}) and same_identity(was, now)


@contextlib.contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """What a driver raises in the block leaves it as one of ours that names the URI, with the driver's as its cause."""
    try:
        yield
    except BinidxError:
        raise
    except Exception as error:
        raise translated(uri, error) from cause_of(error)


def translated(uri: str, error: Exception) -> BinidxError:
    """Our error for a driver's."""
    if isinstance(error, ImportError):
        return missing_driver(uri, error)
    if isinstance(error, FileNotFoundError):
        cause = reason_of(error)
        thing = "bucket" if "bucket does not exist" in str(error) else "object"
        return translated(uri, cause) if cause else ObjectNotFoundError(f"{uri}: no such {thing}")
    if http_status(error) == 404:
        return ObjectNotFoundError(f"{uri}: no such object")
    forbidden = http_status(error) in (401, 403) or str(error).startswith("Forbidden: ")  # the latter is gcsfs'
    if isinstance(error, PermissionError) or forbidden:
        return AccessError(f"{uri}: access denied ({driver_text(error)}); check the credentials, {credentials_of(uri)}")
    names = names_of(error)
    if names & NO_CREDENTIALS:
        return AccessError(f"{uri}: no credentials found; set {credentials_of(uri)}")
    if names & BAD_CREDENTIALS:
        return AccessError(f"{uri}: {driver_text(error)}; check the credentials, {credentials_of(uri)}")
    return (UnreachableError if names & UNREACHABLE else StorageError)(f"{uri}: {driver_text(error)}")


NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
BAD_CREDENTIALS = {"ProfileNotFound", "CredentialRetrievalError", "TokenRetrievalError", "SSOError", "RefreshError"}

UNREACHABLE = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "ProxyConnectionError",
    "gaierror",
}
"""Classes, or bases of them: botocore's, Google's, aiohttp's, builtin."""


def missing_driver(uri: str, error: ImportError) -> MissingDriverError:
    known = next((DRIVERS[each] for each in protocols(uri) if each in DRIVERS), None)
    if known is None:
        return MissingDriverError(f"{uri}: {error}")
    return MissingDriverError(f"{uri}: needs {known[0]}; pip install {known[1]}")


def credentials_of(uri: str) -> str:
    if "gs" in protocols(uri) or "gcs" in protocols(uri):
        return "GOOGLE_APPLICATION_CREDENTIALS, or storage_options={'token': 'anon'} for a public bucket"
    if protocols(uri)[:1] in (["http"], ["https"]):
        return "those in the URL: a signature runs out"
    return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or storage_options={'anon': True} if it is public"


def reason_of(error: BaseException) -> Exception | None:
    """What went wrong if the object may well be there: fsspec's http says FileNotFoundError whatever happened."""
    cause = error.__cause__
    unreachable = cause is not None and "OSError" in (names := names_of(cause)) and "FileNotFoundError" not in names
    refused = getattr(cause, "status", 404) not in (404, 410)
    return cause if isinstance(cause, Exception) and (unreachable or refused) else None


CONCURRENCY = 64
"""Requests in flight at once, over all threads and objects of a process."""

CONCURRENCY_WITHOUT_DRIVER = 128
"""The same where a request costs a tenth of the CPU: at 30 ms to the first byte 64 are 2,100 requests/s, 128 are 4,200,
which one core still carries."""

SPARE = 8
"""Connections beyond that, for requests that are sent twice."""


def with_defaults(protocol: str, given: Mapping[str, Any], reading: int = 0) -> dict[str, Any]:
    if protocol in ("s3", "s3a"):
        from fsspec.config import conf

        from_files = conf.get("s3", {})
        # s3fs opens 10 connections unless told otherwise: 346 requests/s where 64 reach 1,123.
        pool = {"max_pool_connections": reading + SPARE if reading else CONCURRENCY}
        once = {"retries": {"total_max_attempts": 1}} if reading else {}
        config = {**pool, **once, **users_config(given)}
        # s3fs never forgets a listing: an object another process wrote would not exist for ever.
        return {"use_listings_cache": False, **endpoint(from_files, given), **given, "config_kwargs": config}
    if protocol in ("gs", "gcs"):
        if (os.environ.get("STORAGE_EMULATOR_HOST") or given.get("endpoint_url")) and "gcsfs" not in sys.modules:
            # gcsfs asks the gRPC storage-control API for the bucket's type, which no emulator speaks: each operation
            # would wait 30-88 s for the handshake to fail. Read once, when gcsfs is imported.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        return {"use_listings_cache": False, **given}
    return dict(given)


def users_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the user wants of botocore: options given here replace those of fsspec's own configuration key by key."""
    from fsspec.config import conf

    return {**conf.get("s3", {}).get("config_kwargs", {}), **given.get("config_kwargs", {})}


def endpoint(*options: Mapping[str, Any]) -> dict[str, str]:
    """The S3 endpoint of the environment, as an option, unless the options name one.

    botocore would find it by itself, but only once: fsspec takes clients for the same whose options are equal, and goes
    on speaking to the endpoint that was in the environment when the first one was made.
    """
    named = any(each.get("endpoint_url") or each.get("client_kwargs", {}).get("endpoint_url") for each in options)
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if named or ignored or not found else {"endpoint_url": found}
