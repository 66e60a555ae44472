"""Open many prefixes with two lists of their folders instead of five requests for each.

    first list     p0.bin B0   p0.idx E0   p1.bin B1   p1.idx E1 …
    second list    p0.bin B0   p0.idx E0   p1.bin B2   p1.idx E3 …
                   unchanged: a pair       changed: opened alone, by `pair`

A writer removes the `.idx` first and publishes the new one last. If `.idx` and `.bin` are the same in both lists, both
existed at the moment between the lists, and so belong to one dataset. Later reads are pinned to these versions: an
`.idx` that was replaced since is not read.

A list costs two requests for each thousand objects. Lists are made if at least `MIN_LISTED_PREFIXES` prefixes are in
one folder, or in folders of one bucket with few other objects between them; compressed datasets, and folders that may
not be listed, are opened alone.

The bytes of small listed `.idx` files come from the bundle of the run, if there is one: one request instead of one for
each file.

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

The bundle is read at the same time as the lists, through the `index_dir`, so once for each node. Files that it lacks
are read at once (`read_together`), and the process that had to do that writes a new bundle before it opens any. Writers
race without harm: the last one wins, and files replaced since are not used.

1,000 prefixes 30 ms away, cold start to the first batch (two cores, proxy and server on them): 1.0 s with lists and
bundle, 2 s with lists alone, 15 s with neither. The bundle needs the lists, which prove that it is current.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import ceil
from types import MappingProxyType
from typing import Any, ClassVar

import xxhash

from binidx.errors import FormatError, StorageError
from binidx.format.idx import parse_index
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.json_models import Count, JsonFile
from binidx.storage.adapters import JoinedReader
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.location import Location, hash_uris
from binidx.storage.open import add_disk_cache, open_if_exists, read_whole
from binidx.storage.requests.remote_object import NAMES_AT_ONCE, PAGE_KEYS, Found, RemoteObject, list_objects
from binidx.storage.store_protocols import ListableStore, ObjectInfo
from binidx.storage.stores.identity import proves_content, same_object
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import write_object

logger = logging.getLogger(__name__)
MIN_LISTED_PREFIXES = 8
"""Fewest prefixes for which their folder is listed: it saves time, but S3 charges twelve times as much as for a GET."""

OTHER_OBJECTS_PER_PREFIX = 8
"""Other objects for each prefix, in the folder or between folders, after which listing is given up."""


MAGIC = b"BINIDXB1"
HEADER = struct.Struct("<8sQQ")

TABLE = JsonFile(list[tuple[str, Count, Count, str, dict[str, Any]]])

LARGEST_BYTES = 1 << 20
"""Largest `.idx` in a bundle; the bytes of a larger one cost more than its request."""

BUNDLE_BYTES = 64 << 20
"""Largest total of the files of a bundle, as it is always fetched whole."""

Identity = Mapping[str, Any]
File = tuple[Identity, memoryview]


@dataclass(frozen=True, slots=True)
class ListedPair:
    """`.idx` and tokens of one prefix that belong together: unchanged between two listings, or pinned for the run.

    Later reads are pinned to these versions.

    Attributes:
        idx: the listed `.idx`.
        bin: the listed `.bin`; of a pinned pair it may be compressed.
        sums: the listed `.bin.xxh3`; None if there is none.
        sidecars: suffixes of the sidecars that exist, of those in `SIDECARS`.
        index: bytes of the `.idx`, from the bundle of the run or read with those of other prefixes; None: not read yet.
        remedy: way out if a file is of another version, for messages; empty: the pair is then opened anew.
        prefix: location of the prefix, over a store that many pairs share; None: not known.
    """

    idx: Found
    bin: Found
    sums: Found | None
    sidecars: frozenset[str] = frozenset()
    index: memoryview | None = None
    remedy: str = ""
    prefix: Location | None = None

    @staticmethod
    def list_all(prefixes: Sequence[Location]) -> dict[str, ListedPair]:
        """List the folders of the prefixes twice; return, by URI, the pairs that are the same in both listings.

        Args:
            prefixes: all with the same options.
        """

        def list_twice(folder: list[Location]) -> dict[str, ListedPair]:
            before = list_folder(folder)
            after = None if before is None else list_folder(folder)
            return {} if before is None or after is None else _unchanged_pairs(map(str, folder), before, after)

        listed = OPENS.map(list_twice, group_prefixes(prefixes))
        return {prefix: pair for folder in listed for prefix, pair in folder.items()}

    @staticmethod
    def count_lists(prefixes: Sequence[Location]) -> Counter[str]:
        """Return the number of list requests by which `list_all` lists prefixes, by place; other prefixes have none."""
        counts = Counter[str]()
        for group in group_prefixes(prefixes):
            if isinstance(group[0].store, ListableStore):
                counts[group[0].place] += 2 * ceil(2 * len(group) / NAMES_AT_ONCE)
        return counts

    @property
    def identity(self) -> Identity:
        """Identity of the `.idx`."""
        return self.idx.info.identity


@dataclass(frozen=True)
class BundledFiles:
    """Bundle in memory: the bytes of many `.idx` files, read by one request.

    Attributes:
        table: by prefix, (first byte, bytes, checksum, identity) of its `.idx` in `files`.
    """

    table: Mapping[str, tuple[int, int, str, Identity]]
    files: memoryview

    def find(self, prefix: str, identity: Identity) -> memoryview | None:
        """Return the bytes of the `.idx` of a prefix; None if the bundle lacks that object, or its bytes are damaged.

        Args:
            prefix: URI of the prefix.
            identity: present identity of its `.idx`.
        """
        if prefix not in self.table:
            return None
        first, size, checksum, bundled = self.table[prefix]
        if not same_object(bundled, identity):
            return None
        data = self.files[first : first + size]
        return data if len(data) == identity["size"] and xxhash.xxh3_64_hexdigest(data) == checksum else None


def is_index(data: memoryview, prefix: str) -> bool:
    """Return whether these are the bytes of a valid `.idx`."""
    with contextlib.suppress(FormatError):
        parse_index(data, uri=prefix)
        return True
    return False


def format_bundle(files: Mapping[str, File], chosen: Sequence[str]) -> list[bytes | memoryview]:
    """Return the bytes of a bundle of the chosen prefixes, in pieces.

    Args:
        files: identity and bytes of the `.idx` of each prefix.
        chosen: prefixes, ascending.
    """
    table, first = [], 0
    for prefix in chosen:
        identity, data = files[prefix]
        table.append([prefix, first, len(data), xxhash.xxh3_64_hexdigest(data), dict(identity)])
        first += len(data)
    text = json.dumps(table, separators=(",", ":")).encode()
    header = HEADER.pack(MAGIC, len(text), xxhash.xxh3_64_intdigest(text))
    return [header, text, *(files[prefix][1] for prefix in chosen)]


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


@dataclass(frozen=True)
class IdxBundle:
    """Bundle of a run in a store: one object with the bytes of its `.idx` files.

    Args:
        directory: created if the store has directories.
        writable: whether this process may write it.

    Attributes:
        LEAST: fewest prefixes for which there is one.
    """

    directory: Location
    writable: bool = True

    LEAST: ClassVar[int] = MIN_LISTED_PREFIXES

    def read(self, prefixes: Sequence[str]) -> BundledFiles | None:
        """Return the bundle of the prefixes; None if there is no valid one, with the reason in the log."""
        file = self.file(prefixes)
        try:
            reader = open_if_exists(file, cache="disk")
            return None if reader is None else parse_bundle(read_whole(reader), file.uri)
        except (FormatError, StorageError) as error:
            logger.warning("%s: unusable, opening each .idx: %s", file, error)
            return None

    def update(self, prefixes: Sequence[str], files: Mapping[str, File], missing: Collection[str]) -> None:
        """Write a new bundle if one of the `missing` prefixes belongs in it; a failed write is logged.

        Args:
            files: by prefix, identity and bytes of the `.idx` files that were read.
            missing: prefixes that the bundle lacks. Those whose bytes are no `.idx`, as a bit flipped on the way, are
                left out.
        """
        files = {name: file for name, file in files.items() if name not in missing or is_index(file[1], name)}
        chosen = IdxBundle.select({prefix: identity for prefix, (identity, _) in files.items()})
        if not {*missing} & {*chosen}:
            return
        file = self.file(prefixes)
        try:
            # Not patient: this start has read all that it holds.
            write_object(file, format_bundle(files, chosen), durable=False, patient=False)
        except (OSError, NotImplementedError) as error:
            logger.warning("%s: not written, so every start opens each .idx alone: %s", file, error)

    def file(self, prefixes: Sequence[str]) -> Location:
        return self.directory / f"{hash_uris(prefixes)}-binidx-idx.bundle"

    @staticmethod
    def select(identities: Mapping[str, Identity]) -> list[str]:
        """Return the prefixes whose `.idx` belongs in a bundle: the smallest with an ETag or generation."""
        fit = [(int(identity["size"]), prefix) for prefix, identity in identities.items() if proves_content(identity)]
        chosen, total = [], 0
        for size, prefix in sorted(fit):
            total += size
            if size > LARGEST_BYTES or total > BUNDLE_BYTES:
                break
            chosen.append(prefix)
        return sorted(chosen)


def list_pairs_with_bundle(
    prefixes: Sequence[Location], bundle: IdxBundle | None, pinned: Mapping[str, ListedPair] = MappingProxyType({})
) -> dict[str, ListedPair]:
    """Return pinned pairs, and `ListedPair.list_all` of other prefixes, with the bytes of their small `.idx` files.

    Args:
        bundle: has the bytes, and is rewritten if it lacks some; None: small files are read together.
        pinned: by prefix, pairs that need no listing.
    """
    names = [prefix.uri for prefix in prefixes]
    pending = OPENS.submit(partial(bundle.read, names)) if bundle and len(names) >= MIN_LISTED_PREFIXES else None
    pairs = ListedPair.list_all([prefix for prefix in prefixes if prefix.uri not in pinned])
    pairs |= {name: pinned[name] for name in names if name in pinned}
    firsts: dict[str, Location] = {}
    known = [prefix for prefix in prefixes if prefix.uri in pairs]
    locations = {prefix.uri: firsts.setdefault(prefix.place, prefix).beside(prefix.uri) for prefix in known}
    bundled = pending and pending.result()
    files = {name: data for name, pair in pairs.items() if bundled and (data := bundled.find(name, pair.identity))}
    del bundled  # its table has 0.5 KB a prefix
    missing = {name: pair.idx.info for name, pair in pairs.items() if name not in files}
    read = read_together(locations, missing, 1 if pending else MIN_LISTED_PREFIXES)
    files |= read
    if read and bundle and bundle.writable:
        bundle.update(names, {name: (pairs[name].identity, data) for name, data in files.items()}, read)
    return {name: replace(pair, index=files.get(name), prefix=locations[name]) for name, pair in pairs.items()}


def read_together(
    locations: Mapping[str, Location], infos: Mapping[str, ObjectInfo], least: int
) -> dict[str, memoryview]:
    """Read the small `.idx` files of many prefixes in one read, as one object in the cache of this node.

    A thread, and files in the cache, for each of 1,000 prefixes took ten times the CPU of their requests. If one cannot
    be read, as it was replaced since it was listed, none is, and each is opened alone.

    Args:
        locations: prefixes by URI.
        infos: listed `.idx` of each prefix, by its URI.
        least: fewest files to read so.

    Returns:
        By URI of the prefix, the bytes of its `.idx`.
    """
    chosen = IdxBundle.select({uri: info.identity for uri, info in infos.items()})
    if len(chosen) < least:
        return {}
    readers = [RemoteObject(locations[uri] + ".idx", info=infos[uri]) for uri in chosen]
    versions = json.dumps([[reader.uri, reader.identity] for reader in readers], sort_keys=True).encode()
    folder, version = readers[0].location.uri.rpartition("/")[0], xxhash.xxh3_128_hexdigest(versions)
    sizes = [reader.size for reader in readers]
    joined = JoinedReader(f"{folder}/{version}-idx.bundle", readers, sizes, {"size": sum(sizes), "version": version})
    try:
        data = read_whole(add_disk_cache(joined, readers[0].settings, whole=True))
    except StorageError as error:
        logger.info("%s: %d .idx not read at once, each is opened alone: %s", folder, len(chosen), error)
        return {}
    return {uri: data[stop - size : stop] for uri, size, stop in zip(chosen, sizes, accumulate(sizes), strict=True)}


def list_folder(prefixes: Sequence[Location]) -> dict[str, ObjectInfo] | None:
    """Return the objects at and between some prefixes by URI; None if they cannot be listed, or are too many.

    Args:
        prefixes: a group of `group_prefixes`.
    """
    objects = [prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx")]
    pages = 2 * len(objects) // PAGE_KEYS + 2 + OTHER_OBJECTS_PER_PREFIX * len(prefixes) // PAGE_KEYS
    try:
        return list_objects(objects, most_pages=pages)
    except StorageError as error:
        # Objects may be readable without permission to list; opening each raises the error of an unreachable store.
        logger.debug("%s: not listed, each dataset is opened alone: %s", objects[0], error)
        return None


def group_prefixes(prefixes: Sequence[Location]) -> list[list[Location]]:
    """Return groups of remote prefixes to list together: each MIN_LISTED_PREFIXES or more, of one folder or bucket."""
    folders: dict[str, list[Location]] = defaultdict(list)
    buckets: dict[str, list[Location]] = defaultdict(list)
    for prefix in dict.fromkeys(prefixes):
        if prefix.local_path is None:
            folders[prefix.uri.rpartition("/")[0]].append(prefix)
    for folder, those in folders.items():
        if len(those) < MIN_LISTED_PREFIXES:
            buckets["/".join(folder.split("/")[:3])] += those
    return [those for those in (*folders.values(), *buckets.values()) if len(those) >= MIN_LISTED_PREFIXES]


def _unchanged_pairs(
    prefixes: Iterable[str], before: Mapping[str, ObjectInfo], after: Mapping[str, ObjectInfo]
) -> dict[str, ListedPair]:
    pairs = {}
    for prefix in prefixes:
        names = idx, tokens, sums = f"{prefix}.idx", f"{prefix}.bin", f"{prefix}.bin{SUMS}"
        same = all(before.get(name) == after.get(name) for name in names)
        if idx in after and tokens in after and same:
            found_sums = Found(after[sums]) if sums in after else None
            beside = frozenset(end for end in SIDECARS if prefix + end in after)
            pairs[prefix] = ListedPair(Found(after[idx]), Found(after[tokens]), found_sums, beside)
    return pairs
