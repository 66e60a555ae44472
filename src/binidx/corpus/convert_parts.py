"""Copy of a dataset's tokens in parts: workers write pieces, and the store joins them.

    source      |------ part ------|------ part ------|-- part --|       ranges of its bytes
    worker      read ─► digest ─► piece, read back ─► record
    finish      TARGET.bin: the pieces, joined inside the store; in a store, workers then compare it with the digests
                TARGET.bin.xxh3: a header, then the checksums of all parts

    TARGET-parts/job.json               identity of the copy: the version of its source, and the form of the tokens
    TARGET-parts/NAME.bin, .bin.zst     piece of a part; a compressed one is a whole object with a seek table
    TARGET-parts/NAME.xxh3              checksums of its blocks, if the copy has any
    TARGET-parts/NAME.json              record, the last object of a part: digest of its bytes, identity of the piece

The bytes are those that one process writes, as parts begin where checksums and segments begin, and the joined object
has one seek table. On a disk the kernel joins the pieces, and the result is not read again.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.token_parts import PinnedDataset, plan_ranges
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.jobs.parts import JobFolder, Values, Workers, json_digest, make_parts, read_results
from binidx.jobs.runner import check_stop
from binidx.storage.adapters import InMemory
from binidx.storage.codecs.checksums import SUMS, BlockSums, format_sums_header
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored, stream, suffix_of
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece, open_join
from binidx.storage.writing.copy import CopyCounts, CorruptCopyError, ProgressWatcher
from binidx.storage.writing.publish import create_object, delete_object, write_object


@dataclass(frozen=True)
class CopyJob:
    """Settings that all parts of a copy share.

    Args:
        bin: the `.bin` to write.
        folder: folder of the parts; like `bin` an absolute location, as workers may have another working directory.
        size: bytes to copy.
        stored: whether the bytes are copied as they are stored, else plain ones.
        codec, level: codec and compression level with which they are stored; "raw" for stored bytes.
        tokens: whether tokens are copied at all; else only checksums are computed.
        sums: whether to compute checksums.
        checksum: whether copied bytes are read back; else only the size is compared.
    """

    source: PinnedDataset
    bin: Location
    folder: Location
    size: int
    stored: bool
    codec: str
    level: int | None
    tokens: bool
    sums: bool
    checksum: bool

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All settings that decide the content of the pieces and records."""
        names = "stored", "codec", "level", "tokens", "sums", "checksum"
        return {"job": "convert", "source": self.source.identity, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class CopyPart:
    """Bytes [start, stop) of a copy.

    Args:
        digest: digest of these bytes, if they are to be read back from the joined copy.
        version: identity of the joined copy, as text.
    """

    job: CopyJob
    start: int
    stop: int
    digest: str = ""
    version: str = ""

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
        return self.job.folder / f"{self.name}.bin{suffix_of(self.job.codec)}"

    @property
    def sums(self) -> Location:
        """Location of the checksums of its blocks."""
        return self.job.folder / f"{self.name}{SUMS}"

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.stop} of {self.job.source.prefix}"


def copy_part(part: CopyPart) -> Values:
    """Write the piece and the checksums of a part, in a worker; return the part's record.

    Raises:
        CorruptCopyError: the piece differed from the source, and was removed.
    """
    job, digest, checksums = part.job, xxhash.xxh3_128(), list[NDArray[np.uint64]]()
    sums = BlockSums(checksums.append)
    with contextlib.ExitStack() as writers:
        if job.tokens:
            stored = writers.enter_context(create_object(part.piece))
            writer = writers.enter_context(codec_named(job.codec).create(stored, job.level))
        for view in stream(job.source.reader(stored=job.stored), part.stop, start=part.start):
            check_stop()
            digest.update(view)
            if job.tokens:
                writer.write(view)
            if job.sums:
                sums.feed(view)
    if job.sums:
        sums.finish()
        write_object(part.sums, [block.astype("<u8").tobytes() for block in checksums])
    if not job.tokens:
        return {}
    if job.checksum and not has_digest(open_stored(part.piece), job.codec, (0, part.size), digest.hexdigest()):
        delete_object(part.piece)
        raise CorruptCopyError(f"{part.piece}: arrived wrong; removed, run it again")
    return {"digest": digest.hexdigest(), "piece": object_identity(part.piece)}


def has_digest(stored: RangeReader, codec: str, where: Range, digest: str) -> bool:
    """Return whether a range of the plain bytes of an object has a digest, xxh3_128."""
    found = xxhash.xxh3_128()
    try:
        reader = codec_named(codec).open(stored, b"")
        for view in stream(reader, min(where[1], reader.size), start=where[0]):
            check_stop()
            found.update(view)
    except FormatError:
        return False
    return found.hexdigest() == digest


@functools.lru_cache(1)
def _open_joined(location: Location, codec: str, version: str) -> RangeReader:
    """Return the reader of a joined object, opened once in each process."""
    return open_object(location, cache=False, codec=codec)


def read_back(part: CopyPart) -> Values:
    """Compare a part of the joined copy with its digest, in a worker; raise CorruptCopyError if it differs."""
    reader = _open_joined(part.job.bin, part.job.codec, part.version)
    if not has_digest(reader, "raw", (part.start, part.stop), part.digest):
        where = f"bytes {part.start} to {part.stop}"
        raise CorruptCopyError(f"{part.job.bin}: {where} arrived wrong; removed, run it again")
    return {}


