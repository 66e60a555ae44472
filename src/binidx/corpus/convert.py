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

The journal:

    {"binidx_convert": 2,
     "owner": random name of the run that writes the file now,
     "source": {"uri": ..., "bin": identity, "idx": identity, "way": the chosen StorageFormat},
     "objects": {"bin" or "bin.zst": CopyState, "bin.xxh3": CopyState, "idx": CopyState}}      those already started

The journal exists while a copy runs or is interrupted, and is removed once the dataset is complete. A run first writes
its own name as the owner, and checks it before each later save: a run that finds another name stops, as a later run has
replaced it. Two runs of one source write the same bytes to the same parts, so their overlap is harmless.

Memory: the parts in flight.
"""

from __future__ import annotations

import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.whole_dataset import BIN_SUFFIXES, OBJECT_SUFFIXES, DatasetTarget, JsonResult, Options, WholeDataset
from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format.bin_file import find_bin
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.source import absolute_uri
from binidx.json_models import JsonFile
from binidx.storage.codecs.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.codecs.segments import check_level
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import codec_of, open_object, open_stored, read_document, stream
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.copy import (
    PART_BYTES,
    SAVE_SECONDS,
    CopyCounts,
    CopyState,
    CorruptCopyError,
    ProgressWatcher,
    SilentWatcher,
    copy_object,
    plan_copy,
    same_content,
)
from binidx.storage.writing.multipart import discard_parts, remove_staging_files
from binidx.storage.writing.publish import create_object, delete_object

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class StorageFormat:
    """Form in which tokens are stored.

    Attributes:
        codec: key of `storage.open.CODECS`; None for that of the source.
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
        parts_sent, parts_kept: upload parts that this run sent, and those that an earlier run had sent.
        verified: how the target was compared: "checksum" every byte, "size" sizes only, "sample" the whole `.idx` and
            samples of the `.bin`; "index" not at all, as it is the source: its `.idx` was checked.
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

    Raises:
        ConfigError: the arguments contradict each other, or the source is to be stored differently in its own place.
        FormatError: the source is not a valid dataset, or disagrees with its checksums.
        ObjectExistsError: another dataset exists at the target, and `overwrite` is False.
        ObjectChangedError: the source was replaced meanwhile, or another convert to this target started after this one.
        CorruptCopyError: the copied bytes differ from the source's; the copy was removed.
    """
    run = _Convert(source, target, way or StorageFormat(), verify, source_options, target_options, watch, overwrite)
    return run.run(part_bytes, save_seconds)


@dataclass(frozen=True)
class JournalFile:
    """Fields of TARGET.convert.json besides its version."""

    owner: str
    source: dict[str, Any]
    objects: dict[str, CopyState]


JOURNAL_FILE = JsonFile(JournalFile, {"binidx_convert": 2})


class ConvertJournal:
    """Progress of a copy to one target, in TARGET.convert.json, from which an interrupted copy resumes.

    Args:
        target: prefix of the target.
        source: identity of the source: its URI, the identities of `.bin` and `.idx`, and the chosen storage format.
        storage_options: fsspec options of the target.

    Attributes:
        states: progress of each object, by its suffix in `OBJECT_SUFFIXES`.
        published: identity of the `.bin` that an earlier run, of any source, has verified; None if there is none.
    """

    def __init__(self, target: str, source: dict[str, Any], storage_options: Options) -> None:
        self.uri = f"{target}.convert.json"
        self.target = target
        self.source = source
        self.states: dict[str, CopyState] = {}
        self.published: dict[str, Any] | None = None
        self._earlier: dict[str, CopyState] = {}
        self._owner = uuid.uuid4().hex
        self._options = storage_options
        self._claimed = False

    def adopt(self) -> str:
        """Take over the states of an earlier run with the same source.

        Returns:
            "none" if there was no earlier run, "ours" if its states were taken over, "other" if it had another source,
            the source has changed, or the journal is not readable.
        """
        try:
            found = self._read()
        except FormatError:
            return "other"
        if found is None:
            return "none"
        self._earlier = {suffix: found.objects[suffix] for suffix in OBJECT_SUFFIXES if suffix in found.objects}
        self.published = next((self._earlier[suffix].done for suffix in BIN_SUFFIXES if suffix in self._earlier), None)
        if found.source != self.source:
            return "other"
        self.states = self._earlier
        return "ours"

    def forget_earlier(self) -> None:
        """Remove the partial files and uploads of the earlier run, whatever its source."""
        for suffix, state in self._earlier.items():
            discard_parts(f"{self.target}.{suffix}", state.token, self._options)

    def save(self) -> None:
        """Write the journal with this run as its owner.

        Raises:
            ObjectChangedError: another run has written it since the last save.
        """
        if self._claimed:
            try:
                found = self._read()
            except FormatError:
                found = None
            if found is None or found.owner != self._owner:
                raise ObjectChangedError(f"{self.uri}: written by another convert to this target; this one stops")
        text = json.dumps({**JOURNAL_FILE.tags, **asdict(JournalFile(self._owner, self.source, self.states))})
        with create_object(self.uri, self._options) as writer:
            writer.write(text.encode())
        self._claimed = True

    def remove(self) -> None:
        """Remove the journal and local staging files, once the dataset is complete or the copy must start again."""
        delete_object(self.uri, self._options)
        for suffix in OBJECT_SUFFIXES:
            remove_staging_files(f"{self.target}.{suffix}", ".partial")

    def _read(self) -> JournalFile | None:
        try:
            return JOURNAL_FILE.decode(read_document(JOURNAL_FILE, self.uri, self._options), self.uri)
        except ObjectNotFoundError:
            return None


class _Convert:
    """State of one call of `convert_dataset`."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        way: StorageFormat,
        verify: str,
        source_options: Options,
        target_options: Options,
        watch: ProgressWatcher | None,
        overwrite: bool = False,
    ) -> None:
        from_prefix, to_prefix = os.fspath(source), os.fspath(target)
        if way.level is not None and way.codec != "zstd":
            raise ConfigError(f"level: found {way.level} without compression; compress, or give none")
        if way.level is not None:
            check_level(way.level)
        if way.checksums and way.codec == "zstd":
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")
        if verify not in ("checksum", "size"):
            raise ConfigError(f"verify: {verify!r}, needed 'checksum' or 'size'")
        if to_prefix.endswith("/"):
            name = from_prefix.rstrip("/").split("/")[-1]
            raise ConfigError(f"{to_prefix}: a folder, needed a prefix such as {to_prefix}{name}")
        self.began, self.way, self.verify, self.watch = time.monotonic(), way, verify, watch or SilentWatcher()
        self.in_place = absolute_uri(from_prefix) == absolute_uri(to_prefix)
        self.overwrite = overwrite
        distrust_sums = self.in_place and way.checksums and overwrite
        self.dataset = WholeDataset(from_prefix, source_options, distrust_sums=distrust_sums)
        self.source = self.dataset.source
        if self.source.num_parts and absolute_uri(to_prefix) in self.source.uris:
            raise ConfigError(
                f"{to_prefix}: is the virtual merge {self.source.bin_uri} or a part of it, needed another place to "
                "write it to; compression and checksums in place are for each part alone"
            )
        self.codec = way.codec or self.source.codec
        self.target = DatasetTarget(to_prefix, self.codec, target_options)
        if self.in_place and (self.codec != self.source.codec or way.level is not None):
            raise ConfigError(f"{from_prefix}: source and target, needed two places to store it in another way")
        if way.checksums and self.codec != "raw":
            raise ConfigError(f"{from_prefix}: compressed, with checksums: needed a plain .bin; add --plain")
        self.identity = self.source.opened
        self.dataset.check_index(SilentWatcher())
        self.journal = ConvertJournal(to_prefix, {**self.identity, "way": asdict(way)}, target_options)

    def run(self, part_bytes: int, save_seconds: float) -> ConvertResult:
        earlier = self.journal.adopt()
        if self.in_place or self._holds_source():
            if earlier == "ours":  # a run was killed before it removed the journal
                self.journal.forget_earlier()
                self.journal.remove()
            if self.way.checksums:
                # In place, the source checks its tokens by the sums that are there, unless it distrusts them.
                bin_uri, options = self.target.bin_uri, self.target.options
                self._write_sums(
                    self.source.open_plain() if self.in_place else open_stored(bin_uri, storage_options=options)
                )
            return self._report(copied=False)
        if not self.overwrite:
            self.target.check_free(self.journal.published, resumed=earlier == "ours")
        if earlier == "other":
            self.watch.say(f"{self.journal.uri}: of another source, or the source has changed; beginning again")
            self.journal.forget_earlier()
        self.journal.save()
        counts = self._copy_all(part_bytes, save_seconds)
        self.journal.remove()
        return self._report(copied=True, counts=counts)

    def _holds_source(self) -> bool:
        """Return whether the target is this dataset already, in the chosen form; its `.idx` is compared first."""
        target = self.target
        found = find_bin(target.prefix, target.options)
        if found is None or codec_of(found) != self.codec or not object_exists(target.idx_uri, target.options):
            return False
        open_target = functools.partial(open_object, storage_options=target.options, cache=False)
        index = self.source.open_idx(), open_target(target.idx_uri)
        tokens = self.source.open_plain(), open_target(found)
        if any(left.size != right.size for left, right in (index, tokens)):
            return False
        same_tokens = same_samples if self.verify == "size" else same_content
        return same_content(*index, self.watch) and same_tokens(*tokens, self.watch)

    def _copy_all(self, part_bytes: int, save_seconds: float) -> list[CopyCounts]:
        """Copy tokens, checksums, sidecars and index; return the counts of each resumable copy."""
        source, target, check = self.source, self.target, self.source.check_unchanged

        def copy(suffix: str, reader: RangeReader, check: Callable[[], None], codec: str = "raw") -> CopyCounts:
            states = self.journal.states
            state = states.get(suffix)
            if state is None or state.size != reader.size:
                state = states[suffix] = plan_copy(reader.size, part_bytes)
            try:
                return copy_object(
                    reader,
                    target.uri(suffix),
                    state,
                    save=self.journal.save,
                    before_publish=check,
                    watch=self.watch,
                    codec=codec,
                    level=self.way.level,
                    checksum=self.verify == "checksum",
                    save_seconds=save_seconds,
                    storage_options=target.options,
                )
            except CorruptCopyError:  # the copy was removed; a verified .bin stays for the next run
                del states[suffix]
                (self.journal.save if states else self.journal.remove)()
                raise

        stays = self.codec == source.codec and self.way.level is None
        reader = source.open_stored() if stays else source.open_plain()
        codec = "raw" if stays else self.codec
        counts = [copy(target.bin_suffix, reader, self._remove_existing, codec)]
        if self.codec == "raw" and source.sums_uri is not None:
            sums = open_stored(source.sums_uri, storage_options=source.options)
            counts.append(copy(f"bin{SUFFIX}", sums, check))
        elif self.way.checksums:
            self._write_sums(source.open_plain())
        for suffix in SIDECARS:
            if object_exists(source.prefix + suffix, source.options):
                sidecar = open_stored(source.prefix + suffix, storage_options=source.options)
                with create_object(target.prefix + suffix, target.options, before_publish=check) as writer:
                    for block in stream(sidecar):
                        writer.write(block)
        return [*counts, copy("idx", source.open_idx(), check)]

    def _write_sums(self, reader: RangeReader) -> None:
        uri, check = self.target.bin_uri, self.source.check_unchanged
        self.watch.begin(f"checksums of {uri}", reader.size, 0)
        with create_object(uri + SUFFIX, self.target.options, before_publish=check) as writer:
            writer.write(format_sums_header(reader.size))
            sums = BlockSums(lambda found: writer.write(found.astype("<u8").tobytes()))
            for block in stream(reader):
                sums.feed(block)
                self.watch.advance(len(block))
            sums.finish()

    def _remove_existing(self) -> None:
        self.source.check_unchanged()
        self.target.remove_existing()

    def _report(self, *, copied: bool, counts: Sequence[CopyCounts] = ()) -> ConvertResult:
        index, seconds = self.dataset.index, time.monotonic() - self.began
        shape = index.num_sequences, index.num_documents, index.num_tokens
        sizes = sum(self.identity[end]["size"] for end in ("bin", "idx")), self.target.size()
        names = "bytes_sent", "parts_sent", "parts_kept"
        num_bytes, sent, kept = (sum(getattr(each, name) for each in counts) for name in names)
        verified = self.verify if copied or self.verify == "checksum" else "sample"
        verified = "index" if self.in_place else verified
        ends = self.source.prefix, self.target.prefix
        return ConvertResult(*ends, copied, *shape, *sizes, num_bytes, sent, kept, verified, seconds)


def plan_samples(size: int) -> list[Range]:
    """Return `NUM_SAMPLES` evenly spread ranges of an object, its first and last bytes included; all of a small one."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    starts = (number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return [(start, start + SAMPLE_BYTES) for start in starts]


def same_samples(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects of one size hold the same bytes in the ranges of `plan_samples`; reads each once."""
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)
