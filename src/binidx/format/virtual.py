"""A virtual merge: one dataset out of many, of which nothing was copied.

`PREFIX.parts.json`, where there is no `PREFIX.idx`:

    {"format": "binidx-parts", "version": 1, "dtype": "uint16",
     "parts": [{"prefix": "en/0", "sequences": 4711, "tokens": 1203344,
                "idx": {"size": 94254, "etag": "..."}, "bin": {"size": 2406688, "etag": "..."}}, ...]}

prefix      of a dataset, in any store; one that is neither a URI nor absolute begins at the folder of this file
idx, bin    what identified its files when this was written: size, and ETag, generation or time

    lengths    of all parts, one after the other           pointers, bounds    the same, shifted by what comes before
    .bin       `storage.joined` over the .bin of each, up to its last sequence

So it is, number by number and digest by digest, what `binidx merge` of the parts makes. A part that changed since is an
error that names it, at opening and, as with every dataset, while it is read.

Prohibited: no part; parts of different dtypes; a part that is itself virtual.
`storage_options` are those of all parts. Source: us.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import xxhash

from binidx.errors import FormatError, ObjectChangedError, StorageError
from binidx.format.idx import DType, SequenceIndex
from binidx.json_models import Count, JsonFile
from binidx.storage.open import read_document
from binidx.storage.requests.head import is_absent
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import Threads
from binidx.storage.writing.publish import join_uri

SUFFIX = ".parts.json"


FORMAT, VERSION = "binidx-parts", 1


PARTS_AT_ONCE = 64


Identity = Mapping[str, Any]


Given = TypeVar("Given")


Item = TypeVar("Item")


@dataclass(frozen=True)
class VirtualPart:
    """One dataset of a virtual one; `prefix` as it stands in the file."""

    prefix: str
    sequences: Count
    tokens: Count
    idx: Identity
    bin: Identity

    def __post_init__(self) -> None:
        if "size" not in self.idx or "size" not in self.bin:
            raise FormatError(f"part {self.prefix}: idx and bin have no size, which identifies them")


@dataclass(frozen=True)
class PartsFile:
    """The fields of the file besides its format and version."""

    dtype: str
    parts: list[VirtualPart]

    def __post_init__(self) -> None:
        DType.code_from_dtype(self.dtype)
        if not self.parts:
            raise FormatError("parts: found none, needs at least one")


PARTS_FILE = JsonFile(
    PartsFile,
    {"format": FORMAT, "version": VERSION},
    hint=f"needed {FORMAT} {VERSION}, as binidx merge --virtual writes it",
)


@dataclass(frozen=True)
class VirtualParts:
    """What the file under `uri` says, and the digest of its bytes."""

    uri: str
    dtype: str
    parts: Sequence[VirtualPart]
    digest: str

    @property
    def prefixes(self) -> list[str]:
        """Where the parts lie."""
        return [place_of_part(self.uri, part.prefix) for part in self.parts]

    def check(self, identities: Sequence[Mapping[str, Identity]]) -> None:
        """ObjectChangedError unless the files of all parts are those that the list was made of."""
        for part, prefix, found in zip(self.parts, self.prefixes, identities, strict=True):
            for end, was in (("idx", part.idx), ("bin", part.bin)):
                if not same_identity(was, found[end]):
                    raise ObjectChangedError(
                        f"{prefix}.{end}: {dict(found[end])}, was {dict(was)} when {self.uri} was written; "
                        "bring it back, or write the list again with binidx merge --virtual --overwrite"
                    )


def get_parts_path(path_prefix: str) -> str:
    """The URI of what lists the parts of a virtual dataset."""
    return path_prefix + SUFFIX


def format_parts(dtype: str, parts: Sequence[VirtualPart]) -> bytes:
    """The file."""
    whole = {**PARTS_FILE.tags, **asdict(PartsFile(dtype, list(parts)))}
    return json.dumps(whole, indent=1).encode() + b"\n"


def read_parts(path_prefix: str, storage_options: Mapping[str, Any] | None = None) -> VirtualParts | None:
    """What is listed under a prefix; None: there is no list.

    Raises:
        FormatError: what stands there is none.
        StorageError: the store cannot be reached.
    """
    uri = get_parts_path(path_prefix)
    try:
        found = read_document(PARTS_FILE, uri, storage_options)
    except StorageError as error:
        if is_absent(error):
            return None
        raise
    return parse_parts(found, uri)


def parse_parts(data: bytes, uri: str) -> VirtualParts:
    """What the file says.

    Raises:
        FormatError: it is no such file, or one of another version.
    """
    found = PARTS_FILE.decode(data, uri)
    return VirtualParts(uri, found.dtype, found.parts, xxhash.xxh3_128_hexdigest(data))


def place_of_part(uri: str, prefix: str) -> str:
    """Where a part of the list under `uri` lies."""
    folder = uri.rpartition("/")[0]
    return prefix if "://" in prefix or os.path.isabs(prefix) or not folder else join_uri(folder, prefix)


def prefix_of_part(uri: str, prefix: str) -> str:
    """How the list under `uri` names a part: relative where it lies in or below its folder."""
    folder = uri.rpartition("/")[0] + "/"
    return prefix.removeprefix(folder) if "/" in uri and prefix != folder else prefix


def concatenate(indices: Sequence[SequenceIndex], parts: VirtualParts) -> SequenceIndex:
    """One index over all: 12 bytes of memory a sequence and 8 a document, besides those of the parts.

    Raises:
        FormatError: a part has another dtype than the list says, or other counts.
    """
    for index, part, prefix in zip(indices, parts.parts, parts.prefixes, strict=True):
        found = index.dtype.__name__, len(index), index.num_tokens
        if found != (needed := (parts.dtype, part.sequences, part.tokens)):
            raise FormatError(f"{prefix}.idx: (dtype, sequences, tokens) are {found}, {parts.uri} needs {needed}")
    starts = np.cumsum([0, *map(len, indices)], dtype=np.int64).tolist()
    places = np.cumsum([0, *(index.num_bytes for index in indices)], dtype=np.int64).tolist()
    lengths = np.concatenate([index.sequence_lengths for index in indices], dtype="<i4")
    pointers = np.empty(len(lengths), "<i8")
    bounds = np.zeros(1 + sum(index.document_count - 1 for index in indices), "<i8")
    document = 1
    for index, start, place in zip(indices, starts, places, strict=False):
        np.add(index.sequence_pointers, place, out=pointers[start : start + len(index)])
        end = document + index.document_count - 1
        np.add(index.document_indices[1:], start, out=bounds[document:end])
        document = end
    modes = [index.sequence_modes for index in indices]
    found_modes = None if modes[0] is None else np.concatenate([each for each in modes if each is not None])
    for array in (lengths, pointers, bounds):
        array.flags.writeable = False
    return SequenceIndex(indices[0].dtype, lengths, pointers, bounds, found_modes, sum(i.num_tokens for i in indices))


def map_concurrently(work: Callable[[Given], Item], given: Iterable[Given]) -> list[Item]:
    """`map`, many at once; the first one's error, after all have ended. Not for work that calls this itself."""
    pending = [_submit(partial(work, each)) for each in given]
    wait(pending)
    return [each.result() for each in pending]


_submit = Threads("binidx-parts", lambda: PARTS_AT_ONCE).submit
