"""Copy of one object in parts with records; a class for each form, as stores differ in what they can put together.

    form      class          of                               a part is                      the object appears by
    slices    `SlicedCopy`   plain bytes, on disks and S3     blocks of an upload, or of     publishing the upload
                                                              a .partial file
    pieces    `JoinedCopy`   compressed; plain on GCS         an object                      joining inside the store
              `WorkersCopy`  all, made by workers             an object                      joining inside the store
    whole     `WholeCopy`    a single part; other stores      the object itself              the part

All forms write the same bytes, as parts begin where checksums and segments begin, and the joined object has one seek
table. Once it is there its blocks are read back and compared with the digests; a wrong object is removed. On a disk
slices are read back before the object appears.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from binidx.corpus.block_digests import CorruptCopyError, find_difference, has_digest
from binidx.corpus.copies.convert_owner import ConvertOwner
from binidx.corpus.copies.copy_job import CopyJob, CopyPart, SendBlock, copy_part, copy_parts, open_joined, read_back
from binidx.errors import BinidxError, FormatError, ObjectNotFoundError
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Values, Workers, make_parts
from binidx.jobs.progress import ProgressWatcher
from binidx.storage.codecs.checksums import SUMS, BlockSums
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored
from binidx.storage.requests.remote_object import object_exists, object_identity, read_small
from binidx.storage.stores.identity import same_identity
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece, open_join
from binidx.storage.writing.multipart import discard_parts, open_parts
from binidx.storage.writing.publish import delete_object


@dataclass
class ObjectCopy:
    """Copy of an object by this process, and the folder of its parts; subclasses give it a form.

    Args:
        job: settings of the copy.
        reader: reader of the bytes.
        watch: gets the bytes.
        before_publish: called right before the object appears.
        owner: its call makes the copy; None: the copy has no records of this process.

    Attributes:
        parts_sent, parts_kept, bytes_sent: parts that this call made, parts that existed, and bytes of the made ones.
    """

    job: CopyJob
    reader: RangeReader
    watch: ProgressWatcher
    before_publish: Callable[[], object]
    owner: ConvertOwner | None

    def __post_init__(self) -> None:
        self.parts = [CopyPart(self.job, *where) for where in self.job.ranges]
        self.folder = JobFolder(self.job.folder, self.job.identity)
        self._records = dict[str, Values]()
        self._send: SendBlock | None = None
        self.parts_sent = self.parts_kept = self.bytes_sent = 0

    def copy(self) -> None:
        """Make the missing parts, and publish the object.

        Raises:
            ObjectChangedError: another call has become the owner.
            PartsLostError: another process has removed the upload.
            CorruptCopyError: as `publish`.
        """
        try:
            self.make()
            self.publish()
        except BinidxError:  # of parts that a later owner has removed
            if self.owner is not None:
                self.owner.check()
            raise

    def make(self) -> int:
        """Make the missing parts of this call's share; return how many are left to others."""
        job, share, known = self.job, self._share(), self._find_parts()
        missing = [part for part in share if part.name not in known]
        total, left = (sum(part.size for part in parts) for parts in (share, missing))
        verb = "checksums of" if not job.tokens else "copy" if job.codec == "raw" else "compress"
        self.watch.begin(f"{verb} {job.target}", total, total - left)
        self._records = known
        self._make_parts(missing)
        self.parts_sent, self.parts_kept = len(missing), len(share) - len(missing)
        pieces = [self._records[part.name].get("piece", {"size": 0}) for part in missing]
        self.bytes_sent = left if job.form == "slices" else sum(piece["size"] for piece in pieces)
        return sum(part.name not in self._records for part in self.parts)

    def publish(self) -> None:
        """Make the object appear, and compare it with the source as `checksum` of the job says.

        Raises:
            CorruptCopyError: it differed, and was removed; or a piece has changed, and its record was removed.
        """
        self._check_copy(self.job.target, functools.partial(delete_object, self.job.target))

    def write_sums(self, before_publish: Callable[[], object]) -> None:
        """Publish the `.bin.xxh3`; `before_publish` is called right before it appears."""
        location = self.job.target + SUMS
        header = SourcePiece.of_bytes(location.uri, BlockSums.format_header(self.job.size))
        self._join(location, [header, *OPENS.map(self._read_sums, self.parts)], before_publish)

    def objects(self) -> list[Location]:
        """Return the objects of the parts besides their records."""
        pieces = [part.piece for part in self.parts if self.job.form == "pieces" and self.job.tokens]
        return [*pieces, *(part.sums for part in self.parts if self.job.sums)]

    def _share(self) -> Sequence[CopyPart]:
        """Return the parts that this call makes."""
        return self.parts

    def _find_parts(self) -> dict[str, Values]:
        """Return the records of the parts that exist."""
        return self.folder.read_all(self.parts) if self.owner is not None else {}

    def _make_parts(self, missing: Sequence[CopyPart]) -> None:
        """Make parts, and keep their records."""
        copies = copy_parts(missing, self.reader, self._send, self.before_publish, self.watch.advance)
        with contextlib.closing(copies):
            for part, record in copies:
                if self.owner is not None:
                    self.owner.check()
                    self.folder.write(part, record)
                self._records[part.name] = record

    def _read_sums(self, part: CopyPart) -> SourcePiece:
        """Return the checksums of a part as its record has them; else remove the record and raise an error."""
        data, recorded = read_small(part.sums), self._records[part.name].get("sums")
        if data is not None and recorded in (None, xxhash.xxh3_128_hexdigest(data)):  # earlier versions record none
            return SourcePiece.of_bytes(part.sums.uri, data)
        raise self._lose(part, part.sums)

    def _lose(self, part: CopyPart, location: Location) -> CorruptCopyError:
        """Remove the record of a part whose object is lost or damaged; return the error."""
        delete_object(self.folder.file(part))
        return CorruptCopyError(f"{location}: lost or damaged, its record was removed; give the same command again")

    def _join(self, location: Location, pieces: list[SourcePiece], before_publish: Callable[[], object]) -> None:
        """Publish an object as its pieces, one after the other."""
        join = open_join(location, pieces, location.options)
        try:
            self.watch.begin(f"join {location}", sum(piece.num_bytes for piece in pieces), 0)
            join.fill(self.watch.advance)
            join.publish(before_publish)
        finally:
            join.abandon()

    def _check_copy(self, location: Location, remove: Callable[[], object]) -> None:
        """Compare the copy with the source; remove a wrong one, and the record of its wrong part."""
        try:
            if not self.job.checksum:
                self._check_size(open_object(location, cache=False, codec=self.job.codec))
            elif (wrong := self._read_back(location)) is not None:
                delete_object(self.folder.file(next(part for part in self.parts if part.start <= wrong[0] < part.stop)))
                problem = f"bytes {wrong[0]} to {wrong[1]} arrived wrong; removed, run it again"
                raise CorruptCopyError(f"{self.job.target}: {problem}")
        except CorruptCopyError:
            remove()
            raise
        except FormatError as error:  # of its seek table
            remove()
            raise CorruptCopyError(f"{error}; removed, run it again") from error

    def _check_size(self, reader: RangeReader) -> None:
        """Raise CorruptCopyError if the copy has another size."""
        target, needed = self.job.target, self.job.size
        if reader.size != needed:
            raise CorruptCopyError(f"{target}: {reader.size} bytes arrived, needed {needed}; removed, run it again")

    def _read_back(self, location: Location) -> Range | None:
        """Compare all bytes of the copy with the digests of its blocks; return the first range that differs."""
        self.watch.begin(f"verify {self.job.target}", self.job.size, 0)
        self._check_size(reader := open_object(location, cache=False, codec=self.job.codec))
        blocks = [block for part in self.parts for block in part.blocks_of(self._records[part.name])]
        return find_difference(reader, blocks, self.watch.advance)


