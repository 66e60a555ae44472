"""Where an index comes from: a dataset as it is now, in the terms of a manifest."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from binidx.format.idx import get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.documents import Documents, compact, digest_of
from binidx.index.manifest import Fields, Origin
from binidx.storage import filesystem

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
    return f"{run.start}:{run.stop}" if isinstance(run, range) and run.step == 1 else digest_of(documents)


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
    path = filesystem.local_path(uri)
    with contextlib.suppress(OSError):
        return None if path is None else os.stat(path)
    return None


def _same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Whether a file was neither changed nor replaced."""

    def marks(found: os.stat_result) -> tuple[int, ...]:
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return one is other if one is None or other is None else marks(one) == marks(other)