class PartedCopy:
    """Copy of tokens by workers, and the folder of its parts.

    Attributes:
        counts: parts that this call made, parts that existed, and bytes of the made ones.
    """

    def __init__(self, job: CopyJob, workers: Workers, watch: ProgressWatcher) -> None:
        if job.codec != "raw" and codec_named(job.codec).joining is None:
            raise ConfigError(f"{job.bin}: parts of the codec {job.codec} cannot be joined; leave out the workers")
        self.job, self.workers, self.watch, self.counts = job, workers, watch, CopyCounts()
        self.parts = [CopyPart(job, *where) for where in plan_ranges(job.size)]
        self.folder = JobFolder(job.folder, job.identity)
        self._records: Mapping[str, Values] = {}

    def make(self) -> int:
        """Make the missing parts of this call's shard; return how many parts are left to others.

        Raises:
            ObjectExistsError: the folder holds parts of another copy.
        """
        self.folder.claim()
        shard, known = self.workers.shard, read_results(self.folder, self.parts)
        share = self.parts if shard is None else shard.select(self.parts)
        self.watch.begin(f"copy {self.job.bin}", sum(part.size for part in share), 0)
        self._records = self._run(copy_part, self.parts, self.workers, self.folder)
        made = [self._records[part.name] for part in share if part.name not in known]
        num_bytes = sum(record["piece"]["size"] for record in made if record)
        self.counts = CopyCounts(len(made), len(share) - len(made), num_bytes)
        return sum(part.name not in self._records for part in self.parts)

    def _run(
        self,
        make: Callable[[CopyPart], Values],
        parts: Sequence[CopyPart],
        workers: Workers,
        folder: JobFolder | None = None,
    ) -> Mapping[str, Values]:
        remote = any(location.local_path is None for location in (self.job.bin, self.job.source.prefix))
        return make_parts(make, parts, workers, folder, advance=self.watch.advance, remote_data=remote)

    def join(self, before_publish: Callable[[], object]) -> CopyCounts:
        """Publish the `.bin`, and compare it with the source as `checksum` of the job says; return the counts.

        Args:
            before_publish: called right before it appears.

        Raises:
            CorruptCopyError: it differed, and was removed; or a piece has changed, and its record was removed.
        """
        job, codec = self.job, codec_named(self.job.codec)
        readers = OPENS.map(self._open_piece, self.parts)
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers if reader.size]
        if codec.joining is not None:
            plain = OPENS.map(lambda reader: codec.open(reader, b""), readers)
            end = InMemory(job.bin.uri, codec.joining.end(plain))
            ranges = zip(readers, map(codec.joining.pieces, plain), strict=True)
            pieces = [SourcePiece(reader, *where) for reader, wheres in ranges for where in wheres]
            pieces.append(SourcePiece(end, 0, end.size))
        self._publish(job.bin, pieces, before_publish)
        try:
            self._read_back()
        except (CorruptCopyError, FormatError) as error:
            delete_object(job.bin)
            if isinstance(error, FormatError):  # of its seek table
                raise CorruptCopyError(f"{error}; removed, run it again") from error
            raise
        return self.counts

    def write_sums(self, before_publish: Callable[[], object]) -> None:
        """Publish the `.bin.xxh3`; `before_publish` as in `join`."""
        location = self.job.bin + SUMS
        readers: list[RangeReader] = [InMemory(location.uri, format_sums_header(self.job.size))]
        readers += OPENS.map(lambda part: open_stored(part.sums), self.parts)
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers if reader.size]
        self._publish(location, pieces, before_publish)

    def remove(self) -> None:
        """Remove the folder, if it is of this copy."""
        if self.folder.is_claimed():
            self.folder.remove(self.parts, [file for part in self.parts for file in (part.piece, part.sums)])

    def _open_piece(self, part: CopyPart) -> RangeReader:
        """Open a piece whose identity or content is that in its record; else remove the record and raise an error."""
        record = self._records[part.name]
        with contextlib.suppress(ObjectNotFoundError):
            reader = open_stored(part.piece)
            # A second worker of a part may have written the same bytes again.
            if same_identity(record["piece"], reader.identity) or has_digest(
                reader, self.job.codec, (0, part.size), record["digest"]
            ):
                return reader
        delete_object(self.folder.file(part))
        raise CorruptCopyError(f"{part.piece}: lost or damaged, its record was removed; give the same command again")

    def _publish(self, location: Location, pieces: list[SourcePiece], before_publish: Callable[[], object]) -> None:
        join = open_join(location, pieces, location.options)
        try:
            self.watch.begin(f"join {location}", sum(piece.num_bytes for piece in pieces), 0)
            join.fill(self.watch.advance)
            join.publish(before_publish)
        finally:
            join.abandon()

    def _read_back(self) -> None:
        job = self.job
        version = json.dumps(object_identity(job.bin))
        if (size := _open_joined(job.bin, job.codec, version).size) != job.size:
            raise CorruptCopyError(f"{job.bin}: {size} bytes arrived, needed {job.size}; removed, run it again")
        if job.checksum and job.bin.local_path is None:
            self.watch.begin(f"verify {job.bin}", job.size, 0)
            digests = {name: record["digest"] for name, record in self._records.items()}
            parts = [replace(part, digest=digests[part.name], version=version) for part in self.parts]
            self._run(read_back, parts, replace(self.workers, shard=None))
