"""The manifest of an index, `{name}-binidx.json`: what its arrays were built of, and how each was stored.

    {"library": "0.1.0",                                            who wrote it; never compared
     "fingerprint": {"algorithm": 3, "random_seed": 1234, ...},     every option that the arrays depend on
     "content": {"num_sequences": ..., "index_digest": ...},        the data they depend on
     "data": {"idx": {"size": ..., "etag": ...}, "bin": {...}},     the objects that had that content
     "order": {"num_epochs": 2, "separate_final_epoch": true},      see `growth`
     "arrays": {"document_index": {"dtype": "<i4", "shape": [100], "bytes": 528, "xxh3_64": ..., "identity": ...}},
     "xxh3_64": ...}                                                of all of this: no flipped bit is believed

`content` decides. Where the .idx is still the object of `data`, its content is known without reading it. The .bin is
there for people: no array depends on its tokens.

Where an index comes from: a dataset as it is now, in the terms of a manifest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import xxhash

from binidx.errors import FormatError
from binidx.format.idx import get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.documents import Documents, compact, documents_digest
from binidx.json_models import JsonFile
from binidx.storage.stores.identity import same_object
from binidx.storage.stores.registry import local_path

ALGORITHM = 3


"""Grows when the same arguments would give other arrays, or the manifest another form."""


Fields = Mapping[str, Any]


@dataclass(frozen=True)
class StoredArray:
    """One `.npy` as it was published.

    identity: of the object that took these bytes, as `object_identity` returns it; None where the store did not
        say, so that only `xxh3_64` proves them.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    xxh3_64: str
    identity: Fields | None = None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says; see the head of this file."""

    library: str
    fingerprint: Fields
    content: Fields
    data: Mapping[str, Fields]
    order: Fields | None
    arrays: Mapping[str, StoredArray]


MANIFEST_FILE = JsonFile(Manifest)


@dataclass(frozen=True)
class Origin:
    """The data that an index is of, as it is now.

    data: tells the identities of its objects, "idx" and "bin", without reading them.
    content: tells what decides, by reading all of the .idx.
    facts: tells what follows from the content, for who reads the manifest and not the .idx; never compared.
    """

    data: Callable[[], Mapping[str, Fields]] = dict
    content: Callable[[], Fields] = dict
    facts: Callable[[], Fields] = dict


NO_DATA = Origin()


"""Of what is computed from its description alone, as a blend is."""


@functools.cache
def library_version() -> str:
    """Of this library, as it was installed; empty where it runs from its source alone."""
    try:
        return metadata.version("binidx")
    except metadata.PackageNotFoundError:
        return ""


def format_manifest(manifest: Manifest) -> bytes:
    fields = json.loads(json.dumps(asdict(manifest)))
    return json.dumps({**fields, "xxh3_64": _checksum(fields)}, indent=1).encode()


def parse_manifest(data: bytes, uri: str) -> Manifest:
    """What `format_manifest` wrote.

    Raises:
        FormatError: anything else, one bit of it changed.
    """
    fields = MANIFEST_FILE.parse(data, uri)
    checksum = fields.pop("xxh3_64", None) if isinstance(fields, dict) else None
    if checksum != _checksum(fields):
        raise FormatError(f"{uri}: checksum {checksum} is not that of what it says; needs a manifest of ours")
    return MANIFEST_FILE.convert(fields, uri)


def differences(found: Fields, needed: Fields) -> list[str]:
    """Each field that is not as needed, in words."""
    return [
        f"{name}: found {found.get(name)!r}, needed {value!r}"
        for name, value in json.loads(json.dumps(dict(needed))).items()
        if found.get(name) != value
    ]


def mismatches(manifest: Manifest, fingerprint: Fields, origin: Origin) -> list[str]:
    """What speaks against these arrays, in words; the .idx is read only where its identity is not the recorded one."""
    wrong = differences(manifest.fingerprint, fingerprint)
    if wrong or same_object(manifest.data.get("idx"), origin.data().get("idx")):
        return wrong
    return differences(manifest.content, origin.content())


def fields_key(*fields: Fields) -> str:
    """A name made of fields: 128 bits in hex."""
    return xxhash.xxh3_128_hexdigest(_canonical(fields))


def _checksum(fields: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical(fields))


def _canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


ONE_EACH = "one_sequence_each"


DECIDING = ("num_sequences", "index_digest")


"""Of what a manifest says of the content."""


SETTLED_SECONDS = 2.0


"""A file changed again within a tick of its file system's clock keeps its times; FAT's tick is the longest."""


def origin_of(dataset: IndexedDataset) -> Origin:
    """The dataset behind an index, which was opened just now."""
    uri, opened = get_idx_path(dataset.path_prefix), dataset.opened["idx"]
    seen = _file(uri)

    def data() -> Mapping[str, Fields]:
        # What took its place while an index was built may have its size and its time, and never its inode.
        return {**dataset.opened, "idx": idx_identity(uri, opened) if _same(_file(uri), seen) else opened}

    def content() -> Fields:
        return {name: dataset.identity[name] for name in DECIDING}

    def facts() -> Fields:
        return {ONE_EACH: dataset.one_each}

    return Origin(data, content, facts)


def describe_documents(documents: Documents) -> str:
    """Which sequences a split has, told of a range without a pass over its numbers: "0:300000000", else a digest."""
    run = documents if isinstance(documents, range) else compact(documents)
    return f"{run.start}:{run.stop}" if isinstance(run, range) and run.step == 1 else documents_digest(documents)


def idx_identity(uri: str, opened: Mapping[str, Any]) -> Fields:
    """What the store says of the .idx; of a local file that has lain still, inode and times to the nanosecond."""
    found = _file(uri)
    if found is None or (found.st_size, found.st_mtime) != (opened.get("size"), opened.get("mtime")):
        return opened
    if time.time() - found.st_ctime < SETTLED_SECONDS:
        return opened
    times = {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    return {"size": found.st_size, **times, "inode": found.st_ino}


def _file(uri: str) -> os.stat_result | None:
    """A local file as it is now."""
    path = local_path(uri)
    with contextlib.suppress(OSError):
        return None if path is None else os.stat(path)
    return None


def _same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Whether a file was neither changed nor replaced."""

    def marks(found: os.stat_result) -> tuple[int, ...]:
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return one is other if one is None or other is None else marks(one) == marks(other)
