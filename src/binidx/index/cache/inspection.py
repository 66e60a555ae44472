"""State of a cached index, from its manifest alone: no array is read, and nothing is written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from binidx.errors import FormatError, StorageError
from binidx.format.source import DatasetFiles
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import ALGORITHM, DECIDING, Fields, Manifest, hash_fields, list_differences, prove_idx
from binidx.index.cache.order_record import ORDERS, OrderKey, describe_change, parse_known
from binidx.storage.stores.identity import same_object


class CacheState(StrEnum):
    """State of the files of an index.

    UNPROVEN: the `.idx` is another object than when the index was built, maybe of equal content; a start compares it.
    """

    THERE = "there"
    MISSING = "missing"
    STALE = "stale"
    UNPROVEN = "to be proven"
    SMALL_ONE = "not kept"
    UNNAMED = "none"


@dataclass(frozen=True)
class IndexFilesState:
    """Files of an index in a cache.

    Attributes:
        state: their state.
        why: the reason of the state STALE or UNPROVEN.
        manifest: the manifest of an index that is THERE, or UNPROVEN with an `.idx` of unchanged size.
    """

    state: CacheState
    why: str = ""
    manifest: Manifest | None = None

    @property
    def content(self) -> Fields | None:
        """Fields of the data of which the index was built, as far as they decide about it; None without a manifest."""
        return None if self.manifest is None else {name: self.manifest.content.get(name) for name in DECIDING}

    @classmethod
    def of(cls, files: IndexFiles, options: Fields, dataset: DatasetFiles | None = None) -> IndexFilesState:
        """Return the state of an index.

        Args:
            files: files of the index in the cache.
            options: those on which the arrays depend, without the algorithm.
            dataset: the data of the index; None if it has none.
        """
        try:
            manifest = files.read_manifest()
        except (FormatError, StorageError) as error:
            return cls(CacheState.STALE, str(error))
        if manifest is None:
            return cls(CacheState.MISSING)
        if wrong := list_differences(manifest.fingerprint, {"algorithm": ALGORITHM, **options}):
            return cls(CacheState.STALE, "; ".join(wrong))
        if dataset is None:
            return cls(CacheState.THERE, manifest=manifest)
        idx = {} if dataset.num_parts else prove_idx(dataset.prefix + ".idx", dataset.opened["idx"])
        if same_object(manifest.data.get("idx"), idx):
            return cls(CacheState.THERE, manifest=manifest)
        likely = manifest if idx.get("size") == manifest.data.get("idx", {}).get("size") else None
        why = "nothing shows that the .idx is the one it was: a start reads and compares it"
        return cls(CacheState.UNPROVEN, why, likely)

    def read_order_change(self, files: IndexFiles, options: Fields, order: OrderKey) -> str:
        """Return the message for an order that differs from those of all recorded indices of the same data; else "".

        The record of orders is named by a hash of the data, which the manifest of any index of the data contains.

        Args:
            files, options: as in `of`, of an index of the same data.
            order: order of that index.
        """
        record = IndexFiles(files.directory, hash_fields({"algorithm": ALGORITHM, **options}, self.content or {}))
        with suppress(StorageError):
            return describe_change(parse_known(record.read_small(ORDERS) or b""), order, files.name)
        return ""
