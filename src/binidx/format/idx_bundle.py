"""The small `.idx` files of a run in one object: its bytes <-> the files. No I/O happens here; see `bundled`.

    offset   bytes  field
    0        8      magic `BINIDXB1`
    8        8      u64 T, bytes of the table
    16       8      u64 XXH3-64 of the table
    24       T      the table, JSON: [[prefix, first byte, bytes, XXH3-64 in hex, identity], ...]
    24+T     ...    the files as they are, one after the other; first bytes count from here

Little-endian. `identity` is what the store said of the `.idx` that the bytes were read from: its size and an ETag or a
generation. A file counts only where a list shows that very object now, and its checksum holds: a bundle may be old, be
of other data or be half rotten, and costs requests then, never a wrong index.

The bundle of a set of prefixes in a directory of the store: one request instead of one for each small `.idx`.

    {directory}/{digest of the prefixes}-binidx-idx.bundle

Read at the same time as the lists that say which of it still holds, and through the `index_dir`, once for a node.
Written by who had to open one of its files alone, from what it read. Writers race without harm: the last bundle
stands whole, and what it has of replaced files is not used.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from binidx.errors import FormatError, StorageError
from binidx.json_models import Count, JsonFile
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.head import is_absent
from binidx.storage.stores.identity import proves_content, same_object
from binidx.storage.writing.publish import create_object, join_uri

MAGIC = b"BINIDXB1"


HEADER = struct.Struct("<8sQQ")


TABLE = JsonFile[list[tuple[str, Count, Count, str, dict[str, Any]]]](
    list[tuple[str, Count, Count, str, dict[str, Any]]]
)


LARGEST_BYTES = 1 << 20


"""Of an `.idx`: what is larger costs more by its bytes than by its request."""


BUNDLE_BYTES = 64 << 20


"""Of the files of one bundle: it is fetched whole, whatever is needed of it."""


Identity = Mapping[str, Any]


File = tuple[Identity, memoryview | None]


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory.

    table: by prefix, (first byte, bytes, checksum, identity) of its `.idx` in `files`.
    """

    table: Mapping[str, tuple[int, int, str, Identity]]
    files: memoryview

    def find(self, prefix: str, identity: Identity) -> memoryview | None:
        """The bytes of the `.idx` of a prefix, if the object with this identity is what was bundled."""
        if prefix not in self.table:
            return None
        first, size, checksum, was = self.table[prefix]
        if not same_object(was, identity):
            return None
        found = self.files[first : first + size]
        return found if len(found) == identity["size"] and xxhash.xxh3_64_hexdigest(found) == checksum else None


def choose_bundled(identities: Mapping[str, Identity]) -> list[str]:
    """Of the prefixes with these `.idx` those that belong in a bundle: the smallest, as many as it may hold."""
    fit = [(int(each["size"]), prefix) for prefix, each in identities.items() if proves_content(each)]
    chosen, total = [], 0
    for size, prefix in sorted(fit):
        total += size
        if size > LARGEST_BYTES or total > BUNDLE_BYTES:
            break
        chosen.append(prefix)
    return sorted(chosen)


def format_bundle(files: Mapping[str, File], chosen: Sequence[str]) -> list[bytes | memoryview]:
    """The bytes of a bundle of the chosen prefixes, in pieces."""
    table: list[Any] = []
    pieces: list[memoryview] = []
    first = 0
    for prefix in chosen:
        identity, data = files[prefix]
        assert data is not None
        table.append([prefix, first, len(data), xxhash.xxh3_64_hexdigest(data), dict(identity)])
        pieces.append(data)
        first += len(data)
    text = json.dumps(table, separators=(",", ":")).encode()
    return [HEADER.pack(MAGIC, len(text), xxhash.xxh3_64_intdigest(text)), text, *pieces]


def parse_bundle(buffer: memoryview, uri: str) -> Bundle:
    """What `format_bundle` gave; the files are compared when they are taken.

    Raises:
        FormatError: another thing, or a table with a changed bit.
    """
    if len(buffer) < HEADER.size:
        raise FormatError(f"{uri}: {len(buffer)} bytes, the header of a bundle needs {HEADER.size}")
    magic, table_bytes, checksum = HEADER.unpack_from(buffer)
    text = buffer[HEADER.size : HEADER.size + min(table_bytes, len(buffer))]
    if magic != MAGIC or len(text) != table_bytes or xxhash.xxh3_64_intdigest(text) != checksum:
        raise FormatError(f"{uri}: no bundle of ours, or its table is damaged")
    table = {row[0]: row[1:] for row in TABLE.decode(text, uri)}
    return Bundle(table, buffer[HEADER.size + table_bytes :])


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundlePlace:
    """Where the bundle of a run lies.

    Args:
        directory: URI; made where the store knows directories.
        writes: whether this process may write it.
    """

    directory: str
    writes: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def read(self, prefixes: Sequence[str]) -> Bundle | None:
        """None, and why in the log, where there is none to be had."""
        uri = self.uri(prefixes)
        try:
            return parse_bundle(read_whole(open_object(uri, storage_options=self.storage_options, cache="disk")), uri)
        except FormatError as error:
            logger.warning("%s: unusable, opening each .idx: %s", uri, error)
        except StorageError as error:
            logger.log(logging.DEBUG if is_absent(error) else logging.WARNING, "%s: opening each .idx: %s", uri, error)
        return None

    def complete(self, prefixes: Sequence[str], files: Mapping[str, File], lacking: Collection[str]) -> None:
        """Write the bundle of these files if some `lacking` one belongs in it; what cannot be written is logged.

        Args:
            files: by prefix, identity and bytes of its `.idx`; None: not read as that object.
        """
        chosen = choose_bundled({prefix: identity for prefix, (identity, data) in files.items() if data is not None})
        if not {*lacking} & {*chosen}:
            return
        uri = self.uri(prefixes)
        try:
            with create_object(uri, self.storage_options, durable=False) as out:
                for piece in format_bundle(files, chosen):
                    out.write(piece)
        except (OSError, NotImplementedError) as error:
            logger.warning("%s: not written, every start asks for each .idx: %s", uri, error)

    def uri(self, prefixes: Sequence[str]) -> str:
        names = "\n".join(sorted({*prefixes}))
        return join_uri(self.directory, f"{xxhash.xxh3_128_hexdigest(names.encode())}-binidx-idx.bundle")
