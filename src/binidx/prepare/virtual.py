"""A virtual merge written: the parts are opened and checked, and listed; no token and no index is copied.

Lineage is, where there is some: it is found under the prefix of the list, row i of document i.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ConfigError, ObjectExistsError
from binidx.format.bin_object import find_bin
from binidx.format.idx import get_idx_path
from binidx.format.virtual import Part, format_parts, get_parts_path, prefix_of_part
from binidx.prepare.finished import Finished, Options, Prefix
from binidx.prepare.lineage import bring_lineage
from binidx.prepare.merge import check_alike, open_all
from binidx.prepare.sidecars import check_tokenizers
from binidx.storage.filesystem import local_path
from binidx.storage.join import IN_FLIGHT
from binidx.storage.publish import create_object, object_exists
from binidx.storage.resumable import Silent, Watch, in_flight


@dataclass(frozen=True)
class Listed:
    """What was written."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def merge_virtually(
    sources: Sequence[Prefix],
    target: Prefix,
    *,
    overwrite: bool = False,
    storage_options: Options = None,
    watch: Watch | None = None,
) -> Listed:
    """List datasets as the parts of one, which then opens under the prefix `target`.

    Args:
        overwrite: replace a list that stands there; a dataset that does is never replaced.

    Raises:
        ConfigError: nothing to merge, or a part is itself virtual.
        FormatError: a source is no sound dataset, or has another dtype.
        ObjectExistsError: something stands at the target.
    """
    uri, prefixes = get_parts_path(os.fspath(target)), [_whole(os.fspath(each)) for each in sources]
    _check_free(os.fspath(target), uri, storage_options, overwrite)
    opened, watch = open_all(prefixes, storage_options), watch or Silent()
    check_alike(opened, mixed=True)
    check_tokenizers(opened)
    for each in opened:
        if each.source.num_parts:
            raise ConfigError(f"{each.prefix}: is itself a virtual merge, needed its parts")
    check_indices(opened, watch)
    bring_lineage(opened, os.fspath(target), storage_options)
    with create_object(uri, storage_options) as out:
        out.write(format_parts(opened[0].index.dtype.__name__, [_part(_whole(uri), each) for each in opened]))
    indices = [each.index for each in opened]
    documents, sequences = sum(each.num_documents for each in indices), sum(each.num_sequences for each in indices)
    return Listed(os.fspath(target), len(opened), documents, sequences, sum(each.num_tokens for each in indices))


def check_indices(opened: Sequence[Finished], watch: Watch) -> None:
    """Read every index, and check it; some at once."""
    watch.begin("index", sum(each.index.size for each in opened), 0)
    with closing(in_flight(lambda each: each.index.check(), opened, IN_FLIGHT)) as read:
        for each, _ in zip(opened, read, strict=True):
            each.check_size(each.source.plain_bytes())
            watch.advance(each.index.size)


def _part(uri: str, dataset: Finished) -> Part:
    prefix, marks = prefix_of_part(uri, dataset.prefix), dataset.source.opened
    return Part(prefix, dataset.index.num_sequences, dataset.index.num_tokens, marks["idx"], marks["bin"])


def _whole(prefix: str) -> str:
    """Of a local one the whole path: a list is read from anywhere."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)


def _check_free(target: str, uri: str, options: Options, overwrite: bool) -> None:
    if object_exists(get_idx_path(target), options) or find_bin(target, options):
        raise ObjectExistsError(f"{target}: holds a dataset, needed a free name; a list beside it would not be seen")
    if not overwrite and object_exists(uri, options):
        raise ObjectExistsError(f"{uri}: stands there, needed a free name; --overwrite replaces it")
