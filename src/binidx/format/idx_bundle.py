"""Bundle of the small `.idx` files of a run: one request instead of one for each file.

    {directory}/{digest of the prefixes}-binidx-idx.bundle

    offset   bytes  field
    0        8      magic `BINIDXB1`
    8        8      u64 T, bytes of the table
    16       8      u64 XXH3-64 of the table
    24       T      the table, JSON: [[prefix, first byte, bytes, XXH3-64 in hex, identity], ...]
    24+T     ...    the files, one after the other; first bytes count from here

Little-endian. `identity` is the identity of the `.idx` that the bytes were read from: its size and an ETag or
generation. A file is used only if a list shows that very object now and its checksum is right. An old, foreign or
damaged bundle therefore costs requests, never a wrong index.

The bundle is read at the same time as the lists, through the `index_dir`, so once for each node. A process that had to
open a file alone writes a new one. Writers race without harm: the last one wins, and files replaced since are not used.
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
from binidx.storage.requests.metadata import is_absent
from binidx.storage.stores.identity import proves_content, same_object
from binidx.storage.writing.publish import create_object, join_uri

MAGIC = b"BINIDXB1"
HEADER = struct.Struct("<8sQQ")

TABLE = JsonFile[list[tuple[str, Count, Count, str, dict[str, Any]]]](
    list[tuple[str, Count, Count, str, dict[str, Any]]]
)

LARGEST_BYTES = 1 << 20
"""Largest `.idx` in a bundle; the bytes of a larger one cost more than its request."""

BUNDLE_BYTES = 64 << 20
"""Largest total of the files of a bundle, as it is always fetched whole."""

Identity = Mapping[str, Any]
File = tuple[Identity, memoryview | None]


@dataclass(frozen=True)
class BundledFiles:
    """Bundle in memory.

    Attributes:
        table: by prefix, (first byte, bytes, checksum, identity) of its `.idx` in `files`.
    """

    table: Mapping[str, tuple[int, int, str, Identity]]
    files: memoryview

    def find(self, prefix: str, identity: Identity) -> memoryview | None:
        """Return the bytes of the `.idx` of a prefix if the bundled object has this identity, else None."""
        if prefix not in self.table:
            return None
        first, size, checksum, bundled = self.table[prefix]
        if not same_object(bundled, identity):
            return None
        found = self.files[first : first + size]
        return found if len(found) == identity["size"] and xxhash.xxh3_64_hexdigest(found) == checksum else None


def select_bundled(identities: Mapping[str, Identity]) -> list[str]:
    """Return the prefixes whose `.idx` files belong in a bundle: the smallest ones, up to its limits."""
    fit = [(int(each["size"]), prefix) for prefix, each in identities.items() if proves_content(each)]
    chosen, total = [], 0
    for size, prefix in sorted(fit):
        total += size
        if size > LARGEST_BYTES or total > BUNDLE_BYTES:
            break
        chosen.append(prefix)
    return sorted(chosen)


def format_bundle(files: Mapping[str, File], chosen: Sequence[str]) -> list[bytes | memoryview]:
    """Return the bytes of a bundle of the chosen prefixes, in pieces."""
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


def parse_bundle(buffer: memoryview, uri: str) -> BundledFiles:
    """Parse the bytes of a bundle; files are compared with their checksums when they are used.

    Raises:
        FormatError: the bytes are not a bundle, or the table is damaged.
    """
    if len(buffer) < HEADER.size:
        raise FormatError(f"{uri}: {len(buffer)} bytes, the header of a bundle needs {HEADER.size}")
    magic, table_bytes, checksum = HEADER.unpack_from(buffer)
    text = buffer[HEADER.size : HEADER.size + min(table_bytes, len(buffer))]
    if magic != MAGIC or len(text) != table_bytes or xxhash.xxh3_64_intdigest(text) != checksum:
        raise FormatError(f"{uri}: no bundle, or its table is damaged")
    table = {row[0]: row[1:] for row in TABLE.decode(text, uri)}
    return BundledFiles(table, buffer[HEADER.size + table_bytes :])


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IdxBundle:
    """Stored bundle of a run.

    Args:
        directory: URI of its directory, created if the store has directories.
        writable: whether this process may write it.
    """

    directory: str
    writable: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def read(self, prefixes: Sequence[str]) -> BundledFiles | None:
        """Return the bundle of the prefixes; None if there is no valid one, with the reason in the log."""
        uri = self.uri(prefixes)
        try:
            return parse_bundle(read_whole(open_object(uri, storage_options=self.storage_options, cache="disk")), uri)
        except FormatError as error:
            logger.warning("%s: unusable, opening each .idx: %s", uri, error)
        except StorageError as error:
            logger.log(logging.DEBUG if is_absent(error) else logging.WARNING, "%s: opening each .idx: %s", uri, error)
        return None

    def update(self, prefixes: Sequence[str], files: Mapping[str, File], missing: Collection[str]) -> None:
        """Write a new bundle if one of the `missing` prefixes belongs in it; a failed write is logged.

        Args:
            files: by prefix, identity and bytes of its `.idx`; the bytes are None if it was not read.
        """
        chosen = select_bundled({prefix: identity for prefix, (identity, data) in files.items() if data is not None})
        if not {*missing} & {*chosen}:
            return
        uri = self.uri(prefixes)
        try:
            with create_object(uri, self.storage_options, durable=False) as out:
                for piece in format_bundle(files, chosen):
                    out.write(piece)
        except (OSError, NotImplementedError) as error:
            logger.warning("%s: not written, so every start opens each .idx alone: %s", uri, error)

    def uri(self, prefixes: Sequence[str]) -> str:
        names = "\n".join(sorted({*prefixes}))
        return join_uri(self.directory, f"{xxhash.xxh3_128_hexdigest(names.encode())}-binidx-idx.bundle")
