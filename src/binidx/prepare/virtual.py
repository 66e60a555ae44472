"""A virtual merge written: the parts are opened and checked, and listed; no token and no index is copied.

Lineage is, where there is some: it is found under the prefix of the list, row i of document i.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.bin_object import find_bin
from binidx.format.idx import get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.listed import listed
from binidx.format.virtual import Part, format_parts, get_parts_path, prefix_of_part, together
from binidx.prepare.finished import Prefix
from binidx.prepare.lineage import bring_lineage
from binidx.storage.filesystem import local_path
from binidx.storage.joined import Joined
from binidx.storage.publish import create_object, object_exists

Options = Mapping[str, Any] | None


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
    sources: Sequence[Prefix], target: Prefix, *, overwrite: bool = False, storage_options: Options = None
) -> Listed:
    """List datasets as the parts of one, which then opens under the prefix `target`.

    Args:
        overwrite: replace a list that stands there; a dataset that does is never replaced.

    Raises:
        ConfigError: nothing to merge, or a part is itself virtual.
        FormatError: a source is no sound dataset, or has another dtype.
        ObjectExistsError: something stands at the target.
    """
    if not sources:
        raise ConfigError("merge: 0 datasets, needed at least one")
    uri, prefixes = get_parts_path(os.fspath(target)), [_whole(os.fspath(each)) for each in sources]
    _check_free(os.fspath(target), uri, storage_options, overwrite)
    with listed(prefixes, storage_options):
        opened = together(lambda prefix: IndexedDataset(prefix, storage_options=storage_options), prefixes)
    _check_alike(opened)
    parts = [_part(_whole(uri), each) for each in opened]
    counts = [each.index.document_count - 1 for each in opened]
    bring_lineage(list(zip(prefixes, counts, strict=True)), os.fspath(target), storage_options)
    with create_object(uri, storage_options) as out:
        out.write(format_parts(opened[0].index.dtype.__name__, parts))
    documents = sum(counts)
    sequences, tokens = sum(map(len, opened)), sum(each.index.num_tokens for each in opened)
    return Listed(os.fspath(target), len(opened), documents, sequences, tokens)


def _part(uri: str, dataset: IndexedDataset) -> Part:
    prefix = prefix_of_part(uri, dataset.path_prefix)
    marks = dataset.opened
    return Part(prefix, len(dataset), dataset.index.num_tokens, dict(marks["idx"]), dict(marks["bin"]))


def _whole(prefix: str) -> str:
    """Of a local one the whole path: a list is read from anywhere."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)


def _check_free(target: str, uri: str, options: Options, overwrite: bool) -> None:
    if object_exists(get_idx_path(target), options) or find_bin(target, options):
        raise ObjectExistsError(f"{target}: holds a dataset, needed a free name; a list beside it would not be seen")
    if not overwrite and object_exists(uri, options):
        raise ObjectExistsError(f"{uri}: stands there, needed a free name; --overwrite replaces it")


def _check_alike(opened: Sequence[IndexedDataset]) -> None:
    first = opened[0]
    for each in opened:
        if isinstance(each.bin_reader, Joined):
            raise ConfigError(f"{each.path_prefix}: is itself a virtual merge, needed its parts")
        if each.index.dtype is not first.index.dtype:
            found, needed = each.index.dtype.__name__, first.index.dtype.__name__
            raise FormatError(f"{each.path_prefix}: dtype {found}, needed {needed} as in {first.path_prefix}")
