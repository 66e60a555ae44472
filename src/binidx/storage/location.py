"""A store, a path in it and the options for it, resolved once where a user names them by a URI.

    location = Location.of("s3://corpus/en", {"anon": True})     a user's URI and options
    location + ".idx"                                            an object whose name begins so
    location / "cache"                                           an object below it

Functions below the public ones take a `Location`, never a URI and options.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import xxhash

from binidx.errors import ConfigError, redacted
from binidx.forks import cached_property
from binidx.storage.interfaces import FileVersion
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import file_version
from binidx.storage.stores.registry import expand_uri, is_url, join_uri, local_path, place_of, scheme_of, store_class

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "FSSPEC_S3_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")
"""Variables that name the server of a bucket."""

BESIDE_NOT = frozenset("?#@:")
"""Letters of a URI, after its place, from which a driver may take options."""


@dataclass(frozen=True, repr=False)
class Location:
    """Object, prefix or folder in a store. Two are equal if URI and options are.

    Args:
        uri: path, file:// or any URI that fsspec opens, as the user wrote it but for `~` and capitals of the scheme:
            names in caches and manifests are made of this very text.
        options: fsspec's own, and `ReadSettings` under the key "binidx".

    Pickles as its arguments. Source: ours.
    """

    uri: str
    options: Mapping[str, Any] | None = field(default=None, hash=False)

    _root: ClassVar[Location | None] = None
    """Location in the same place, whose store this one shares; set in instances that `beside` makes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", expand_uri(self.uri))

    @classmethod
    def of(cls, where: Where, storage_options: Mapping[str, Any] | None = None) -> Location:
        """Return the location that a user names, or the given one.

        Args:
            where: URI or path; or a location, whose own options hold.
            storage_options: fsspec options for a URI.
        """
        return where if isinstance(where, Location) else cls(cls.text_of("location", where), storage_options)

    @staticmethod
    def text_of(name: str, value: Any) -> str:
        """Return a path or URI as text; raise ConfigError if it is empty, or is none, by the name of its argument."""
        if isinstance(value, str | os.PathLike) and (text := os.fspath(value)):
            return str(text)
        raise ConfigError(f"{name}: found {value!r}, needs a path or URI")

    @cached_property
    def local_path(self) -> str | None:
        """Path of a file of this machine; None for objects of other stores.

        Raises:
            ObjectNotFoundError: the name has a NUL or half of a surrogate pair, which no name of a file can have.
        """
        return local_path(self.uri)

    @cached_property
    def store(self) -> Any:
        """Store of the object: a `ReadableStore` or a `BlockingStore`; opened at the first use, without a request."""
        return store_class(scheme_of(self.uri))(self.uri, self.options) if self._root is None else self._root.store

    def stat(self) -> os.stat_result | None:
        """Return the stat of a local file; None if it is remote or missing."""
        with contextlib.suppress(OSError):
            return None if self.local_path is None else os.stat(self.local_path)
        return None

    def local_version(self) -> FileVersion | None:
        """Return the version of a local file; None if it is remote or cannot be read: opening it says more."""
        return None if (status := self.stat()) is None else file_version(status)

    def is_folder(self) -> bool:
        """Return whether a name that is not an object is a folder, not a pattern."""
        if (path := self.local_path) is not None:
            return os.path.isdir(path)
        return not ("*" in self.uri if is_url(self.uri) else glob.has_magic(self.uri))  # a ? begins a query

    @cached_property
    def place(self) -> str:
        """Scheme and host or bucket, such as `s3://bucket`; `file://` for any local file."""
        return place_of(self.uri) if self._root is None else self._root.place

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """Parts of the store that may refuse requests together: the folder of the object, and its bucket.

        Only the bucket if the store publishes a limit of buckets. Each name ends with the endpoint if one is set.
        """
        is_bucket = self.store.prices().doubling_seconds < math.inf
        given = self.options or {}
        named = (given.get("endpoint_url"), (given.get("client_kwargs") or {}).get("endpoint_url"))
        endpoints = {*named, *map(os.environ.get, ENDPOINT_VARIABLES)} - {None, ""}
        names = [self.place] if is_bucket else [self.uri.rpartition("/")[0], f"{self.place}/*"]
        return tuple(" ".join([name, *sorted(map(str, endpoints))]) for name in names)

    @property
    def name(self) -> str:
        """Last part of the URI, after its last slash."""
        return self.uri.rpartition("/")[2]

    @cached_property
    def settings(self) -> ReadSettings:
        """Settings of the options, else of the environment at the first use."""
        return ReadSettings.of(self.options) if self._root is None else self._root.settings

    @property
    def absolute(self) -> str:
        """The URI, or the absolute path of a local file."""
        return self.uri if self.local_path is None else os.path.abspath(self.local_path)

    def beside(self, uri: str) -> Location:
        """Return a location with the same options; in the same place both share one store, opened at the first use.

        A store takes 0.1 ms and 3 KB. Drivers may take options from the rest of a URI where it has one of BESIDE_NOT.
        """
        other = Location(uri, self.options)
        if "://" in uri and uri.startswith(f"{self.place}/"):
            rest = self.uri[len(self.place) :], uri[len(self.place) :]
            if BESIDE_NOT.isdisjoint(rest[0]) and BESIDE_NOT.isdisjoint(rest[1]):
                vars(other)["_root"] = self._root or self  # `update` would unshare the keys of this dict: 150 bytes
        return other

    def __add__(self, suffix: str) -> Location:
        """Return the location whose name goes on with `suffix`."""
        return self.beside(self.uri + suffix)

    def __truediv__(self, name: str) -> Location:
        """Return the location of a name below this folder."""
        return self.beside(join_uri(self.uri, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (self.uri, self.options)

    def __str__(self) -> str:
        """Return the URI; messages of `BinidxError` remove the secrets in it."""
        return self.uri

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"Location({redacted(self.uri)})"


Where = str | os.PathLike[str] | Location
"""A URI or path as a user gives it, or a location."""


def hash_uris(uris: Iterable[str]) -> str:
    """Return the name of a set of URIs in the names of files: XXH3, 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest("\n".join(sorted({*uris})).encode())
