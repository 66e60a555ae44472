"""A `.bin` on its way: compressed if its name says so, with checksums beside it if asked; unseen until `publish`.

    plain bytes ─┬─► segments, if .bin.zst ─► the object
                 └─► a sum for each 16 KiB ─► .bin.xxh3

At publishing, once all is written: what `goes` goes, then all that could be taken for the new tokens, or for their
sums; then the object appears, then its sums. The caller sees to it that no `.idx` stands in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.errors import ConfigError
from binidx.format.bin_object import beside
from binidx.format.spool import SpooledColumn
from binidx.storage.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.publish import create_object, delete_object
from binidx.storage.ranges import Bytes
from binidx.storage.segment_writer import check_level
from binidx.storage.segments import CODECS, codec_of

Options = Mapping[str, Any] | None


class BinWriter:
    """Writes one `.bin`, `.bin.zst`, or an object that follows no rule.

    Args:
        level: of compression; None: the codec's own.
        checksums: whether to write those, too.

    Attributes:
        goes: URIs that go first when it is published; the caller may add to it.

    Raises:
        ConfigError: a level for what is not compressed, or checksums for what is.
    """

    def __init__(
        self, uri: str, storage_options: Options = None, *, level: int | None = None, checksums: bool = False
    ) -> None:
        self.uri, self.options = uri, storage_options
        self.goes: list[str] = []
        check_options(uri, level, checksums)
        self._column = SpooledColumn("u8") if checksums else None
        self._sums = BlockSums(self._column.extend) if self._column is not None else None
        self._open = contextlib.ExitStack()
        stored = self._open.enter_context(create_object(uri, storage_options, before_publish=self._make_way))
        self._writer = self._open.enter_context(CODECS[codec_of(uri)].create(stored, level))

    def write(self, data: Bytes, /) -> int:
        if self._sums is not None:
            self._sums.feed(data)
        return self._writer.write(data)

    def publish(self) -> None:
        """Make it visible, and its checksums."""
        if self._sums is None or self._column is None:
            self._open.close()
            return
        self._sums.finish()
        with create_object(self.uri + SUFFIX, self.options, before_publish=self._open.close) as writer:
            writer.write(format_sums_header(self._sums.size))
            for block in self._column.blocks():
                writer.write(block.tobytes())

    def abandon(self) -> None:
        """Leave nothing of what is not published, and give the memory back."""
        if self._column is not None:
            self._column.close()
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _make_way(self) -> None:
        delete_all([*self.goes, *beside(self.uri)], self.options)


def check_options(uri: str, level: int | None, checksums: bool) -> None:
    """ConfigError where they do not go with this name."""
    compressed = codec_of(uri) != "raw"
    if level is not None and not compressed:
        raise ConfigError(f"{uri}: compression_level {level}, needed a name that ends in .bin.zst")
    if level is not None:
        check_level(level)
    if checksums and compressed:
        raise ConfigError(f"{uri}: checksums=True, needed a plain .bin; each compressed segment has its own")


def delete_all(uris: Sequence[str], options: Options) -> None:
    """Afterwards there is none of them; in this order."""
    for uri in uris:
        delete_object(uri, options)


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""
