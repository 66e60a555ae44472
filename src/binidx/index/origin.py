"""Where an index comes from: a dataset as it is now, in the terms of a manifest."""

from __future__ import annotations

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
SETTLED_SECONDS = 2.0
"""A file changed again within a tick of its file system's clock keeps its times; FAT's tick is the longest."""


def origin_of(dataset: IndexedDataset) -> Origin:
    """The dataset behind an index."""

    def data() -> Mapping[str, Fields]:
        return {**dataset.opened, "idx": idx_identity(get_idx_path(dataset.path_prefix), dataset.opened["idx"])}

    def content() -> Fields:
        return {name: dataset.identity[name] for name in ("num_sequences", "index_digest")}

    def facts() -> Fields:
        return {ONE_EACH: dataset.one_each}

    return Origin(data, content, facts)


def describe_documents(documents: Documents) -> str:
    """Which sequences a split has, told of a range without a pass over its numbers: "0:300000000", else a digest."""
    run = documents if isinstance(documents, range) else compact(documents)
    return f"{run.start}:{run.stop}" if isinstance(run, range) and run.step == 1 else digest_of(documents)


def idx_identity(uri: str, opened: Mapping[str, Any]) -> Fields:
    """What the store says of the .idx; of a local file that has lain still, inode and times to the nanosecond."""
    path = filesystem.local_path(uri)
    if path is None:
        return opened
    try:
        found = os.stat(path)
    except OSError:
        return opened
    same = (found.st_size, found.st_mtime) == (opened.get("size"), opened.get("mtime"))
    if not same or time.time() - found.st_ctime < SETTLED_SECONDS:
        return opened
    times = {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    return {"size": found.st_size, **times, "inode": found.st_ino}
