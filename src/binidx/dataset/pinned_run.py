"""Pinned file of a run: the versions of its remote objects, so that starts neither list folders nor look up objects.

    {path_to_cache}/{xxh3_128 of the sorted prefixes}-binidx-pinned.json

    {"binidx": "pinned", "version": 1,
     "library": "0.1.0", "algorithm": 3,                            versions that built the indices
     "pairs": {"s3://corpus/en": {"tokens": ".bin", "idx": {"size": 300, "etag": ...}, "bin": ..., "sums": ...}},
     "indices": {"{hash}-GPTDataset-train": {"document_index": "{xxh3_64}", ...}},
     "xxh3_64": ...}                                                of all of this, so that a flipped bit is found

`binidx prepare index` writes it after the build of the indices, of the very objects that it opened. From then on a
start with these prefixes and this path_to_cache opens these versions, or raises an error that names the moved objects:

    every process     one HEAD of this file; its bytes are in the index_dir of the node, fetched once. No LIST, and no
                      request for an `.idx` that is in the bundle or in the index_dir
    first rank        lists the folders once, meanwhile: moved objects end the start of all ranks. Prefixes that cannot
                      be listed cost a HEAD of the `.idx`
    later             reads are pinned: an object that moves after the start is an error at its next read

Objects are pinned if their ETag or generation proves their content, and with them the parts of no virtual merge. Others
and local files are opened as without this file. Cost: 290 bytes a prefix.

Source: ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any

import binidx
from binidx.dataset.config import BlendedMegatronDatasetConfig
from binidx.dataset.megatron.blended import BlendedDataset
from binidx.dataset.megatron.ordered_dataset import OrderedDataset
from binidx.dataset.torch_bridge import is_first_rank
from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, redacted
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.prefix_listing import ListedPair, group_prefixes, list_folder
from binidx.index.cache.manifest import ALGORITHM, Fields, checksum_fields, parse_checked
from binidx.json_models import JsonFile
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.location import Location, hash_uris
from binidx.storage.open import open_if_exists, read_whole, replace_cached
from binidx.storage.ranges import stored_reader
from binidx.storage.requests.remote_object import Found, find_object, object_identity
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.identity import proves_content, same_identity
from binidx.storage.threads import OPENS, REQUESTS
from binidx.storage.writing.publish import delete_object, write_object

MOST_NAMED = 5
"""Largest number of moved objects in one message."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedPair:
    """Versions of the files of a prefix.

    Attributes:
        tokens: suffix of the object with the tokens: `.bin`, or `.bin.zst`.
        idx, bin: identities of both objects.
        sums: identity of the `.bin.xxh3`; None: there is none.
    """

    tokens: str
    idx: Fields
    bin: Fields
    sums: Fields | None

    def __post_init__(self) -> None:
        for identity in self.identities.values():
            if not proves_content(identity) or not isinstance(identity.get("size"), int):
                raise FormatError(f"identity: found {dict(identity)}, needs a size and an ETag or a generation")

    @property
    def identities(self) -> dict[str, Fields]:
        """Identity of each object, by suffix."""
        sums = {} if self.sums is None else {f".bin{SUMS}": self.sums}
        return {".idx": self.idx, self.tokens: self.bin, **sums}


@dataclass(frozen=True)
class PinnedRun:
    """Fields of a pinned file, as described at the head of this module."""

    library: str
    algorithm: int
    pairs: Mapping[str, PinnedPair] = field(default_factory=dict)
    indices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


PINNED_FILE = JsonFile(PinnedRun, {"binidx": "pinned", "version": 1}, open=True)
KNOWN = {*PINNED_FILE.tags, *(known.name for known in fields(PinnedRun))}