class SlicedCopy(ObjectCopy):
    """Copy whose parts are blocks of one upload, or of a partial file, which is read back before it appears."""

    @property
    def _key(self) -> str:
        """Key of the object in the file of the owner."""
        return self.job.file or "bin"

    def copy(self) -> None:
        if self._has_appeared():
            self.parts_kept = len(self.parts)
            return
        self._open()
        try:
            super().copy()
        finally:
            if self._upload is not None:
                self._upload.pause() if self.owner is not None else self._upload.abandon()

    def _open(self) -> None:
        """Open the upload that an earlier call began, else a new one; the file of the owner gets its token."""
        token = "" if self.owner is None else self.owner.begun(self._key).token
        upload = self._upload = open_parts(self.job.target, self.job.size, token)
        assert upload is not None
        self._send = upload.write
        if self.owner is not None:  # first of all: an upload that no file names would stay in the store
            try:
                self.owner.save(self._key, upload.token)
            except BaseException:
                upload.pause() if upload.token == token else upload.abandon()
                raise

    def publish(self) -> None:
        upload, blocks = self._upload, (block for record in self._records.values() for block in record["blocks"])
        assert upload is not None
        if upload.staged is not None:
            self._check_copy(Location(upload.staged), upload.abandon)
        self.before_publish()
        if self.owner is not None:
            self.owner.save(self._key, upload.token, published=True)
        upload.publish({start // self.job.block_bytes + 1: tag for start, _, _, tag in blocks})
        self._upload = None
        if upload.staged is None:
            super().publish()

    def _has_appeared(self) -> bool:
        """Return whether an earlier call was killed after it had published the upload: the object has the content."""
        begun = None if self.owner is None else self.owner.begun(self._key)
        if begun is None or not begun.published:
            return False
        self._records = self.folder.read_all(self.parts)
        if len(self._records) != len(self.parts) or not object_exists(self.job.target):
            return False
        with contextlib.suppress(CorruptCopyError):
            if self._read_back(self.job.target) is None:
                discard_parts(self.job.target, begun.token)  # which are still there if equal bytes stood there before
                return True
        return False

    def _find_parts(self) -> dict[str, Values]:
        """Return the records of the parts that the upload has."""
        job, records, upload = self.job, super()._find_parts(), self._upload
        assert upload is not None
        if records:
            self.watch.begin("check the parts sent before", job.size, 0)

        def exists(part: CopyPart) -> bool:
            self.watch.advance(part.size)
            return all(
                upload.has_part(start // job.block_bytes + 1, (start, stop), digest, tag)
                for start, stop, digest, tag in records[part.name]["blocks"]
            )

        return {part.name: records[part.name] for part in self.parts if part.name in records and exists(part)}


class WholeCopy(ObjectCopy):
    """Copy of a single part, which is the object itself."""

    def _find_parts(self) -> dict[str, Values]:
        records = super()._find_parts()
        now = object_identity(self.job.target) if records and object_exists(self.job.target) else {}
        return {name: record for name, record in records.items() if same_identity(record["piece"], now)}


class JoinedCopy(ObjectCopy):
    """Copy whose parts are objects, which the store or the kernel joins."""

    def publish(self) -> None:
        job, codec = self.job, codec_named(self.job.codec)
        if not job.tokens:
            return
        readers = OPENS.map(self._open_piece, self.parts)
        pieces = [SourcePiece(reader, 0, reader.size) for reader in readers if reader.size]
        if codec.joining is not None:
            plain = OPENS.map(lambda reader: codec.open(reader, b""), readers)
            ranges = zip(readers, map(codec.joining.pieces, plain), strict=True)
            pieces = [SourcePiece(reader, *where) for reader, wheres in ranges for where in wheres]
            pieces.append(SourcePiece.of_bytes(job.target.uri, codec.joining.end(plain)))
        self._join(job.target, pieces, self.before_publish)
        super().publish()

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


@dataclass
class WorkersCopy(JoinedCopy):
    """Copy whose parts are made, and read back, by workers; `make` is called before `copy`, which publishes it."""

    workers: Workers

    def copy(self) -> None:
        self.publish()

    def _share(self) -> Sequence[CopyPart]:
        return self.workers.select(self.parts)

    def _find_parts(self) -> dict[str, Values]:
        return self.folder.read_all(self.parts)

    def _make_parts(self, missing: Sequence[CopyPart]) -> None:
        self._records = self._run(copy_part, self.parts, self.workers, self.folder)

    def _read_back(self, location: Location) -> Range | None:
        job, version = self.job, json.dumps(object_identity(location))
        self._check_size(open_joined(location, job.codec, version))  # before the workers: all read one version
        self.watch.begin(f"verify {job.target}", job.size, 0)
        parts = [replace(part, blocks=part.blocks_of(self._records[part.name])) for part in self.parts]
        found = self._run(functools.partial(read_back, version), parts, replace(self.workers, shard=None))
        return next((result["wrong"] for result in found.values() if result["wrong"]), None)

    def _run(self, make: Callable[[CopyPart], Values], parts: Sequence[CopyPart], *where: Any) -> dict[str, Values]:
        remote = any(location.local_path is None for location in (self.job.target, self.job.source.prefix))
        options: Any = {"advance": self.watch.advance, "begin": lambda total, done: None, "remote_data": remote}
        return make_parts(make, parts, *where, unit="bytes", **options)


COPIES: dict[str, type[ObjectCopy]] = {"slices": SlicedCopy, "pieces": JoinedCopy, "whole": WholeCopy}
"""Form -> class of a copy by this process."""
