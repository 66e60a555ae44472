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

This process makes the parts, or workers do: `copies.object_copy`. The rest is copied by the call that finds all
records; if two do, both write the same bytes. `copies.convert_owner` describes what two calls do to one target.

Memory: the blocks in flight.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass, replace
from typing import Any

from binidx.corpus.block_digests import same_content, same_samples
from binidx.corpus.copies.convert_owner import ConvertOwner
from binidx.corpus.copies.copy_job import CopyJob
from binidx.corpus.copies.object_copy import COPIES, ObjectCopy, WorkersCopy
from binidx.corpus.token_parts import PinnedDataset, plan_blocks, plan_ranges
from binidx.corpus.whole_dataset import DatasetTarget, Options, WholeDataset
from binidx.errors import ConfigError, ObjectExistsError
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.jobs.parts import Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.stages import finish_once
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_object, open_stored, stream
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.concatenate import choose_form
from binidx.storage.writing.publish import write_object


@dataclass(frozen=True)
class StorageFormat:
    """Form in which tokens are stored.

    Attributes:
        codec: name of a codec: "raw", "zstd" or a registered one; None for that of the source.
        level: compression level; None for the codec's default, and for a copy of tokens that are compressed already.
        checksums: whether to compute checksums; existing checksums of the source are copied to a plain target anyway.

    Raises:
        ConfigError: a level without compression, or one that the codec lacks; or checksums of compressed tokens.
    """

    codec: str | None = None
    level: int | None = None
    checksums: bool = False

    def __post_init__(self) -> None:
        encodes = self.codec not in (None, "raw")
        if self.level is not None and not encodes:
            raise ConfigError(f"level: found {self.level} without compression; compress, or give none")
        codec_named(self.codec or "raw").check_level(self.level)
        if self.checksums and encodes:
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")


@dataclass(frozen=True)
class ConvertResult:
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
        workers: they make the parts of the tokens, see `copies`; None: this process does. An existing target is
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
    ends = Location.of(source, source_options), Location.of(target, target_options)
    convert = Convert(*ends, way or StorageFormat(), overwrite, verify, watch or SilentWatcher(), part_bytes, workers)
    return convert.run()