@dataclass(frozen=True)
class PinnedFile:
    """Pinned file of some prefixes, which need not exist.

    Args:
        location: of the file.
        prefixes: the remote prefixes that it may pin.
    """

    location: Location
    prefixes: Collection[str]

    @classmethod
    def of(cls, config: BlendedMegatronDatasetConfig) -> PinnedFile | None:
        """Return the pinned file of a config; None without a path_to_cache, or if all data is local."""
        prefixes = {prefix for prefix in config.prefixes if Location(prefix).local_path is None}
        directory = config.cache_directory
        if directory is None or not prefixes:
            return None
        return cls(directory / f"{hash_uris(prefixes)}-binidx-pinned.json", prefixes)

    @cached_property
    def remedy(self) -> str:
        """Way out if an object has moved."""
        return (
            f"{self.location} pins this run to the recorded version: bring that back, or run binidx prepare index "
            "again, which pins the present objects (with --no-pin it pins none)"
        )

    def read(self, tries: int = 3) -> tuple[PinnedRun, Fields] | None:
        """Return the content of the file, and its unknown fields, which a later version wrote; None if there is none.

        Args:
            tries: largest number of reads of a file that is replaced meanwhile.

        Raises:
            FormatError: it is damaged, also in the store.
            StorageError: the store cannot be reached.
        """
        if (reader := open_if_exists(self.location, cache="disk")) is None:
            return None
        try:
            return self._parse(read_whole(reader))
        except ObjectChangedError:  # prepare index has just replaced it
            if tries <= 1:
                raise
            return self.read(tries - 1)
        except FormatError:  # a bit may have flipped on the way, or in the cache of this node
            data = read_whole(stored_reader(reader))
            parsed = self._parse(data)
            replace_cached(reader, data)
            return parsed

    def _parse(self, data: memoryview) -> tuple[PinnedRun, Fields]:
        uri = self.location.uri
        try:
            values = parse_checked(PINNED_FILE, data, uri)
            return PINNED_FILE.convert(values, uri), {name: values[name] for name in values.keys() - KNOWN}
        except FormatError as error:
            raise FormatError(f"{error}; binidx prepare index writes it again, with --no-pin deletes it") from error

    def write(self, run: PinnedRun, unknown: Fields) -> None:
        """Write the file, with the fields of a later version that were in it."""
        values = json.loads(json.dumps({**PINNED_FILE.tags, **unknown, **asdict(run)}))
        data = PINNED_FILE.encode({**values, "xxh3_64": checksum_fields(values)}, indent=1, sort_keys=True)
        write_object(self.location, [data], durable=False)

    @staticmethod
    def pin(config: BlendedMegatronDatasetConfig, datasets: Iterable[Any]) -> tuple[str | None, list[str]]:
        """Write the pinned file of a config, of its opened datasets.

        If there is nothing to pin, delete the file. Digests of indices of other runs over the same objects stay in it.

        Args:
            config: options of the run.
            datasets: all datasets of the run, with blends.

        Returns:
            URI of the file, None without one; and the prefixes of which the store sends no ETags, so they have no pins.
        """
        file, indexed = PinnedFile.of(config), [*datasets]
        if file is None:
            return None, []
        parts = [part for dataset in indexed if isinstance(dataset, OrderedDataset) for part in dataset.parts]
        opened = {part.dataset_path: part.dataset for part in parts if isinstance(part.dataset, IndexedDataset)}
        names = [prefix for prefix in sorted(file.prefixes) if prefix in opened]
        found = zip(names, OPENS.map(lambda prefix: _pin_pair(opened[prefix]), names), strict=True)
        pairs = {prefix: pair for prefix, pair in found if pair is not None}
        unproven = [name for name in names if not _proves_content(opened[name])]
        if not pairs:
            delete_object(file.location)
            return None, unproven
        before: tuple[PinnedRun | None, Fields] = None, {}
        with contextlib.suppress(FormatError):
            before = file.read() or before
        old, unknown = before
        kept = old.indices if old and old.pairs == pairs and old.algorithm == ALGORITHM else {}
        run = PinnedRun(binidx.__version__, ALGORITHM, pairs, {**kept, **collect_digests(indexed)})
        if old is None or run != replace(old, library=run.library):  # versions in turn do not replace the file
            file.write(run, unknown)
        return file.location.uri, unproven

    @staticmethod
    def list_indexed(built: Iterable[Any]) -> Iterator[Any]:
        """Yield the datasets with an index, split by split; the blend of a split comes first."""
        for split in built:
            for dataset in split if isinstance(split, list) else [split]:
                if dataset is not None:
                    yield dataset
                yield from dataset.datasets if isinstance(dataset, BlendedDataset) else ()


