"""A dataset that is read from end to end: its index in blocks, its tokens as they are stored or plain."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from binidx.corpus.convert_journal import DatasetTarget
from binidx.errors import ConfigError, FormatError
from binidx.format.index_writer import IndexColumns
from binidx.format.prefix_listing import ListedPair
from binidx.format.source import absolute_uri
from binidx.format.virtual_source import open_source
from binidx.storage.writing.publish import create_object

Options = Mapping[str, Any] | None


Prefix = str | os.PathLike[str]


class WholeDataset:
    """The dataset under a prefix, a pair of files or a virtual merge.

    Args:
        listed: the pair, where a list of its folder has shown it.

    Attributes:
        source: its objects.
        index: its `.idx`.

    Raises:
        ObjectNotFoundError: a file is missing.
        FormatError: the header of its `.idx` breaks a rule.
        FormatError, ObjectChangedError: a part of a virtual one is not what was listed.
    """

    def __init__(self, prefix: Prefix, options: Options = None, listed: ListedPair | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.source = open_source(self.prefix, options, listed=listed)
        self.index = self.source.open_index()

    def check_size(self, plain_bytes: int) -> int:
        """The bytes that its index covers, known once that was read.

        Raises:
            FormatError: the `.bin` has fewer.
        """
        needed = self.index.num_tokens * self.index.item_bytes
        if plain_bytes < needed:
            raise FormatError(
                f"{self.source.bin_uri}: {plain_bytes} bytes, its .idx needs {needed} "
                f"({self.index.num_tokens} tokens of {self.index.dtype.__name__})"
            )
        return needed

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """ObjectChangedError unless its files, in a list made now or asked for, are still those that were opened."""
        self.source.check_unchanged(listed)


def open_target(
    prefix: Prefix, codec: str, sources: Sequence[WholeDataset], options: Options, *, overwrite: bool
) -> DatasetTarget:
    """A place that a dataset may be written to.

    Raises:
        ConfigError: it is a folder, or one of the sources.
        ObjectExistsError: something stands there, and nobody said `overwrite`.
    """
    name = os.fspath(prefix)
    if name.endswith("/"):
        raise ConfigError(f"{name}: a folder, needed a prefix such as {name}en")
    if any(absolute_uri(name) in each.source.places for each in sources):
        raise ConfigError(f"{name}: is read and written, needed another prefix to write to")
    target = DatasetTarget(name, codec, options)
    if not overwrite:
        target.check_free(None, ours=False)
    return target


def publish_dataset(
    target: DatasetTarget, columns: IndexColumns, publish_bin: Callable[[], object], check: Callable[[], object]
) -> None:
    """Write the `.idx` unseen; then `check`, show the `.bin` by `publish_bin`, and the `.idx` last."""

    def before() -> None:
        check()
        publish_bin()

    with create_object(target.idx_uri, target.options, before_publish=before) as writer:
        for piece in columns.format():
            writer.write(piece)
