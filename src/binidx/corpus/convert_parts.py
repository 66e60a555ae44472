"""Copy of an object in parts with records, by this process or by workers.

    source      |------ part ------|------ part ------|-- part --|       ranges of its bytes
    part        blocks of 8 MiB: read ─► digest ─► write, several in flight, then the record
    finish      the object appears; its blocks are read back and compared with the digests; a wrong one is removed

    form      of                                    a part is                              the object appears by
    slices    plain bytes, on disks and S3          blocks of one upload, or of .partial   publishing the upload
    pieces    the same by workers; compressed;      an object                              joining inside the store
              plain bytes on GCS
    whole     a single part; other stores           the object itself                      the part

    TARGET-parts/job.json               identity of the copy: the version of its source, and the form of the tokens
    TARGET-parts/NAME.bin, .bin.zst     piece of a part; a compressed one is a whole object with a seek table
    TARGET-parts/NAME.xxh3              checksums of its blocks, if the copy has any
    TARGET-parts/NAME.json              record, the last object of a part: digests of its bytes, and tags of the upload
                                        or identity of the piece

All forms write the same bytes, as parts begin where checksums and segments begin, and the joined object has one seek
table. On a disk slices are read back before the object appears.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.block_digests import (
    Advance,
    Block,
    CopyCounts,
    CorruptCopyError,
    blocks_in_flight,
    find_difference,
    has_digest,
)
from binidx.corpus.convert_owner import ConvertOwner
from binidx.corpus.token_parts import PinnedDataset, plan_ranges
from binidx.errors import BinidxError, FormatError, ObjectNotFoundError
from binidx.forks import cached_property
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Values, Workers, make_parts
from binidx.jobs.progress import ProgressWatcher
from binidx.jobs.runner import check_stop
from binidx.json_models import json_digest
from binidx.storage.adapters import InMemory
from binidx.storage.codecs.checksums import SUMS, BlockSums, format_sums_header
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored, suffix_of
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists, object_identity, read_small
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import OPENS, map_in_flight
from binidx.storage.writing.concatenate import SourcePiece, open_join
from binidx.storage.writing.multipart import MultipartWriter, discard_parts, open_parts
from binidx.storage.writing.publish import create_object, delete_object, write_object


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


def copy_parts(
    parts: Sequence[CopyPart],
    reader: RangeReader,
    upload: MultipartWriter | None = None,
    before_publish: Callable[[], object] | None = None,
    advance: Advance = lambda size: None,
) -> Generator[tuple[CopyPart, Values], None, None]:
    """Write the bytes and checksums of parts of one copy, in order; yield each part with its record.

    Args:
        upload: takes the blocks of slices.
        before_publish: called right before the object of a whole copy appears.
        advance: called with the bytes of each block.
    """
    wheres = [(part, (part.start, part.stop)) for part in parts]
    blocks = [(part, block) for part, where in wheres for block in cut(where, part.job.block_bytes) or [where]]

    def copy(planned: tuple[CopyPart, Range]) -> tuple[memoryview, Block]:
        part, where = planned
        [data] = reader.read([where])
        tag = "" if upload is None else upload.write(where[0] // part.job.block_bytes + 1, where, data)
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
    advance: Advance,
) -> Values:
    """Write the object of a part, unless it is a slice, and its checksums; return its record."""
    job, digest, checksums, done = part.job, xxhash.xxh3_128(), list[NDArray[np.uint64]](), list[Block]()
    sums, has_object = BlockSums(checksums.append), job.tokens and job.form != "slices"
    with contextlib.ExitStack() as writers:
        if has_object:
            stored = writers.enter_context(create_object(part.piece, before_publish=before_publish))
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
def _open_joined(location: Location, codec: str, version: str) -> RangeReader:
    """Return the reader of a joined object, opened once in each process."""
    return open_object(location, cache=False, codec=codec)


def read_back(version: str, part: CopyPart) -> Values:
    """Compare a part of the joined copy with its blocks, in a worker; return the first range that differs.

    Args:
        version: identity of the joined copy, as text.
    """
    reader = _open_joined(part.job.target, part.job.codec, version)
    return {"wrong": find_difference(reader, part.blocks, lambda size: None)}


@dataclass
class PartedCopy:
    """Copy of an object, and the folder of its parts.

    Args:
        job: settings of the copy.
        watch: gets the bytes.
        before_publish: called right before the object appears.
        reader: reader of the bytes, for a copy by this process.
        workers: they make the parts, which are pieces; None: this process.
        owner: its call makes a copy by this process; without one, such a copy has no records.

    Attributes:
        counts: parts that this call made, parts that existed, and bytes of the made ones.
    """

    job: CopyJob
    watch: ProgressWatcher
    before_publish: Callable[[], object]
    reader: RangeReader
    workers: Workers | None
    owner: ConvertOwner | None

    def __post_init__(self) -> None:
        self.parts = [CopyPart(self.job, *where) for where in self.job.ranges]
        self.folder = JobFolder(self.job.folder, self.job.identity)
        self._suffix = self.job.file or f"bin{suffix_of(self.job.codec)}"
        self._upload: MultipartWriter | None = None
        self._records, self.counts = dict[str, Values](), CopyCounts()

    def copy(self) -> CopyCounts:
        """Copy the object by this process: `make`, then `publish`. Return the counts.

        Raises:
            ObjectChangedError: another call has become the owner.
            PartsLostError: another process has removed the upload.
            CorruptCopyError: as `publish`.
        """
        if self._has_appeared():
            return CopyCounts(parts_kept=len(self.parts))
        try:
            self.make()
            return self.publish()
        except BinidxError:  # of an upload that a later owner has removed
            if self.owner is not None:
                self.owner.check()
            raise
        finally:
            if self._upload is not None:
                self._upload.pause() if self.owner is not None else self._upload.abandon()

    def _has_appeared(self) -> bool:
        """Return whether an earlier call was killed after it had published the upload: the object has the content."""
        begun = None if self.owner is None else self.owner.begun(self._suffix)
        if self.job.form != "slices" or begun is None or not begun.published:
            return False
        self._records = self.folder.read_all(self.parts)
        if len(self._records) != len(self.parts) or not object_exists(self.job.target):
            return False
        with contextlib.suppress(CorruptCopyError):
            if self._find_wrong(self.job.target, checksum=True) is None:
                discard_parts(self.job.target, begun.token)  # which are still there if equal bytes stood there before
                return True
        return False

    def make(self) -> int:
        """Make the missing parts of this call's shard; return how many parts are left to others."""
        known, share = self._find_parts(), self.parts
        if self.workers is not None:
            share = list(self.workers.select(self.parts))
        missing = [part for part in share if part.name not in known]
        total, left = (sum(part.size for part in parts) for parts in (share, missing))
        if self.workers is not None:
            self.watch.begin(f"copy {self.job.target}", total, 0)
            self._records = self._run(copy_part, self.parts, self.workers, self.folder)
        else:
            verb = "checksums of" if not self.job.tokens else "copy" if self.job.codec == "raw" else "compress"
            self.watch.begin(f"{verb} {self.job.target}", total, total - left)
            self._records = known
            before_publish = self.before_publish if self.job.form == "whole" else None
            copies = copy_parts(missing, self.reader, self._upload, before_publish, self.watch.advance)
            with contextlib.closing(copies):
                for part, record in copies:
                    if self.owner is not None:
                        self.owner.check()
                        self.folder.write(part, record)
                    self._records[part.name] = record
        made = [self._records[part.name] for part in missing]
        num_bytes = sum(record["piece"]["size"] for record in made if "piece" in record)
        self.counts = CopyCounts(len(made), len(share) - len(made), num_bytes if self._upload is None else left)
        return sum(part.name not in self._records for part in self.parts)

    def _find_parts(self) -> dict[str, Values]:
        """Return the records of the parts that exist; open the upload of slices."""
        job, records = self.job, dict[str, Values]()
        if self.workers is not None or self.owner is not None:
            records = self.folder.read_all(self.parts)
        if job.form == "whole" and records:
            now = object_identity(job.target) if object_exists(job.target) else {}
            return {name: record for name, record in records.items() if same_identity(record["piece"], now)}
        if job.form != "slices":
            return records
        token = "" if self.owner is None else self.owner.begun(self._suffix).token
        upload = open_parts(job.target, job.size, token)
        assert upload is not None
        if self.owner is not None:  # first of all: an upload that no file names would stay in the store
            try:
                self.owner.save(self._suffix, upload.token)
            except BaseException:
                upload.pause() if upload.token == token else upload.abandon()
                raise
        self._upload = upload
        if records:
            self.watch.begin("check the parts sent before", job.size, 0)

        def exists(part: CopyPart) -> bool:
            self.watch.advance(part.size)
            return all(
                upload.has_part(start // job.block_bytes + 1, (start, stop), digest, tag)
                for start, stop, digest, tag in records[part.name]["blocks"]
            )

        return {part.name: records[part.name] for part in self.parts if part.name in records and exists(part)}

    def _run(
        self,
        make: Callable[[CopyPart], Values],
        parts: Sequence[CopyPart],
        workers: Workers,
        folder: JobFolder | None = None,
    ) -> dict[str, Values]:
        remote = any(location.local_path is None for location in (self.job.target, self.job.source.prefix))
        return make_parts(make, parts, workers, folder, advance=self.watch.advance, remote_data=remote)

    def publish(self) -> CopyCounts:
        """Make the object appear, and compare it with the source as `checksum` of the job says; return the counts.

        Raises:
            CorruptCopyError: it differed, and was removed; or a piece has changed, and its record was removed.
        """
        job = self.job
        if (upload := self._upload) is not None:
            if upload.staged is not None:
                self._check_copy(Location(upload.staged), upload.abandon)
            self.before_publish()
            if self.owner is not None:
                self.owner.save(self._suffix, upload.token, published=True)
            blocks = (block for record in self._records.values() for block in record["blocks"])
            upload.publish({start // job.block_bytes + 1: tag for start, _, _, tag in blocks})
            self._upload = None
        elif job.form == "pieces":
            self._join()
        if upload is None or upload.staged is None:
            self._check_copy(job.target, functools.partial(delete_object, job.target))
        return self.counts

    def _join(self) -> None:
        """Publish the object as its pieces, one after the other."""
        job, codec = self.job, codec_named(self.job.codec)
        readers = OPENS.map(self._open_piece, self.parts)
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers if reader.size]
        if codec.joining is not None:
            plain = OPENS.map(lambda reader: codec.open(reader, b""), readers)
            end = InMemory(job.target.uri, codec.joining.end(plain))
            ranges = zip(readers, map(codec.joining.pieces, plain), strict=True)
            pieces = [SourcePiece(reader, *where) for reader, wheres in ranges for where in wheres]
            pieces.append(SourcePiece(end, 0, end.size))
        self._join_pieces(job.target, pieces, self.before_publish)

    def write_sums(self, before_publish: Callable[[], object]) -> None:
        """Publish the `.bin.xxh3`; `before_publish` is called right before it appears."""
        location = self.job.target + SUMS
        readers: list[RangeReader] = [InMemory(location.uri, format_sums_header(self.job.size))]
        readers += OPENS.map(self._read_sums, self.parts)
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers if reader.size]
        self._join_pieces(location, pieces, before_publish)

    def _read_sums(self, part: CopyPart) -> RangeReader:
        """Return the checksums of a part as its record has them; else remove the record and raise an error."""
        data, recorded = read_small(part.sums), self._records[part.name].get("sums")
        if data is not None and recorded in (None, xxhash.xxh3_128_hexdigest(data)):  # earlier versions record none
            return InMemory(part.sums.uri, data)
        raise self._lose(part, part.sums)

    def _lose(self, part: CopyPart, location: Location) -> CorruptCopyError:
        """Remove the record of a part whose object is lost or damaged; return the error."""
        delete_object(self.folder.file(part))
        return CorruptCopyError(f"{location}: lost or damaged, its record was removed; give the same command again")

    def remove(self, others: Sequence[PartedCopy]) -> None:
        """Remove the folder, which is of this copy, and the records of other copies in it."""
        pieces = [part.piece for part in self.parts if self.job.form == "pieces"]
        sums = [part.sums for part in self.parts if self.job.sums]
        self.folder.remove([part for copy in (self, *others) for part in copy.parts], [*pieces, *sums])

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
        raise self._lose(part, part.piece)

    def _join_pieces(self, location: Location, pieces: list[SourcePiece], before_publish: Callable[[], object]) -> None:
        join = open_join(location, pieces, location.options)
        try:
            self.watch.begin(f"join {location}", sum(piece.num_bytes for piece in pieces), 0)
            join.fill(self.watch.advance)
            join.publish(before_publish)
        finally:
            join.abandon()

    def _check_copy(self, location: Location, remove: Callable[[], object]) -> None:
        """Compare the copy with the source; remove a wrong one, and the record of its wrong part."""
        target = self.job.target
        try:
            if (wrong := self._find_wrong(location, checksum=self.job.checksum)) is not None:
                start, stop = wrong
                part = next(part for part in self.parts if part.start <= start < part.stop)
                delete_object(self.folder.file(part))
                raise CorruptCopyError(f"{target}: bytes {start} to {stop} arrived wrong; removed, run it again")
        except CorruptCopyError:
            remove()
            raise

    def _find_wrong(self, location: Location, *, checksum: bool) -> Range | None:
        """Return the first range whose bytes differ, if `checksum` is set.

        Raises:
            CorruptCopyError: the copy has another size, or cannot be read.
        """
        job, workers = self.job, self.workers
        try:
            version = json.dumps(object_identity(location))
            if checksum and workers is None:
                self.watch.begin(f"verify {job.target}", job.size, 0)
            open_copy = _open_joined if workers is not None else _open_joined.__wrapped__
            reader = open_copy(location, job.codec, version)
            if (size := reader.size) != job.size:
                raise CorruptCopyError(f"{job.target}: {size} bytes arrived, needed {job.size}; removed, run it again")
            if not checksum:
                return None
            if workers is None:
                blocks = [block for part in self.parts for block in part.blocks_of(self._records[part.name])]
                return find_difference(reader, blocks, self.watch.advance)
            self.watch.begin(f"verify {job.target}", job.size, 0)
            parts = [replace(part, blocks=part.blocks_of(self._records[part.name])) for part in self.parts]
            found = self._run(functools.partial(read_back, version), parts, replace(workers, shard=None))
            return next((result["wrong"] for result in found.values() if result["wrong"]), None)
        except FormatError as error:  # of its seek table
            raise CorruptCopyError(f"{error}; removed, run it again") from error
