"""Identity of the content of an object: its size, and the version mark that its store reports.

    {"size": 300, "etag": "\\"9e10\\""}      S3, HTTP
    {"size": 300, "generation": "7"}       GCS, which also has an ETag
    {"size": 300, "mtime": 1700000000.5}   files, and stores that report nothing better

An identity is a dict of JSON values and is persisted. An ETag, generation, version id or inode proves the content; a
size and a time do not, since a second is long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from binidx.storage.interfaces import ObjectInfo

PROVING = ("etag", "generation", "version", "inode")
"""One of these in an identity makes equal identities mean equal bytes, unless the ETag is a weak one."""


def identity_from_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity in an object's metadata: fsspec's `info`, or the JSON of GCS."""
    identity: dict[str, Any] = {"size": int(info["size"])}
    versions = {"etag": ("ETag", "etag"), "generation": ("generation",), "version": ("VersionId",)}
    times = {"mtime": ("mtime", "LastModified", "last_modified", "updated", "created")}
    for names in (versions, times):
        for name, keys in names.items():
            found = next((info[key] for key in keys if info.get(key)), None)
            if found is not None:
                identity[name] = found if isinstance(found, (int, float)) else str(found)
        if len(identity) > 1:
            break
    return identity


def object_info(uri: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Return fsspec's `info` of an object, which has a size, as ours."""
    return ObjectInfo(uri, int(info["size"]), identity_from_info(info), info.get("md5Hash"))


def same_identity(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two identities agree. A store may report more for one object (a version) than in a list."""
    both = was.keys() & now.keys()
    return bool(both) and all(was[name] == now[name] for name in both)


def proves_content(identity: Mapping[str, Any]) -> bool:
    """Return whether an object with this identity has the same bytes."""
    return any(not is_weak(identity[name]) for name in PROVING if name in identity)


def same_object(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two identities prove that the bytes are the same; one may have more entries than the other."""
    was, now = one or {}, other or {}
    return proves_content({name: was[name] for name in was if name in now}) and same_identity(was, now)


def is_weak(mark: object) -> bool:
    """Return whether a version mark is a weak ETag."""
    return str(mark).startswith("W/")
