"""Registry of the stores, and what a URI names: which store, which path.

    s3://bucket/key                     S3Store
    /data/en.bin, file:///data/en.bin   a file of this machine

A new provider is a module with a class, and a row here or a call of `register_store`. Everything known of a store,
prices and the name of its driver included, is in its class, which is imported when a URI needs it. Which options,
endpoints, credentials and profiles hold is decided by the driver (`storage_options`, FSSPEC_* and AWS_* variables, its
configuration files).
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError, redacted
from binidx.registries import Registry

STORES: Registry[Any] = Registry(
    "binidx.storage.stores.registry:STORES",
    "store",
    "binidx.stores",
    "[a-z][a-z0-9+.-]*",
    {
        **dict.fromkeys(("s3", "s3a"), "binidx.storage.stores.s3:S3Store"),
        **dict.fromkeys(("gs", "gcs"), "binidx.storage.stores.gcs:GcsStore"),
        **dict.fromkeys(("abfs", "abfss", "az"), "binidx.storage.stores.azure:AzureStore"),
        **dict.fromkeys(("http", "https"), "binidx.storage.stores.http:HttpStore"),
        "oss": "binidx.storage.stores.oss:OssStore",
        "hf": "binidx.storage.stores.http:HubStore",
        **dict.fromkeys(("file", "local"), "binidx.storage.stores.fsspec_store:FileStore"),
        "memory": "binidx.storage.stores.fsspec_store:open_fsspec_store",
    },
)
"""URL scheme -> class, or function, that is called with a URI and storage options and returns a store."""


def register_store(scheme: str, store: Callable[[str, Mapping[str, Any] | None], Any]) -> None:
    """Register a class of stores for a URL scheme, for this process and for the worker processes that it starts.

    A package that is installed registers its class by an entry point instead: `myfs = "package.module:MyStore"` in the
    group `binidx.stores`.

    Args:
        scheme: scheme of the URIs, such as "myfs" of myfs://bucket/key.
        store: class that is called with a URI and storage options; its instances are a `ReadableStore` or a
            `BlockingStore` of `storage.store_protocols`, and whatever else they can do.

    Raises:
        ConfigError: the scheme is built in, or stands for another class.

    Example:
        binidx.register_store("myfs", MyStore)

    Source: ours; fsspec's `register_implementation`.
    """
    STORES.register(scheme, store)


def store_class(scheme: str) -> Any:
    """Import and return the class, or function, that makes the stores of a URL scheme."""
    try:
        return STORES[scheme]
    except KeyError:
        return STORES["memory"]


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, as "s3" of s3://bucket/key; "file" for a path."""
    return uri.partition("://")[0] if "://" in uri else "file"


def split_query(uri: str) -> tuple[str, str]:
    """Split a URL of HTTP into the name of the object and the query with its question mark; other URIs have none."""
    path, mark, query = uri.partition("?") if is_url(uri) else (uri, "", "")
    return path, mark + query


def is_url(uri: str) -> bool:
    """Return whether a URI is a URL of HTTP, in which ? begins a query and [ ] stand for themselves."""
    return uri.startswith(("http://", "https://"))


def expand_uri(uri: str) -> str:
    """Return a URI with its scheme in lower case, or a path with the home folder in place of its `~`.

    Raises:
        ConfigError: a URI that lacks a slash or the colon, which would be a folder of this machine named `s3:` or `s3`.
    """
    scheme, mark, rest = uri.partition("://")
    if mark:
        return uri if scheme.islower() or "/" in scheme else scheme.lower() + mark + rest
    if wrong := re.match(r"(?!file:|local:)\w{2,}(:/)|(?:s3|gs|az|hf|https?)(//)", uri):
        right, mark = redacted(re.sub(":?/+", "://", uri, count=1)), wrong[1] or wrong[2]
        typed = right.replace("://", mark, 1)
        raise ConfigError(f"{typed}: found {mark} after the scheme, needs ://; did you mean {right}?")
    return os.path.expanduser(uri) if uri.startswith("~") else uri


def local_path(uri: str) -> str | None:
    """Return the path of a file of this machine, named without a scheme or by file://; None for other URIs.

    Raises:
        ObjectNotFoundError: the name has a NUL or half of a surrogate pair, which no name of a file can have.
    """
    if "://" not in uri:
        return check_file_name(uri)
    if uri.startswith(("file://", "local://")):
        from fsspec.implementations.local import LocalFileSystem

        return check_file_name(str(LocalFileSystem._strip_protocol(uri)))
    return None


def check_file_name(path: str) -> str:
    """Return the path of a local file; raise ObjectNotFoundError if no file can have this name."""
    try:
        if "\0" not in path and (path.isascii() or os.fsencode(path)):
            return path
        problem = "found a NUL"
    except UnicodeEncodeError as error:
        problem = str(error)
    raise ObjectNotFoundError(f"{path!r}: not a file name ({problem}); correct it")


def place_of(uri: str) -> str:
    """Return the scheme of a URI and its host or bucket, such as `s3://bucket`; `file://` for any local file."""
    if local_path(uri) is not None:
        return "file://"
    scheme, mark, rest = uri.partition("://")
    return f"{scheme}{mark}{rest.partition('/')[0]}"


def join_uri(base: str, name: str) -> str:
    """Join a URI or a path with a name: `s3://bucket/a/`, `b/c.npy` -> `s3://bucket/a/b/c.npy`."""
    return posixpath.join(base, name.strip("/"))
