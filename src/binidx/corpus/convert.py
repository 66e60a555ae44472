"""How a convert is to store what it reads.

source       target            what is sent                                   after a break
.bin         .bin              its bytes                                      goes on
.bin.zst     .bin.zst          its bytes; with a level they are packed anew   goes on; packed anew
.bin.zst     .bin   (plain)    the plain bytes                                goes on
.bin         .bin.zst          the plain bytes, compressed on the way         compressed anew
.bin.xxh3    .bin.xxh3         its bytes, or sums of what was sent            goes on; summed anew

Copy a dataset between any two places: checked before, verified after, continued after a break.

    1  the source is opened as a dataset, so every rule of the format is checked
    2  TARGET.convert.json says what an earlier run of the same copy has done
    3  .bin: part by part, then read back; compressed or plain as the source is, or as told: `convert_way`
    4  .bin.xxh3, where there is one or it is asked for
    5  .manifest.json and .lineage.parquet, where there are any
    6  .idx, as the .bin
    7  the journal goes

There is no dataset under the target's name before step 6, because a dataset is a pair, and none at all if step 3 fails.
The files are copied byte for byte: modes, and bytes after the last token, come along. Only between publishing and
verifying the .idx on an object store can a reader see it unverified; there the store's own checksum of each part, which
its client sends along, is what stands between.

Memory: the parts in flight; in step 1 the .idx, if the source is remote.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.convert_journal import ConvertJournal, DatasetTarget
from binidx.errors import ConfigError
from binidx.format.idx import SequenceIndex
from binidx.format.pair import open_pair
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.source import PairSource, absolute_uri
from binidx.format.virtual_source import VirtualSource, open_source
from binidx.storage.codecs.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.codecs.segments import check_level
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_stored, stream
from binidx.storage.settings import OURS
from binidx.storage.writing.copy import (
    PART_BYTES,
    SAVE_SECONDS,
    CopyCounts,
    CorruptCopyError,
    ProgressWatcher,
    SilentWatcher,
    copy_object,
    encode_object,
    plan_copy,
)
from binidx.storage.writing.multipart import forget_parts
from binidx.storage.writing.publish import create_object, object_exists


@dataclass(frozen=True)
class StorageFormat:
    """How tokens are to be stored.

    Attributes:
        codec: a row of `segments.CODECS`; None: as at the source.
        level: of compression; None: the codec's own, and what is compressed already stays as it is.
        checksums: whether sums are to be taken; they come along in any case where the source has some.
    """

    codec: str | None = None
    level: int | None = None
    checksums: bool = False

    def check(self) -> None:
        """ConfigError where these contradict each other."""
        if self.level is not None:
            check_level(self.level)
        if self.level is not None and self.codec != "zstd":
            raise ConfigError(f"compression level {self.level}: needed to compress, or no level")
        if self.checksums and self.codec == "zstd":
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")


def check_convert_arguments(source: str, target: str, way: StorageFormat, verify: str) -> None:
    """ConfigError for what can be told before anything is opened."""
    way.check()
    if verify not in ("checksum", "size"):
        raise ConfigError(f"verify: {verify!r}, needed 'checksum' or 'size'")
    if target.endswith("/"):
        raise ConfigError(f"{target}: a folder, needed a prefix such as {target}{source.rstrip('/').split('/')[-1]}")


Options = Mapping[str, Any] | None


@dataclass(frozen=True)
class ConvertResult:
    """What a convert did. `copied` is False when the target held the dataset already.

    `verified` is how that, or what was copied, was compared: "checksum" every byte, "size" sizes only, "sample" the
    .idx in full and samples of the .bin. `source_bytes` and `target_bytes` are those of all their objects.
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

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


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
        way: how the tokens are to be stored; by default as they are. With a target that is the source, or is its equal
            already, checksums are all that is written.
        overwrite: replace a dataset that is not this one. The old one stands until the new `.bin` is ready; then its
            `.idx` goes first.
        verify: "checksum" reads all that arrived, "size" only asks how much did. A dataset that stands at the target
            already is left alone if it is this one: with "checksum" all of it is compared, with "size" its .idx and
            64 samples of its .bin, 4 MiB, which cannot tell a few changed tokens.
        source_options, target_options: fsspec's own.
        part_bytes: of a part; S3 takes none under 5 MiB but the last.
        save_seconds: how much work a break may cost at most.

    Raises:
        ConfigError: the way contradicts itself, or the source is to be stored in another way in its own place.
        FormatError: the source is no sound dataset.
        ObjectExistsError: something else stands at the target, and `overwrite` was not given.
        ObjectChangedError: the source changed during the copy, or another convert to this target overtook this one.
        CorruptCopyError: what arrived is not what was sent; it was removed.
    """
    ends = os.fspath(source), os.fspath(target)
    run = _Convert(*ends, way or StorageFormat(), verify, source_options, target_options, watch or SilentWatcher())
    return run.run(overwrite, part_bytes, save_seconds)


class _Convert:
    """One run, with what its steps share."""

    def __init__(
        self,
        source: str,
        target: str,
        way: StorageFormat,
        verify: str,
        source_options: Options,
        target_options: Options,
        watch: ProgressWatcher,
    ) -> None:
        check_convert_arguments(source, target, way, verify)
        self.began = time.monotonic()
        self.way, self.verify, self.watch = way, verify, watch
        self.in_place = absolute_uri(source) == absolute_uri(target)
        self.source = open_source(source, source_options, distrust_sums=self.in_place and way.checksums)
        check_apart(self.source, target)
        self.codec = way.codec or self.source.codec
        self.target = DatasetTarget(target, self.codec, target_options)
        if self.in_place and (self.codec != self.source.codec or way.level is not None):
            raise ConfigError(f"{source}: source and target, needed two places to store it in another way")
        if way.checksums and self.codec != "raw":
            raise ConfigError(f"{source}: compressed, checksums are for a plain .bin; needed --plain, too")
        self.identity = self.source.opened
        index = read_checked_index(self.source)
        # Only the counts: the index of a remote source lies in memory.
        self.counts = len(index), len(index.document_indices) - 1, index.num_tokens
        self.journal = ConvertJournal(target, {**self.identity, "way": asdict(way)}, target_options)

    def run(self, overwrite: bool, part_bytes: int, save_seconds: float) -> ConvertResult:
        earlier = self.journal.adopt()
        if self.in_place or self.target.holds(self.source, self.verify, self.watch):
            if earlier == "ours":
                self._clean_up()
            if self.way.checksums:
                self._write_sums(open_stored(self.target.bin_uri, storage_options=self.target.options))
            return self._report(copied=False)
        if not overwrite:
            self.target.check_free(self.journal.published, ours=earlier == "ours")
        if earlier == "other":
            self.watch.say(f"{self.journal.uri}: of another source, or the source has changed; beginning again")
            self.journal.forget_other()
        self.journal.save()
        counts = self._bring_all(part_bytes, save_seconds)
        self.journal.remove()
        return self._report(copied=True, counts=counts)

    def _bring_all(self, part_bytes: int, save_seconds: float) -> list[CopyCounts]:
        """Tokens, their sums, the index."""
        source, pace = self.source, (part_bytes, save_seconds)
        if self.codec != "raw" and (self.codec != source.codec or self.way.level is not None):
            counts = [self._encode(part_bytes)]
        else:
            plain = self.codec != source.codec
            reader = source.open_plain() if plain else source.open_stored()
            counts = [self._copy(self.target.bin_end, reader, self._make_way, *pace)]
        if self.codec == "raw" and source.sums_uri is not None:
            reader = open_stored(source.sums_uri, storage_options=source.options)
            counts.append(self._copy(f"bin{SUFFIX}", reader, self.source.check_unchanged, *pace))
        elif self.way.checksums:
            self._write_sums(source.open_plain())
        self._bring_sidecars()
        reader = source.open_idx()
        return [*counts, self._copy("idx", reader, self.source.check_unchanged, *pace)]

    def _copy(
        self, end: str, reader: RangeReader, before_publish: Callable[[], None], part_bytes: int, save_seconds: float
    ) -> CopyCounts:
        with self._begun_again(end):
            return copy_object(
                reader,
                self.target.uri(end),
                self.journal.states.setdefault(end, plan_copy(reader.size, part_bytes)),
                save=self.journal.save,
                before_publish=before_publish,
                watch=self.watch,
                checksum=self.verify == "checksum",
                save_seconds=save_seconds,
                storage_options=self.target.options,
            )

    def _encode(self, part_bytes: int) -> CopyCounts:
        reader = self.source.open_plain()
        with self._begun_again(self.target.bin_end):
            return encode_object(
                reader,
                self.target.bin_uri,
                self.journal.states.setdefault(self.target.bin_end, plan_copy(reader.size, part_bytes)),
                level=self.way.level,
                save=self.journal.save,
                before_publish=self._make_way,
                watch=self.watch,
                checksum=self.verify == "checksum",
                storage_options=self.target.options,
            )

    @contextlib.contextmanager
    def _begun_again(self, end: str) -> Iterator[None]:
        """Where an object arrived wrong it is gone; a .bin that was verified may stay for the next run."""
        try:
            yield
        except CorruptCopyError:
            del self.journal.states[end]
            if self.journal.states:
                self.journal.save()
            else:
                self.journal.remove()
            raise

    def _bring_sidecars(self) -> None:
        """What tells of the documents, as it is; the index, without which it means nothing, comes after it."""
        for end in SIDECARS:
            uri = self.source.prefix + end
            if object_exists(uri, self.source.options):
                reader = open_stored(uri, storage_options=self.source.options)
                with create_object(
                    self.target.prefix + end, self.target.options, before_publish=self.source.check_unchanged
                ) as writer:
                    for block in stream(reader):
                        writer.write(block)

    def _write_sums(self, reader: RangeReader) -> None:
        uri = self.target.bin_uri
        self.watch.begin(f"sum up {uri}", reader.size, 0)
        with create_object(uri + SUFFIX, self.target.options, before_publish=self.source.check_unchanged) as writer:
            writer.write(format_sums_header(reader.size))
            sums = BlockSums(lambda found: writer.write(found.astype("<u8").tobytes()))
            for block in stream(reader):
                sums.feed(block)
                self.watch.advance(len(block))
            sums.finish()

    def _make_way(self) -> None:
        self.source.check_unchanged()
        self.target.make_way()

    def _clean_up(self) -> None:
        """A run of ours was killed after its last step but one."""
        for end, state in self.journal.states.items():
            forget_parts(self.target.uri(end), state.token, self.target.options)
        self.journal.remove()

    def _report(self, *, copied: bool, counts: Sequence[CopyCounts] = ()) -> ConvertResult:
        return ConvertResult(
            self.source.prefix,
            self.target.prefix,
            copied,
            *self.counts,
            sum(self.identity[end]["size"] for end in ("bin", "idx")),
            self.target.size(),
            sum(each.bytes_sent for each in counts),
            sum(each.parts_sent for each in counts),
            sum(each.parts_kept for each in counts),
            self.verify if copied or self.verify == "checksum" else "sample",
            time.monotonic() - self.began,
        )


def read_checked_index(source: PairSource | VirtualSource) -> SequenceIndex:
    """Its index; FormatError if it is no sound dataset."""
    options = source.options
    if source.sums_uri is None:
        options = {**(options or {}), OURS: {**(options or {}).get(OURS, {}), "verify": False}}
    return open_pair(source.prefix, cache=False, storage_options=options).index


def check_apart(source: PairSource | VirtualSource, target: str) -> None:
    """ConfigError for a virtual merge that is to be written over itself, or over a part of it."""
    if source.num_parts and absolute_uri(target) in source.places:
        raise ConfigError(
            f"{target}: is the virtual merge {source.bin_uri} or a part of it, needed another place to write it to; "
            "compression and checksums in place are for each part alone"
        )
