"""Copy a dataset between any two places: checked before, verified after, resumed after an interruption.

    1  the source is opened as a dataset, which checks every rule of the format
    2  TARGET.convert.json records the progress of an earlier run of the same copy
    3  .bin: part by part, then read back; compressed or plain as in the source, or as the caller chooses
    4  .bin.xxh3, if the source has one or the caller asks for it
    5  .manifest.json and .lineage.parquet, if there are any
    6  .idx, like the .bin
    7  the journal is removed

    source       target            copied                                             after an interruption
    .bin         .bin              its bytes                                          resumed
    .bin.zst     .bin.zst          its bytes; with a level, plain bytes compressed    resumed; compressed again
    .bin.zst     .bin   (plain)    the plain bytes                                    resumed
    .bin         .bin.zst          the plain bytes, compressed on the way             compressed again
    .bin.xxh3    .bin.xxh3         its bytes, or checksums of the copied tokens       resumed; computed again

A dataset is a pair, so none exists under the target's name before step 6, and none at all if step 3 fails. Files are
copied byte for byte, including modes and bytes after the last token. Readers can see an unverified .idx only between
its publication in an object store and its verification; the store has then checked the checksum of each part.

The journal is described in `convert_journal`. Workers copy the tokens in parts instead, whose records take its place:
`convert_parts`. The rest is copied by the call that finds all records; if two do, both write the same bytes.

Memory: the parts in flight.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from binidx.corpus.convert_journal import ConvertJournal, NoJournal
from binidx.corpus.convert_parts import CopyJob, PartedCopy
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import DatasetTarget, JsonResult, Options, WholeDataset
from binidx.errors import BinidxError, ConfigError, ObjectChangedError, ObjectExistsError
from binidx.format.bin_file import find_bin
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.jobs.parts import Workers
from binidx.jobs.runner import ATTEMPTS
from binidx.storage.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.codecs.checksums import SUMS, BlockSums, format_sums_header
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, codec_of, open_object, open_stored, stream
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.requests.retries import pause
from binidx.storage.writing.copy import (
    PART_BYTES,
    SAVE_SECONDS,
    CopyCounts,
    CorruptCopyError,
    ObjectCopy,
    ProgressWatcher,
    SilentWatcher,
    plan_copy,
    same_content,
)
from binidx.storage.writing.publish import create_object, write_object

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class StorageFormat:
    """Form in which tokens are stored.

    Attributes:
        codec: name of a codec: "raw", "zstd" or a registered one; None for that of the source.
        level: compression level; None for the codec's default, and for a copy of tokens that are compressed already.
        checksums: whether to compute checksums; existing checksums of the source are copied to a plain target anyway.
    """

    codec: str | None = None
    level: int | None = None
    checksums: bool = False


@dataclass(frozen=True)
class ConvertResult(JsonResult):
    """Result of a convert.

    Attributes:
        copied: False if the target held the dataset already.
        source_bytes, target_bytes: bytes of `.bin` and `.idx`.
        parts_sent, parts_kept: upload parts that this run sent, and those that an earlier run had sent; with workers
            parts of the tokens.
        verified: how the target was compared: "checksum" every byte, "size" sizes only, "sample" the whole `.idx` and
            samples of the `.bin`; "index" not at all, as it is the source: its `.idx` was checked.
        parts_missing: parts that are left to other shards; the target is no dataset before there are none.
    """

    source: str
    target: str
    copied: bool
    num_sequences: int
    num_documents: int
    num_tokens: int
    source_bytes: int
    target_bytes: int
    bytes_sent: int
    parts_sent: int
    parts_kept: int
    verified: str
    seconds: float
    parts_missing: int = 0


def convert_dataset(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    way: StorageFormat | None = None,
    overwrite: bool = False,
    verify: str = "checksum",
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
    part_bytes: int = PART_BYTES,
    save_seconds: float = SAVE_SECONDS,
    workers: Workers | None = None,
) -> ConvertResult:
    """Copy the dataset under the prefix `source` to the prefix `target`.

    Args:
        way: form in which the tokens are stored; that of the source by default. If the target is the source, or equal
            to it already, only the checksums are written, if `way` has them.
        overwrite: replace another dataset. It stays until the new `.bin` is ready; then its `.idx` is removed first.
            If the target is the source: replace checksums that disagree with the tokens.
        verify: "checksum" reads all copied bytes, "size" compares sizes only. A dataset that exists at the target is
            left alone if it is this one: "checksum" compares all of it, "size" its `.idx` and 64 samples (4 MiB) of its
            `.bin`, which can miss a few changed tokens.
        source_options, target_options: fsspec options.
        part_bytes: bytes of an upload part; S3 accepts no part below 5 MiB but the last.
        save_seconds: time between two saves of the progress, so the most work that an interruption can lose.
        workers: they copy the tokens in parts, see `convert_parts`; None: this process does. An existing target is
            compared by samples for a shard.

    Raises:
        ConfigError: the arguments contradict each other, or the source is to be stored differently in its own place.
        FormatError: the source is not a valid dataset, or disagrees with its checksums.
        ObjectExistsError: another dataset exists at the target, and `overwrite` is False; or another process of this
            node converts to this target on a disk.
        ObjectChangedError: the source was replaced meanwhile, or another convert to this target in a store started
            after this one.
        CorruptCopyError: the copied bytes differ from the source's; the copy was removed.
        WorkerError, UnreachableError: a worker failed repeatedly, or the cluster is lost.
    """
    locations = Location.of(source, source_options), Location.of(target, target_options)
    convert = _Convert(*locations, way or StorageFormat(), verify, watch, overwrite)
    if workers is not None:
        return convert.run_in_parts(workers, part_bytes)
    return convert.run(part_bytes, save_seconds)


class _Convert:
    """State of one call of `convert_dataset`."""

    parted: PartedCopy | None = None

    def __init__(
        self,
        source: Location,
        target: Location,
        way: StorageFormat,
        verify: str,
        watch: ProgressWatcher | None,
        overwrite: bool = False,
    ) -> None:
        encodes = way.codec not in (None, "raw")
        if way.level is not None and not encodes:
            raise ConfigError(f"level: found {way.level} without compression; compress, or give none")
        codec_named(way.codec or "raw").check_level(way.level)
        if way.checksums and encodes:
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")
        if verify not in ("checksum", "size"):
            raise ConfigError(f"verify: {verify!r}, needed 'checksum' or 'size'")
        if target.uri.endswith("/"):
            name = source.uri.rstrip("/").split("/")[-1]
            raise ConfigError(f"{target}: a folder, needed a prefix such as {target}{name}")
        self.began, self.way, self.verify, self.watch = time.monotonic(), way, verify, watch or SilentWatcher()
        self.in_place = source.absolute == target.absolute
        self.overwrite = overwrite
        self.sampled, self.distrust_sums = verify == "size", self.in_place and way.checksums and overwrite
        self.dataset = WholeDataset(source, distrust_sums=self.distrust_sums)
        self.source = self.dataset.source
        if self.source.num_parts and target.absolute in self.source.uris:
            need = f"is the virtual merge {self.source.bin} or a part of it, needed another place to write it to"
            raise ConfigError(f"{target}: {need}; compression and checksums in place are for each part alone")
        self.codec = way.codec or self.source.codec
        self.target = DatasetTarget(target, self.codec)
        if self.in_place and (self.codec != self.source.codec or way.level is not None):
            raise ConfigError(f"{source}: source and target, needed two places to store it in another way")
        if way.checksums and self.codec != "raw":
            raise ConfigError(f"{source}: compressed, with checksums: needed a plain .bin; add --plain")
        self.identity = self.source.opened
        self.dataset.check_index(SilentWatcher())
        self.journal = ConvertJournal(target, {**self.identity, "way": asdict(way)})

    def run(self, part_bytes: int, save_seconds: float) -> ConvertResult:
        with self._lock() as lock:
            if lock.first:
                lock.leave_message(f"process {os.getpid()} of {socket.gethostname()}".encode())
            if self.in_place or self._holds_source():
                if lock.first:
                    self._forget_killed_run()
                return self._complete_existing()
            if not lock.first:
                holder = lock.message.decode() or "another process"
                raise ObjectExistsError(f"{self.target.prefix}: {holder} converts to it; wait for its end, or end it")
            return self._run_locked(part_bytes, save_seconds)

    def run_in_parts(self, workers: Workers, part_bytes: int) -> ConvertResult:
        parted = self.parted = self._plan_parts(workers)
        self.sampled = self.sampled or workers.shard is not None
        if not self._is_complete():
            self.journal = NoJournal(self.target.prefix, self.journal.source)
            earlier = self.journal.adopt()
            if not self.overwrite and not self.in_place:
                self.target.check_free(self.journal.published, resumed=earlier == "ours" or parted.folder.is_claimed())
            self.journal.forget_earlier()
            self.journal.states = {}
            missing, counts = parted.make(), None
            if not missing:
                with self._lock(wait=True):
                    counts = self._finish(parted, part_bytes)
            if counts is not None or not self._is_complete(finishing=True):
                return self._report(copied=not self.in_place, counts=counts or [parted.counts], missing=missing)
        with self._lock(wait=True):  # which removes the file of a killed call
            parted.remove()
            self._forget_killed_run()
            return self._complete_existing()

    def _plan_parts(self, workers: Workers) -> PartedCopy:
        if workers.shard is not None and self.overwrite:
            raise ConfigError("shard, overwrite: shards do not know of each other; remove the old dataset first")
        stored, source = self.copies_stored and not self.in_place, self.source
        reader = source.open_stored() if stored else source.open_plain()
        place = Location(self.target.prefix.absolute, self.target.prefix.options)
        pinned = PinnedDataset.of(self.dataset, distrust_sums=self.distrust_sums)
        sums = self.way.checksums and (source.sums is None or self.in_place)
        job = CopyJob(
            pinned,
            place + f".{self.target.bin_suffix}",
            place + "-parts",
            reader.size,
            stored=stored,
            codec="raw" if stored else self.codec,
            level=self.way.level,
            tokens=not self.in_place,
            sums=sums,
            checksum=self.verify == "checksum",
        )
        return PartedCopy(job, workers, self.watch)

    def _is_complete(self, *, finishing: bool = False) -> bool:
        """Return whether the target is the dataset in the chosen form, and has the chosen checksums.

        Args:
            finishing: whether all checksums may be those that another shard has just written.
        """
        if not self.in_place:
            return self._holds_source()
        return not self.way.checksums or (finishing and not self.overwrite and object_exists(self.target.bin + SUMS))

    def _finish(self, parted: PartedCopy, part_bytes: int) -> list[CopyCounts] | None:
        """Publish the dataset; return None if another call has finished it meanwhile."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                counts = [parted.counts] if self.in_place else self._copy_all(part_bytes, SAVE_SECONDS)
                if self.in_place:
                    parted.write_sums(self.source.check_unchanged)
                break
            except BinidxError as error:
                if self._is_complete(finishing=True):
                    return None
                # The other call may have replaced the .bin while this one read it back.
                if not isinstance(error, ObjectChangedError) or attempt == ATTEMPTS:
                    raise
                time.sleep(pause(attempt))
        parted.remove()
        self.journal.remove()
        return counts

    def _lock(self, *, wait: bool = False) -> AbstractContextManager[NodeLock]:
        """Return the lock of a target on a disk."""
        path = (self.target.prefix + ".convert.lock").local_path
        if path is not None:
            path = os.path.abspath(path)
            with contextlib.suppress(OSError):  # the first write reports it
                os.makedirs(os.path.dirname(path), exist_ok=True)
        return acquire_node_lock(path, wait=wait)

    def _forget_killed_run(self) -> None:
        """Remove the journal of a run that was killed right before it did; the caller holds the lock."""
        if self.journal.adopt() == "ours":
            self.journal.forget_earlier()
            self.journal.remove()

    def _complete_existing(self) -> ConvertResult:
        """Write checksums beside the existing copy if they were chosen."""
        if self.way.checksums and not (self.parted is not None and object_exists(self.target.bin + SUMS)):
            # In place, the source checks its tokens by the sums that are there, unless it distrusts them.
            self._write_sums(self.source.open_plain() if self.in_place else open_stored(self.target.bin))
        return self._report(copied=False)

    def _run_locked(self, part_bytes: int, save_seconds: float) -> ConvertResult:
        earlier = self.journal.adopt()
        if not self.overwrite:
            self.target.check_free(self.journal.published, resumed=earlier == "ours")
        if earlier == "other":
            self.watch.say(f"{self.journal.file}: of another source, or the source has changed; beginning again")
            self.journal.forget_earlier()
        self.journal.save()
        counts = self._copy_all(part_bytes, save_seconds)
        self.journal.remove()
        return self._report(copied=True, counts=counts)

    def _holds_source(self) -> bool:
        """Return whether the target is this dataset already, in the chosen form; its `.idx` is compared first."""
        target = self.target
        existing = find_bin(target.prefix)
        if existing is None or codec_of(existing.uri) != self.codec or not object_exists(target.idx):
            return False
        open_target = functools.partial(open_object, cache=False)
        index = self.source.open_idx(), open_target(target.idx)
        tokens = self.source.open_plain(), open_target(existing)
        if any(left.size != right.size for left, right in (index, tokens)):
            return False
        same_tokens = same_samples if self.sampled else same_content
        return same_content(*index, self.watch) and same_tokens(*tokens, self.watch)

    def _copy_all(self, part_bytes: int, save_seconds: float) -> list[CopyCounts]:
        """Copy tokens, checksums, sidecars and index; return the counts of each resumable copy."""
        source, target, check = self.source, self.target, self.source.check_unchanged

        def copy(suffix: str, reader: RangeReader, check: Callable[[], None], codec: str = "raw") -> CopyCounts:
            def before_publish() -> None:
                self.journal.check_owner()
                check()

            states = self.journal.states
            state = states.get(suffix)
            if state is None or state.size != reader.size:
                state = states[suffix] = plan_copy(reader.size, part_bytes)
            try:
                return ObjectCopy(
                    reader,
                    target.file(suffix),
                    state,
                    save=self.journal.save,
                    before_publish=before_publish,
                    watch=self.watch,
                    codec=codec,
                    level=self.way.level,
                    checksum=self.verify == "checksum",
                    save_seconds=save_seconds,
                ).run()
            except CorruptCopyError:  # the copy was removed; a verified .bin stays for the next run
                del states[suffix]
                (self.journal.save if states else self.journal.remove)()
                raise

        if self.parted is not None:
            counts = [self.parted.join(self._replace_unfinished)]
        elif self.copies_stored:
            counts = [copy(target.bin_suffix, source.open_stored(), self._remove_existing)]
        else:
            counts = [copy(target.bin_suffix, source.open_plain(), self._remove_existing, self.codec)]
        if self.codec == "raw" and source.sums is not None:
            counts.append(copy(f"bin{SUMS}", open_stored(source.sums), check))
        elif self.way.checksums and self.parted is not None:
            self.parted.write_sums(check)
        elif self.way.checksums:
            self._write_sums(source.open_plain())
        for suffix in SIDECARS:
            if object_exists(source.prefix + suffix):
                sidecar = open_stored(source.prefix + suffix)
                write_object(target.prefix + suffix, stream(sidecar), before_publish=check)
        return [*counts, copy("idx", source.open_idx(), check)]

    def _write_sums(self, reader: RangeReader) -> None:
        tokens, check = self.target.bin, self.source.check_unchanged
        self.watch.begin(f"checksums of {tokens}", reader.size, 0)
        with create_object(tokens + SUMS, before_publish=check) as writer:
            writer.write(format_sums_header(reader.size))
            sums = BlockSums(lambda block: writer.write(block.astype("<u8").tobytes()))
            for block in stream(reader):
                sums.feed(block)
                self.watch.advance(len(block))
            sums.finish()

    def _replace_unfinished(self) -> None:
        """Do `_remove_existing`, unless another call has finished the dataset meanwhile."""
        if not self.overwrite and object_exists(self.target.idx):
            raise ObjectExistsError(self.target.refusal)
        self._remove_existing()

    def _remove_existing(self) -> None:
        self.source.check_unchanged()
        self.target.remove_existing()

    @property
    def copies_stored(self) -> bool:
        """True if the tokens are copied as they are stored, without decoding."""
        return self.codec == self.source.codec and self.way.level is None and self.source.has_stored_form

    def _report(self, *, copied: bool, counts: Sequence[CopyCounts] = (), missing: int = 0) -> ConvertResult:
        index, seconds = self.dataset.index, time.monotonic() - self.began
        shape = index.num_sequences, index.num_documents, index.num_tokens
        sizes = sum(self.identity[end]["size"] for end in ("bin", "idx")), 0 if missing else self.target.size()
        names = "bytes_sent", "parts_sent", "parts_kept"
        num_bytes, sent, kept = (sum(getattr(copied, name) for copied in counts) for name in names)
        verified = "sample" if self.sampled and not copied else self.verify
        verified = "index" if self.in_place else verified
        ends = self.source.prefix.uri, self.target.prefix.uri
        return ConvertResult(*ends, copied, *shape, *sizes, num_bytes, sent, kept, verified, seconds, missing)


def plan_samples(size: int) -> list[Range]:
    """Return `NUM_SAMPLES` evenly spread ranges of an object, its first and last bytes included; all of a small one."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    starts = (number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return [(start, start + SAMPLE_BYTES) for start in starts]


def same_samples(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects of one size hold the same bytes in the ranges of `plan_samples`; reads each once.

    Args:
        left, right: readers of plain bytes of the same size.
        watch: gets the number of bytes to compare.
    """
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)
