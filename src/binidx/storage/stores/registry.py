"""Table of the stores, one row per provider, and what a URI names: which store, which path.

    s3://bucket/key                     S3Store
    simplecache::s3://bucket/key        a chain: fsspec's own filesystem over S3, read as it comes
    /data/en.bin, file:///data/en.bin   a file of this machine

A new provider is a module with a class, and a row here. Which options, endpoints, credentials and profiles hold is
decided by the driver (`storage_options`, FSSPEC_* and AWS_* variables, its configuration files).
"""

from __future__ import annotations

import importlib
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectNotFoundError
from binidx.storage.store_protocols import Prices


@dataclass(frozen=True)
class Provider:
    """One row of the table of stores: a storage provider, its driver, and its prices.

    Attributes:
        store_class: "module:class" or "module:function"; called with a URI and storage options, it returns a
            `ReadableStore` or a `BlockingStore`.
        prices: see `Prices`; requests to stores that `stats.STORES` does not name are counted as "other".
        package, install: name of the required driver package, and the argument of `pip install` that installs it.
        credentials: hint for error messages: the files or variables in which users set credentials.
    """

    store_class: str
    prices: Prices = Prices()  # noqa: RUF009 (frozen)
    package: str = ""
    install: str = ""
    credentials: str = ""


OTHER = Provider("binidx.storage.stores.fsspec_store:open_fsspec_store")
"""Row of all schemes that PROVIDERS lacks: fsspec opens them."""

# S3 Standard, us-east-1: $0.0004 per 1,000 GET, $0.005 per 1,000 PUT or copy (aws.amazon.com/s3/pricing).
# GCS Standard, one region: $0.004 per 10,000 class B, $0.05 per 10,000 class A (cloud.google.com/storage/pricing).
# Both as of November 2026; other regions cost up to about a half more.
_S3 = Provider(
    "binidx.storage.stores.s3:S3Store",
    Prices("s3", 0.0004 / 1_000, 0.005 / 1_000),
    "s3fs",
    "'binidx[s3]'",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or storage_options={'anon': True} if it is public",
)
_GCS = Provider(
    "binidx.storage.stores.gcs:GcsStore",
    Prices("gs", 0.004 / 10_000, 0.05 / 10_000),
    "gcsfs",
    "'binidx[gcs]'",
    "GOOGLE_APPLICATION_CREDENTIALS, or storage_options={'token': 'anon'} for a public bucket",
)
_AZURE = Provider(
    "binidx.storage.stores.azure:AzureStore",
    package="adlfs",
    install="'binidx[azure]'",
    credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or storage_options={'anon': True}",
)
_HTTP = Provider(
    "binidx.storage.stores.http:HttpStore",
    Prices("http"),
    "aiohttp",
    "aiohttp",
    "those in the URL: a signature runs out",
)
_LOCAL = Provider("binidx.storage.stores.fsspec_store:open_fsspec_store", Prices("file"))
PROVIDERS: dict[str, Provider] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "http": _HTTP,
    "https": _HTTP,
    "file": _LOCAL,
    "local": _LOCAL,
    "memory": OTHER,
}
"""URL scheme -> its row."""


def provider_of(scheme: str) -> Provider:
    """Return the row of a URL scheme in the table of stores."""
    return PROVIDERS.get(scheme, OTHER)


def store_class(scheme: str) -> Any:
    """Import and return the class, or function, that makes the store of a URL scheme."""
    module, _, name = provider_of(scheme).store_class.partition(":")
    return getattr(importlib.import_module(module), name)


def open_store(uri: str, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Return the store of a URI. No request is sent.

    Args:
        uri: URI of an object in the store.
        storage_options: fsspec's own, and ours under the key "binidx".

    Returns:
        A `ReadableStore` or a `BlockingStore`; test for further protocols of `store_protocols` by `isinstance`.

    Example:
        >>> open_store("memory://bucket/key").prices().store
        'other'
    """
    schemes = protocols(uri)
    return store_class(schemes[0] if len(schemes) == 1 else "")(uri, storage_options)


def prices_of(uri: str) -> Prices:
    """Return the list prices of the store of a URI; a chain costs what its last link costs."""
    return provider_of((protocols(uri) or ["file"])[-1]).prices


def links(uri: str) -> list[str]:
    """Split a chain: `simplecache::s3://b/k::l` -> ["simplecache", "s3://b/k::l"]."""
    if "::" not in uri:
        return [uri]
    parts = uri.split("::")
    # Nothing is chained behind a store: :: in the name of an object is part of the name.
    ends = {*PROVIDERS} - {"file", "local"}
    store = next((place for place, part in enumerate(parts) if part.partition("://")[0] in ends), len(parts) - 1)
    return [*parts[:store], "::".join(parts[store:])]


def protocols(uri: str) -> list[str]:
    """Return the schemes of a URI: `simplecache::s3://b/k` -> ["simplecache", "s3"]; a plain path has none."""
    return [link.partition("://")[0] for link in links(uri)] if "://" in uri else []


def split_query(uri: str) -> tuple[str, str]:
    """Split a URL of HTTP into the name of the object and the query with its question mark; other URIs have none."""
    path, mark, query = uri.partition("?") if is_url(uri) else (uri, "", "")
    return path, mark + query


def is_url(uri: str) -> bool:
    """Return whether a URI is a URL of HTTP, in which ? begins a query and [ ] stand for themselves."""
    return uri.startswith(("http://", "https://"))


def local_path(uri: str) -> str | None:
    """Return the path of a file of this machine, named without a scheme or by file://; None for other URIs.

    Raises:
        ObjectNotFoundError: the name has a NUL or half of a surrogate pair, which no name of a file can have.
    """
    if "://" not in uri:
        return check_file_name(uri)
    # Nothing is chained behind a file: :: in its name is part of the name.
    if uri.startswith(("file://", "local://")):
        from fsspec.implementations.local import LocalFileSystem

        return check_file_name(str(LocalFileSystem._strip_protocol(uri)))
    return None


def check_file_name(path: str) -> str:
    """Return the path of a local file; raise ObjectNotFoundError if no file can have this name."""
    try:
        if b"\0" not in os.fsencode(path):
            return path
        problem = "found a NUL"
    except UnicodeEncodeError as error:
        problem = str(error)
    raise ObjectNotFoundError(f"{path!r}: not a file name ({problem}); correct it")


def place_of(uri: str) -> str:
    """Return the scheme of a URI and its host or bucket, such as `s3://bucket`; `file://` for any local file."""
    if local_path(uri) is not None:
        return "file://"
    parts = (link.partition("://") for link in links(uri))
    return "::".join(f"{scheme}{mark}{rest.partition('/')[0]}" for scheme, mark, rest in parts)


def join_uri(base: str, *parts: str) -> str:
    """Join a URI or a path with names: `s3://bucket/a/`, `b`, `c.npy` -> `s3://bucket/a/b/c.npy`."""
    return posixpath.join(base, *(part.strip("/") for part in parts))