@dataclass(frozen=True)
class Pins:
    """Pinned versions of a run in use.

    Args:
        file: the pinned file.
        run: its content.
    """

    file: PinnedFile
    run: PinnedRun

    @cached_property
    def pairs(self) -> dict[str, ListedPair]:
        """Pinned pairs by prefix, to be opened without a request."""
        return {prefix: self._pair(prefix, pair) for prefix, pair in self.run.pairs.items()}

    def _pair(self, prefix: str, pair: PinnedPair) -> ListedPair:
        def found(suffix: str, identity: Fields) -> Found:
            return Found(ObjectInfo(prefix + suffix, identity["size"], dict(identity), remedy=self.file.remedy))

        sums = None if pair.sums is None else found(f".bin{SUMS}", pair.sums)
        return ListedPair(found(".idx", pair.idx), found(pair.tokens, pair.bin), sums, remedy=self.file.remedy)

    def check_objects(self) -> None:
        """Raise ObjectChangedError if pinned objects have other versions now, or are gone."""
        options = self.file.location.options
        locations = [Location(prefix, options) for prefix in self.run.pairs]
        stored: dict[str, Fields] = {}
        unlisted = {location.uri for location in locations}
        for group in group_prefixes(locations):
            if (objects := list_folder(group)) is not None:
                stored |= {uri: info.identity for uri, info in objects.items()}
                unlisted -= {location.uri for location in group}

        def look_up(uri: str) -> None:
            with contextlib.suppress(ObjectNotFoundError):
                stored[uri] = object_identity(Location(uri, options))

        REQUESTS.map(look_up, [f"{prefix}.idx" for prefix in sorted(unlisted)])
        moved = []
        for prefix, pair in self.run.pairs.items():
            for suffix in [".idx"] if prefix in unlisted else pair.identities:
                was, now = pair.identities[suffix], stored.get(prefix + suffix)
                if now is None or not same_identity(was, now):
                    moved.append(f"{prefix}{suffix} (was {dict(was)}, {'deleted' if now is None else f'now {now}'})")
        if moved:
            named = ", ".join(islice(moved, MOST_NAMED)) + (", ..." if len(moved) > MOST_NAMED else "")
            raise ObjectChangedError(f"{named}: {len(moved):,} objects of the run moved; {self.file.remedy}")

    def check_indices(self, datasets: Iterable[Any]) -> None:
        """Raise ObjectChangedError if a cached index of some datasets has other arrays than those that are pinned."""
        for name, digests in collect_digests(datasets).items() if self.run.indices else ():
            pinned = self.run.indices.get(name, {})
            if moved := [array for array in digests if pinned.get(array, digests[array]) != digests[array]]:
                found, need = ({array: found.get(array) for array in moved} for found in (digests, pinned))
                raise ObjectChangedError(f"index {name}: changed (found {found}, need {need}); {self.file.remedy}")


@contextlib.contextmanager
def open_pins(config: BlendedMegatronDatasetConfig, opened: Collection[str] = ()) -> Iterator[Pins | None]:
    """Yield the pins of a config; None if there is no pinned file. At the end, the first rank raises if objects moved.

    Args:
        opened: prefixes that are open already; no file is read if all are.

    Raises:
        FormatError: the file is damaged, or of indices of another version of the library.
        ObjectChangedError: at the end of the block, pinned objects have moved.
    """
    file = PinnedFile.of(config)
    found = file.read() if file is not None and {*file.prefixes}.difference(opened) else None
    if file is None or found is None:
        yield None
        return
    run, unknown = found
    if unknown:
        names = ", ".join(sorted(unknown))
        logger.warning("%s: unknown fields %s, of a later version, are ignored", file.location, names)
    if run.algorithm != ALGORITHM:
        found_there = f"found algorithm {run.algorithm} of binidx {run.library or 'from its source'}"
        ours = f"this binidx {binidx.__version__} needs {ALGORITHM}"
        raise FormatError(f"{file.location}: of another version ({found_there}, {ours}); {file.remedy}")
    pins = Pins(file, run)
    pending = OPENS.submit(pins.check_objects) if is_first_rank() else None
    yield pins
    if pending is not None:
        pending.result()


def _proves_content(dataset: IndexedDataset) -> bool:
    """Return whether the versions of both files of an opened dataset prove their content."""
    return proves_content(dataset.opened["idx"]) and proves_content(stored_reader(dataset.bin_reader).identity)


def _pin_pair(dataset: IndexedDataset) -> PinnedPair | None:
    """Return the versions of the files of an opened dataset; None if they do not prove its content."""
    prefix, idx, tokens = dataset.location, dataset.opened["idx"], stored_reader(dataset.bin_reader)
    suffix = tokens.uri.removeprefix(prefix.uri)
    proven = _proves_content(dataset) and suffix.startswith(".bin")
    if not proven or redacted(prefix.uri) != prefix.uri:  # a signature would stand in the file
        return None
    sums = find_object(prefix + f".bin{SUMS}") if suffix == ".bin" else None
    if sums is not None and not proves_content(sums.info.identity):
        return None
    return PinnedPair(suffix, dict(idx), dict(tokens.identity), dict(sums.info.identity) if sums else None)


def collect_digests(datasets: Iterable[Any]) -> dict[str, dict[str, str]]:
    """Return, by name of the index, the XXH3 of the arrays of each index that was loaded or kept."""
    indexed = (dataset for dataset in datasets if isinstance(dataset, OrderedDataset))
    return {dataset.index_name: dict(dataset.index_digests) for dataset in indexed if dataset.index_digests}
