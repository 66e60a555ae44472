"""Job of a copy, and its parts: what decides their bytes, and how they are written, in this process or in a worker.

source      |------ part ------|------ part ------|-- part --|       ranges of its bytes
part        blocks of 8 MiB: read ─► digest ─► write, several in flight, then the record

TARGET-parts/job.json               identity of the copy: the version of its source, and the form of the tokens
TARGET-parts/NAME.bin, .bin.zst     piece of a part; a compressed one is a whole object with a seek table
TARGET-parts/NAME.xxh3              checksums of its blocks, if the copy has any
TARGET-parts/NAME.json              record, the last object of a part: digests of its bytes, and tags of the upload
                                    or identity of the piece
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.block_digests import Block, blocks_in_flight, find_difference
from binidx.corpus.token_parts import PinnedDataset, json_digest, plan_ranges
from binidx.forks import cached_property
from binidx.jobs.parts import Values
from binidx.jobs.runner import check_stop
from binidx.storage.codecs.checksums import SUMS, BlockSums
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, suffix_of
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.publish import create_object, write_object


@dataclass(frozen=True)
class CopyJob:
    """Settings that all parts of a copy share.

    Args:
        target: the object to write.
        folder: folder of the parts; like `target` an absolute location, as workers may have another working directory.
        size: bytes to copy.
        codec, level: codec and compression level with which they are stored; "raw" for stored bytes.
        checksum: whether copied bytes are read back; else only the size is compared.
        form: "slices", "pieces" or "whole".
        block_bytes: bytes of a block.
        stored: whether the bytes are copied as they are stored, else plain ones.
        tokens: whether tokens are copied at all; else only checksums are computed.
        sums: whether to compute checksums.
        file: suffix of the object, unless it is the tokens.
    """

    source: PinnedDataset
    target: Location
    folder: Location
    size: int
    codec: str
    checksum: bool
    form: str
    block_bytes: int
    stored: bool = True
    level: int | None = None
    tokens: bool = True
    sums: bool = False
    file: str = ""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All settings that decide the content of the pieces and records."""
        names = ["stored", "codec", "level", "tokens", "sums"]
        names += ["checksum"] if self.form == "pieces" else ["form", "block_bytes"]  # as earlier versions name pieces
        names += ["file"] if self.file else []
        return {"job": "convert", "source": self.source.identity, **{name: getattr(self, name) for name in names}}

    @property
    def ranges(self) -> list[Range]:
        """Ranges of the parts."""
        if self.form == "whole" or (self.codec != "raw" and codec_named(self.codec).joining is None):
            return [(0, self.size)]
        return plan_ranges(self.size, self.block_bytes if self.form == "slices" else 0)


@dataclass(frozen=True)
class CopyPart:
    """Bytes [start, stop) of a copy.

    Args:
        blocks: its blocks, if they are to be read back from the joined copy.
    """

    job: CopyJob
    start: int
    stop: int
    blocks: tuple[Block, ...] = ()

    @cached_property
    def name(self) -> str:
        """Digest of all that decides the piece."""
        return json_digest([self.job.identity, self.start, self.stop])

    @property
    def size(self) -> int:
        """Bytes to copy."""
        return self.stop - self.start

    @property
    def piece(self) -> Location:
        """Location of its bytes."""
        if self.job.form == "whole":
            return self.job.target
        return self.job.folder / f"{self.name}.bin{suffix_of(self.job.codec)}"

    @property
    def sums(self) -> Location:
        """Location of the checksums of its blocks."""
        return self.job.folder / f"{self.name}{SUMS}"

    def blocks_of(self, record: Values) -> tuple[Block, ...]:
        """Return the blocks in its record; in one of an earlier version the part is one block."""
        return tuple(record.get("blocks") or [(self.start, self.stop, record["digest"], "")])

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.stop} of {self.job.source.prefix}"


SendBlock = Callable[[int, Range, memoryview], str]
"""Function (number from 1, range, bytes) that adds a block to an upload and returns its tag."""


def copy_parts(
    parts: Sequence[CopyPart],
    reader: RangeReader,
    send: SendBlock | None = None,
    before_publish: Callable[[], object] | None = None,
    advance: Callable[[int], object] = lambda size: None,
) -> Generator[tuple[CopyPart, Values], None, None]:
    """Write the bytes and checksums of parts of one copy, in order; yield each part with its record.

    Args:
        send: takes the blocks of slices; None in the other forms.
        before_publish: called right before the object of a whole copy appears.
        advance: called with the bytes of each block.
    """
    wheres = [(part, (part.start, part.stop)) for part in parts]
    blocks = [(part, block) for part, where in wheres for block in cut(where, part.job.block_bytes) or [where]]

    def copy(planned: tuple[CopyPart, Range]) -> tuple[memoryview, Block]:
        part, where = planned
        [data] = reader.read([where])
        tag = send(where[0] // part.job.block_bytes + 1, where, data) if send else ""
        return data, (*where, xxhash.xxh3_128_hexdigest(data), tag)

    in_flight = blocks_in_flight(parts[0].job.block_bytes if parts else 1)
    with contextlib.closing(map_in_flight(copy, blocks, in_flight)) as copied:
        copies = zip(blocks, copied, strict=True)
        for part, group in itertools.groupby(copies, lambda planned: planned[0][0]):
            yield part, _finish_part(part, (result for _, result in group), before_publish, advance)


def _finish_part(
    part: CopyPart,
    blocks: Iterable[tuple[memoryview, Block]],
    before_publish: Callable[[], object] | None,
    advance: Callable[[int], object],
) -> Values:
    """Write the object of a part, unless it is a slice, and its checksums; return its record."""
    job, digest, checksums, done = part.job, xxhash.xxh3_128(), list[NDArray[np.uint64]](), list[Block]()
    sums, has_object = BlockSums(checksums.append), job.tokens and job.form != "slices"
    with contextlib.ExitStack() as writers:
        if has_object:
            hook = before_publish if job.form == "whole" else None
            stored = writers.enter_context(create_object(part.piece, before_publish=hook))
            writer = writers.enter_context(codec_named(job.codec).create(stored, job.level))
        for view, block in blocks:
            check_stop()
            done.append(block)
            if has_object:
                digest.update(view)
                writer.write(view)
            if job.sums:
                sums.feed(view)
            advance(block[1] - block[0])
    record: Values = {"blocks": done} if job.tokens else {}
    if has_object:
        record |= {"digest": digest.hexdigest(), "piece": object_identity(part.piece)}
    if job.sums:
        sums.finish()
        data = b"".join(block.astype("<u8").tobytes() for block in checksums)
        write_object(part.sums, [data])
        record["sums"] = xxhash.xxh3_128_hexdigest(data)
    return record


def copy_part(part: CopyPart) -> Values:
    """Write a part in a worker; return its record."""
    [(_, record)] = copy_parts([part], part.job.source.reader(stored=part.job.stored))
    return record


@functools.lru_cache(1)
def open_joined(location: Location, codec: str, version: str) -> RangeReader:
    """Return the reader of a joined object, opened once in each process."""
    return open_object(location, cache=False, codec=codec)


def read_back(version: str, part: CopyPart) -> Values:
    """Compare a part of the joined copy with its blocks, in a worker; return the first range that differs.

    Args:
        version: identity of the joined copy, as text.
    """
    reader = open_joined(part.job.target, part.job.codec, version)
    return {"wrong": find_difference(reader, part.blocks, lambda size: None)}
