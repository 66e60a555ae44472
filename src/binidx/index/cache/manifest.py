"""Manifest of an index, `{name}-binidx.json`: the options and data that its arrays were built of, and their checksums.

    {"library": "0.1.0",                                            version that wrote it; never compared
     "fingerprint": {"algorithm": 3, "random_seed": 1234, ...},     every option that the arrays depend on
     "content": {"num_sequences": ..., "index_digest": ...},        the data they depend on
     "data": {"idx": {"size": ..., "etag": ...}, "bin": {...}},     the objects that had that content
     "order": {"num_epochs": 2, "separate_final_epoch": true},      see `order_record`
     "arrays": {"document_index": {"dtype": "<i4", "shape": [100], "bytes": 528, "xxh3_64": ..., "identity": ...}},
     "xxh3_64": ...}                                                of all of this, so that a flipped bit is found

`content` decides whether an index fits a dataset. While the .idx is the object of `data`, its content is known without
reading it. The .bin is recorded for people: no array depends on its tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import numpy as np
import xxhash

from binidx.errors import FormatError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.documents import Documents, as_range, documents_digest
from binidx.json_models import JsonFile, tolerate_all
from binidx.storage.location import Location
from binidx.storage.stores.identity import same_object
from binidx.storage.stores.local import SETTLED_SECONDS

Fields = Mapping[str, Any]

ALGORITHM = 3
"""Incremented when the same arguments would give other arrays, or the manifest has another form."""

UNNUMBERED = 3
"""Number of the algorithms whose indices have names without it, and whose arrays Megatron reads."""

ONE_EACH = "one_sequence_each"
DECIDING = ("num_sequences", "index_digest")
"""Fields of `content` that decide whether an index fits a dataset."""


@dataclass(frozen=True)
class StoredArray:
    """Published `.npy` file.

    identity: of the object, as `object_identity` returns it; None where the store did not return one, so that
        only `xxh3_64` proves the bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    xxh3_64: str
    identity: Fields | None = None

    def __post_init__(self) -> None:
        needed = prod(self.shape) * np.dtype(self.dtype).itemsize
        if not self.shape or min(self.shape) < 0 or max(needed, *self.shape) > self.bytes:
            raise ValueError(f"shape: found {self.shape} of {self.dtype}, need sizes that {self.bytes} bytes can hold")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Fields of a manifest, as described at the head of this module."""

    library: str = ""
    fingerprint: Fields
    content: Fields
    data: Mapping[str, Fields] = field(default_factory=dict)
    order: Fields | None = None
    arrays: Mapping[str, StoredArray]


INDEX_MANIFEST_FILE = JsonFile(Manifest, tolerates=tolerate_all)


@dataclass(frozen=True)
class Origin:
    """Data that an index is built of.

    data: returns the identities of the objects "idx" and "bin", without reading them.
    content: returns the fields DECIDING, for which it may read all of the .idx.
    facts: returns facts that follow from the content, for readers of the manifest without the .idx; never compared.
    """

    data: Callable[[], Mapping[str, Fields]] = dict
    content: Callable[[], Fields] = dict
    facts: Callable[[], Fields] = dict


NO_DATA = Origin()
"""Origin of an index that is computed from its description alone, such as that of a blend."""


def format_manifest(manifest: Manifest) -> bytes:
    fields = json.loads(json.dumps(asdict(manifest)))
    return INDEX_MANIFEST_FILE.encode({**fields, "xxh3_64": checksum_fields(fields)}, indent=1)


def parse_manifest(data: bytes, uri: str) -> Manifest:
    """Return the manifest in the bytes of its file.

    Raises:
        FormatError: the bytes are no manifest, or differ from their checksum.
    """
    return INDEX_MANIFEST_FILE.convert(parse_checked(INDEX_MANIFEST_FILE, data, uri), uri)


def parse_checked(file: JsonFile[Any], data: bytes | memoryview, uri: str) -> Any:
    """Return the JSON value in the bytes of a file, without its checksum.

    Raises:
        FormatError: the bytes are no JSON, or differ from the checksum.
    """
    fields = file.parse(data, uri)
    checksum = fields.pop("xxh3_64", None) if isinstance(fields, dict) else None
    if checksum != (needed := checksum_fields(fields)):
        raise FormatError(f"{uri}: wrong checksum (found {checksum}, need {needed})")
    return fields


def list_differences(found: Fields, needed: Fields) -> list[str]:
    """Return a text for each needed field that is missing or has another value.

    Args:
        found: fields of a manifest.
        needed: fields that they must equal, as JSON stores them; others are not compared.
    """
    return [
        f"{name}: found {found.get(name)!r}, need {value!r}"
        for name, value in json.loads(json.dumps(dict(needed))).items()
        if found.get(name) != value
    ]


def list_mismatches(manifest: Manifest, fingerprint: Fields, origin: Origin) -> list[str]:
    """Return a text for each needed option, or deciding field of the data, in which an index differs.

    The .idx is read only if its identity is not the recorded one.

    Args:
        manifest: of a cached index.
        fingerprint: needed options, with "algorithm".
        origin: the data that the index must be of.
    """
    wrong = list_differences(manifest.fingerprint, fingerprint)
    if wrong or same_object(manifest.data.get("idx"), origin.data().get("idx")):
        return wrong
    return list_differences(manifest.content, origin.content())


def hash_fields(*fields: Fields) -> str:
    """Return a hash of the fields, 128 bits in hex, for a file name."""
    return xxhash.xxh3_128_hexdigest(_canonical(fields))


def checksum_fields(fields: Any) -> str:
    """Return the XXH3 of JSON values, which stands beside them in a file."""
    return xxhash.xxh3_64_hexdigest(_canonical(fields))


def _canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def get_origin(dataset: IndexedDataset) -> Origin:
    """Return the origin of an index over a dataset that was just opened."""
    idx, opened = dataset.location + ".idx", dataset.opened["idx"]
    version = idx.local_version()

    def data() -> Mapping[str, Fields]:
        # A file that replaced the .idx during a build may have its size and time, and never its inode.
        unchanged = idx.local_version() == version
        return {**dataset.opened, "idx": prove_idx(idx, opened) if unchanged else opened}

    def content() -> Fields:
        return {name: dataset.identity[name] for name in DECIDING}

    def facts() -> Fields:
        return {ONE_EACH: dataset.documents_are_sequences}

    return Origin(data, content, facts)


def describe_documents(documents: Documents) -> str:
    """Return the documents of a split as text: "0:300000000" for a range, without a pass over it, else a digest."""
    run = documents if isinstance(documents, range) else as_range(documents)
    return f"{run.start}:{run.stop}" if isinstance(run, range) and run.step == 1 else documents_digest(documents)


def prove_idx(idx: Location, opened: Mapping[str, Any]) -> Fields:
    """Return an identity of the .idx that proves its content, if there is one; else `opened`.

    A local file has such an identity (inode, and times in nanoseconds) if it has not changed for SETTLED_SECONDS.

    Args:
        idx: location of the .idx.
        opened: its size and time, or ETag or the like, when it was opened.
    """
    status = idx.stat()
    if status is None or (status.st_size, status.st_mtime) != (opened.get("size"), opened.get("mtime")):
        return opened
    if time.time() - status.st_ctime < SETTLED_SECONDS:
        return opened
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {"size": status.st_size, **times, "inode": status.st_ino}
