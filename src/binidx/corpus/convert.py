"""Copy a dataset between any two places: checked before, verified after, resumed after an interruption.

    1  the source is opened as a dataset, which checks every rule of the format
    2  TARGET.convert.json gets the name of this call, TARGET-parts/ that of the copy
    3  .bin: in parts with records, then read back; compressed or plain as in the source, or as the caller chooses
    4  .bin.xxh3, if the source has one or the caller asks for it
    5  .manifest.json and .lineage.parquet, if there are any
    6  .idx, like a plain .bin
    7  the records are removed

    source       target            copied
    .bin         .bin              its bytes
    .bin.zst     .bin.zst          its bytes; with a level, plain bytes compressed
    .bin.zst     .bin   (plain)    the plain bytes
    .bin         .bin.zst          the plain bytes, compressed on the way
    .bin.xxh3    .bin.xxh3         its bytes, or checksums of the copied tokens

An interrupted copy loses the parts in flight. Steps 5 and 6 begin again in a copy by workers.

A dataset is a pair, so none exists under the target's name before step 6, and none at all if step 3 fails. Files are
copied byte for byte, including modes and bytes after the last token. Readers can see an unverified .idx only between
its publication in an object store and its verification; the store has then checked the checksum of each part.

This process makes the parts, or workers do: `convert_parts`. The rest is copied by the call that finds all records; if
two do, both write the same bytes. `convert_owner` describes what two calls do to one target.

Memory: the blocks in flight.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.corpus.block_digests import CopyCounts, same_content
from binidx.corpus.convert_owner import ConvertOwner
from binidx.corpus.convert_parts import CopyJob, PartedCopy
from binidx.corpus.token_parts import PinnedDataset, plan_ranges
from binidx.corpus.whole_dataset import DatasetTarget, JsonResult, Options, WholeDataset
from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.bin_file import find_bin
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.stages import finish_once
from binidx.storage.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, codec_of, open_object, open_stored, stream
from binidx.storage.requests.remote_object import object_exists, read_small
from binidx.storage.writing.concatenate import choose_form
from binidx.storage.writing.multipart import plan_blocks
from binidx.storage.writing.publish import write_object

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
        parts_sent, parts_kept: parts of the objects that this run made, and those that an earlier run had made.
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
    part_bytes: int = 8 << 20,
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
        part_bytes: bytes of an upload part; S3 accepts no part below 5 MiB but the last. Rounded up to 64 KiB.
        workers: they make the parts of the tokens, see `convert_parts`; None: this process does. An existing target is
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
    return _Convert(*locations, way or StorageFormat(), verify, watch, overwrite).run(workers, part_bytes)


class _Convert:
    """State of one call of `convert_dataset`.

    Attributes:
        tokens: copy of the tokens, or of their checksums in place.
        others: copies of the checksums, if the source has any, and of the `.idx`.
    """

    tokens: PartedCopy
    others: list[PartedCopy]

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
        self.owner = ConvertOwner(target)

    def run(self, workers: Workers | None, part_bytes: int) -> ConvertResult:
        if workers is not None:
            workers.check_overwrite(self.overwrite)
            self.sampled = self.sampled or workers.shard is not None
        self._plan(workers, part_bytes)
        counts: list[CopyCounts] | None = None
        with self._lock(wait=workers is not None) as lock:
            if workers is None and lock.first:
                lock.leave_message(f"process {os.getpid()} of {socket.gethostname()}".encode())
            if complete := self._is_complete():
                if lock.first and not self.in_place:  # a call may have been killed right before it did
                    self._remove_work()
            elif workers is None and not lock.first:
                holder = lock.message.decode() or "another process"
                raise ObjectExistsError(f"{self.target.prefix}: {holder} converts to it; wait for its end, or end it")
            else:
                self._claim(alone=workers is None)
                counts = self._finish() if workers is None else None
        if workers is not None and not complete:
            if missing := self.tokens.make():
                return self._report(copied=not self.in_place, counts=[self.tokens.counts], missing=missing)
            with self._lock(wait=True):
                counts = self._finish_once()
        if counts is None:
            return self._complete_existing(workers, part_bytes)
        return self._report(copied=not self.in_place, counts=counts)

    def _plan(self, workers: Workers | None, part_bytes: int) -> None:
        """Plan the copies. One process makes pieces, too, if it goes on with those of workers."""
        source, stored, place = self.source, self.copies_stored and not self.in_place, self.target.prefix
        if workers is not None:
            place = Location(place.absolute, place.options)
        pinned = PinnedDataset.of(self.dataset, distrust_sums=self.distrust_sums)
        owner = self.owner if workers is None else None

        def plan(suffix: str, reader: RangeReader, form: str = "", codec: str = "raw", **settings: Any) -> PartedCopy:
            size, target, is_tokens = reader.size, place + f".{suffix}", "file" not in settings
            form = form or choose_form(target, size, codec, len(plan_ranges(size)))
            settings |= {"checksum": self.verify == "checksum", "form": form}
            settings["block_bytes"] = plan_blocks(size, part_bytes)
            job = CopyJob(pinned, target, place + "-parts", size, codec, **settings)
            check = self._replace_unfinished if is_tokens else self._check
            return PartedCopy(job, self.watch, check, reader, workers if is_tokens else None, owner)

        reader, codec = (source.open_stored(), "raw") if stored else (source.open_plain(), self.codec)
        sums = self.way.checksums and (source.sums is None or self.in_place)
        settings = {"stored": stored, "level": self.way.level, "tokens": not self.in_place, "sums": sums}
        self.tokens = plan(self.target.bin_suffix, reader, "pieces", codec, **settings)
        if workers is None and not self.in_place and not self.tokens.folder.is_claimed():
            self.tokens = plan(self.target.bin_suffix, reader, "", codec, **settings)
        sidecars = {"idx": source.open_idx()}
        if self.codec == "raw" and source.sums is not None:
            sidecars = {f"bin{SUMS}": open_stored(source.sums), **sidecars}
        self.others = [plan(suffix, reader, file=suffix) for suffix, reader in sidecars.items()]

    def _claim(self, *, alone: bool) -> None:
        """Take the target, and the folder of the parts; remove what an earlier call for another copy left there.

        Raises:
            ObjectExistsError: something stands at the target, or the folder has parts of another copy by workers.
        """
        earlier, folder = self.owner.read(), self.tokens.folder
        claimed = read_small(folder.job_file)
        resumed, is_other = claimed == folder.content, claimed not in (None, folder.content)
        if not self.overwrite and not self.in_place:
            self.target.check_free(resumed=resumed or earlier is not None)
        # A folder of another copy by workers is theirs; one process leaves its name, or parts of another form.
        other = dict[str, Any]()
        with contextlib.suppress(FormatError):  # a malformed job.json has no identity
            other = JobFolder.IDENTITY_FILE.decode(claimed or b"", "") if is_other else {}
        is_left = is_other and (other.get("job") == "convert" or not other) and (earlier is not None or "form" in other)
        if not resumed and not is_left:
            folder.claim()
        if earlier is not None and not resumed:
            self.watch.say(f"{self.owner.file}: of another source or form, or the source has changed; beginning again")
            self.owner.discard(earlier)
        if alone:
            self.owner.take(earlier if resumed else None)
        elif earlier is not None and not resumed:
            self.owner.remove()
        if is_left:
            folder.claim(overwrite=True)

    def _is_complete(self, *, finishing: bool = False) -> bool:
        """Return whether the target is the dataset in the chosen form, and has the chosen checksums.

        Args:
            finishing: whether all checksums may be those that another shard has just written.
        """
        if not self.in_place:
            return self._holds_source()
        return not self.way.checksums or (finishing and not self.overwrite and object_exists(self.target.bin + SUMS))

    def _finish(self) -> list[CopyCounts]:
        """Publish the dataset, all parts of which exist or are made by this process; remove the records."""
        if self.in_place:
            if self.tokens.workers is None:
                self.tokens.make()
            self.tokens.write_sums(self._check)
            counts = [self.tokens.counts]
        else:
            counts = self._copy_all()
        self._remove_work()
        return counts

    def _finish_once(self) -> list[CopyCounts] | None:
        """Do `_finish` for workers; return None if another call has finished the dataset meanwhile."""
        counts = list[CopyCounts]()
        # An ObjectChangedError: the other call may have replaced the .bin while this one read it back.
        if finish_once(lambda: counts.extend(self._finish()), lambda: self._is_complete(finishing=True)):
            return counts
        self._remove_work()
        return None

    def _remove_work(self) -> None:
        """Remove the files of the work, if it is of this copy: those of the owner first, as the folder proves it."""
        if self.tokens.folder.is_claimed():
            self.owner.remove()
            self.tokens.remove(self.others)

    @contextlib.contextmanager
    def _lock(self, *, wait: bool = False) -> Iterator[NodeLock]:
        """Yield the lock of a target on a disk."""
        path = (self.target.prefix + ".convert.lock").local_path
        if path is not None:
            path = os.path.abspath(path)
            with contextlib.suppress(OSError):  # the first write reports it
                os.makedirs(os.path.dirname(path), exist_ok=True)
        with acquire_node_lock(path, wait=False) as lock:
            if lock.first or not wait:
                yield lock
                return
            self.watch.say(
                f"{self.target.prefix}: {lock.message.decode() or 'another process'} converts to it; waiting"
            )
        with acquire_node_lock(path, wait=True) as lock:
            yield lock

    def _complete_existing(self, workers: Workers | None, part_bytes: int) -> ConvertResult:
        """Write checksums beside the existing copy if they were chosen."""
        exists, missing = self.way.checksums and object_exists(self.target.bin + SUMS), 0
        if self.way.checksums and not self.in_place and not (exists and workers is not None):
            place, way = self.target.prefix, StorageFormat(checksums=True)
            beside = _Convert(place, place, way, self.verify, self.watch, overwrite=exists)
            missing = beside.run(workers, part_bytes).parts_missing
        return self._report(copied=False, missing=missing)

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

    def _copy_all(self) -> list[CopyCounts]:
        """Copy tokens, checksums, sidecars and index; return the counts of each."""
        source, tokens = self.source, self.tokens
        *sums, index = self.others
        counts = [tokens.copy() if tokens.workers is None else tokens.publish()]
        counts += [copy.copy() for copy in sums]
        if tokens.job.sums:
            tokens.write_sums(self._check)
        for suffix in SIDECARS:
            if object_exists(source.prefix + suffix):
                sidecar = open_stored(source.prefix + suffix)
                write_object(self.target.prefix + suffix, stream(sidecar), before_publish=self._check)
        return [*counts, index.copy()]

    def _check(self) -> None:
        """Raise ObjectChangedError if the source was replaced, or another call is the owner."""
        if self.tokens.workers is None:
            self.owner.check()
        self.source.check_unchanged()

    def _replace_unfinished(self) -> None:
        """Remove an existing dataset, unless another call has finished this one meanwhile."""
        self._check()
        if not self.overwrite and object_exists(self.target.idx):
            raise ObjectExistsError(self.target.refusal)
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