@dataclass
class Convert:
    """One call of `convert_dataset`: it checks, plans, becomes the owner, makes the parts, publishes, and cleans up.

    Args:
        start, end: prefixes of the source and of the target.

    Attributes:
        tokens: copy of the tokens, or of their checksums in place.
        others: copies of the checksums, if the source has any, and of the `.idx`.
    """

    start: Location
    end: Location
    way: StorageFormat
    overwrite: bool
    verify: str
    watch: ProgressWatcher
    part_bytes: int
    workers: Workers | None

    def __post_init__(self) -> None:
        source, target, way, workers = self.start, self.end, self.way, self.workers
        if self.verify not in ("checksum", "size"):
            raise ConfigError(f"verify: {self.verify!r}, needed 'checksum' or 'size'")
        if target.uri.endswith("/"):
            name = source.uri.rstrip("/").split("/")[-1]
            raise ConfigError(f"{target}: a folder, needed a prefix such as {target}{name}")
        if workers is not None:
            workers.check_overwrite(self.overwrite)
        self.began, self.in_place = time.monotonic(), source.absolute == target.absolute
        self.sampled = self.verify == "size" or (workers is not None and workers.shard is not None)
        self.distrust_sums = self.in_place and way.checksums and self.overwrite
        self.dataset = WholeDataset(source, distrust_sums=self.distrust_sums)
        self.source = self.dataset.source
        if self.source.num_parts and target.absolute in self.source.uris:
            need = f"is the virtual merge {self.source.bin} or a part of it, needed another place to write it to"
            raise ConfigError(f"{target}: {need}; compression and checksums in place are for each part alone")
        self.codec = way.codec or self.source.codec
        self.target, self.owner = DatasetTarget(target, self.codec), ConvertOwner(target)
        if self.in_place and (self.codec != self.source.codec or way.level is not None):
            raise ConfigError(f"{source}: source and target, needed two places to store it in another way")
        if way.checksums and self.codec != "raw":
            raise ConfigError(f"{source}: compressed, with checksums: needed a plain .bin; add --plain")
        self.dataset.check_index(SilentWatcher())

    def run(self) -> ConvertResult:
        """Bring the dataset to the target, or this shard's parts of it; return the counts."""
        self._plan()
        by_workers = self.workers is not None
        with self.owner.lock(self.watch, wait=by_workers) as holder:
            if complete := self._is_complete():
                if not holder and not self.in_place:  # a call may have been killed right before it did
                    self._clean_up()
            elif holder and not by_workers:
                raise ObjectExistsError(f"{self.target.prefix}: {holder} converts to it; wait for its end, or end it")
            else:
                self._claim()
                if not by_workers:
                    self._publish()
        if by_workers and not complete:
            if missing := self.tokens.make():
                return self._report(missing=missing)
            with self.owner.lock(self.watch, wait=True):
                # An ObjectChangedError: another call may have replaced the .bin while this one read it back.
                complete = not finish_once(self._publish, lambda: self._is_complete(finishing=True))
                if complete:
                    self._clean_up()
        return self._complete_existing() if complete else self._report()

    def _plan(self) -> None:
        """Plan the copies. One process makes pieces, too, if it goes on with those of workers."""
        source, way, place = self.source, self.way, self.target.prefix
        if self.workers is not None:
            place = Location(place.absolute, place.options)
        pinned = PinnedDataset.of(self.dataset, distrust_sums=self.distrust_sums)
        owner = self.owner if self.workers is None else None

        def plan(suffix: str, reader: RangeReader, form: str = "", codec: str = "raw", **settings: Any) -> ObjectCopy:
            size, target = reader.size, place + f".{suffix}"
            form = form or choose_form(target, size, codec, len(plan_ranges(size)))
            common = size, codec, self.verify == "checksum", form, plan_blocks(size, self.part_bytes)
            job = CopyJob(pinned, target, place + "-parts", *common, **settings)
            check = self._check if job.file else self._replace_unfinished
            if self.workers is not None and not job.file:
                return WorkersCopy(job, reader, self.watch, check, owner, self.workers)
            return COPIES[form](job, reader, self.watch, check, owner)

        # Tokens that are stored as at the source are copied without decoding.
        stored = self.codec == source.codec and way.level is None and source.has_stored_form and not self.in_place
        sums = way.checksums and (source.sums is None or self.in_place)
        settings = {"stored": stored, "level": way.level, "tokens": not self.in_place, "sums": sums}
        reader, codec = (source.open_stored(), "raw") if stored else (source.open_plain(), self.codec)
        self.tokens = plan(self.target.bin_suffix, reader, "pieces", codec, **settings)
        if self.workers is None and not self.in_place and not self.tokens.folder.is_claimed():
            self.tokens = plan(self.target.bin_suffix, reader, "", codec, **settings)
        sidecars = {"idx": source.open_idx()}
        if self.codec == "raw" and source.sums is not None:
            sidecars = {f"bin{SUMS}": open_stored(source.sums), **sidecars}
        self.others = [plan(suffix, reader, file=suffix) for suffix, reader in sidecars.items()]

    def _is_complete(self, *, finishing: bool = False) -> bool:
        """Return whether the target is the dataset in the chosen form, and has the chosen checksums.

        Args:
            finishing: whether all checksums may be those that another shard has just written.
        """
        if not self.in_place:
            return self._holds_source()
        return not self.way.checksums or (finishing and not self.overwrite and object_exists(self.target.bin + SUMS))

    def _holds_source(self) -> bool:
        """Return whether the target is this dataset already, in the chosen form; its `.idx` is compared first."""
        names = self.target.find_objects()
        if names[:1] != [self.target.bin_suffix] or "idx" not in names:
            return False
        open_target = functools.partial(open_object, cache=False)
        index = self.source.open_idx(), open_target(self.target.idx)
        tokens = self.source.open_plain(), open_target(self.target.bin)
        if any(left.size != right.size for left, right in (index, tokens)):
            return False
        same_tokens = same_samples if self.sampled else same_content
        return same_content(*index, self.watch) and same_tokens(*tokens, self.watch)

    def _claim(self) -> None:
        """Take the target, and the folder of the parts; remove what an earlier call for another copy left there.

        Raises:
            ObjectExistsError: something stands at the target, or the folder has parts of another copy by workers.
        """
        by_workers = self.workers is not None
        check_free = (lambda _: None) if self.overwrite or self.in_place else self.target.check_free
        self.owner.claim(self.tokens.folder, by_workers=by_workers, check_free=check_free, say=self.watch.say)

    def _check(self) -> None:
        """Raise ObjectChangedError if the source was replaced, or another call is the owner."""
        if self.workers is None:
            self.owner.check()
        self.source.check_unchanged()

    def _replace_unfinished(self) -> None:
        """Remove an existing dataset, unless another call has finished this one meanwhile."""
        self._check()
        if not self.overwrite and object_exists(self.target.idx):
            raise ObjectExistsError(self.target.refusal)
        # An `.idx` that appears from now on is that of a call which has finished this dataset.
        self.target.remove_existing(index=self.overwrite)

    def _publish(self) -> None:
        """Copy tokens, checksums, sidecars and index, as far as parts are missing; remove the records."""
        *sums, index = self.others
        self.tokens.copy()
        if self.tokens.job.sums:
            self.tokens.write_sums(self._check)
        if not self.in_place:
            for copy in sums:
                copy.copy()
            for suffix in filter(self.source.has, SIDECARS):
                sidecar = open_stored(self.source.prefix + suffix)
                write_object(self.target.prefix + suffix, stream(sidecar), before_publish=self._check)
            index.copy()
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the files of the work, if it is of this copy."""
        copies = [self.tokens, *self.others]
        objects = [file for copy in copies for file in copy.objects()]
        self.owner.clean_up(self.tokens.folder, [part for copy in copies for part in copy.parts], objects)

    def _complete_existing(self) -> ConvertResult:
        """Write checksums beside the existing copy if they were chosen."""
        exists, missing = self.way.checksums and object_exists(self.target.bin + SUMS), 0
        if self.way.checksums and not self.in_place and not (exists and self.workers is not None):
            beside = replace(self, start=self.end, way=StorageFormat(checksums=True), overwrite=exists)
            missing = beside.run().parts_missing
        return self._report(copied=False, missing=missing)

    def _report(self, *, copied: bool = True, missing: int = 0) -> ConvertResult:
        index, seconds, copies = self.dataset.index, time.monotonic() - self.began, [self.tokens, *self.others]
        copied = copied and not self.in_place
        shape = index.num_sequences, index.num_documents, index.num_tokens
        sizes = self.source.stored_bytes + self.source.idx_bytes, 0 if missing else self.target.size()
        names = "bytes_sent", "parts_sent", "parts_kept"
        num_bytes, sent, kept = (sum(getattr(copy, name) for copy in copies) for name in names)
        verified = "sample" if self.sampled and not copied else self.verify
        verified = "index" if self.in_place else verified
        ends = self.source.prefix.uri, self.target.prefix.uri
        return ConvertResult(*ends, copied, *shape, *sizes, num_bytes, sent, kept, verified, seconds, missing)
