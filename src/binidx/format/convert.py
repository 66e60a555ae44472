"""Copy a dataset between any two places: checked before, verified after, continued after a break.

    1  the source is opened as a dataset, so every rule of the format is checked
    2  TARGET.convert.json says what an earlier run of the same copy has done
    3  .bin: part by part, then read back
    4  .idx: the same
    5  the journal goes

There is no dataset under the target's name before step 4, because a dataset is a pair, and none at all if step 3 fails.
The two files are copied byte for byte: modes, and bytes after the last token, come along. Only between publishing and
verifying the .idx on an object store can a reader see it unverified; there the store's own checksum of each part, which
its client sends along, is what stands between.

Memory: the parts in flight; in step 1 the .idx, if the source is remote.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ConfigError, ObjectChangedError, ObjectExistsError
from binidx.format.convert_journal import ENDS, ConvertJournal
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage import filesystem
from binidx.storage.backends import open_object
from binidx.storage.copy_state import PART_BYTES, plan_copy
from binidx.storage.parts import forget_parts
from binidx.storage.publish import delete_object, object_exists, object_identity
from binidx.storage.ranges import Range, RangeReader
from binidx.storage.resumable import SAVE_SECONDS, CopyCounts, CorruptCopyError, Watch, copy_object, same_content

Options = Mapping[str, Any] | None

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class Conversion:
    """What a convert did. `copied` is False when the target held the dataset already.

    `verified` is how that, or what was copied, was compared: "checksum" every byte, "size" sizes only, "sample" the
    .idx in full and samples of the .bin.
    """

    source: str
    target: str
    copied: bool
    num_sequences: int
    num_documents: int
    num_tokens: int
    num_bytes: int
    bytes_sent: int
    parts_sent: int
    parts_kept: int
    verified: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


class Silent:
    """A Watch that looks away."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def say(self, message: str) -> None: ...


def convert_dataset(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    verify: str = "checksum",
    source_options: Options = None,
    target_options: Options = None,
    watch: Watch | None = None,
    part_bytes: int = PART_BYTES,
    save_seconds: float = SAVE_SECONDS,
) -> Conversion:
    """Copy the dataset under the prefix `source` to the prefix `target`.

    Args:
        overwrite: replace a dataset that is not this one. The old one stands until the new `.bin` is ready; then its
            `.idx` goes first.
        verify: "checksum" reads all that arrived, "size" only asks how much did. A dataset that stands at the target
            already is left alone if it is this one: with "checksum" all of it is compared, with "size" its .idx and
            64 samples of its .bin, 4 MiB, which cannot tell a few changed tokens.
        source_options, target_options: fsspec's own.
        part_bytes: of a part; S3 takes none under 5 MiB but the last.
        save_seconds: how much work a break may cost at most.

    Raises:
        FormatError: the source is no sound dataset.
        ObjectExistsError: something else stands at the target, and `overwrite` was not given.
        ObjectChangedError: the source changed during the copy, or another convert to this target overtook this one.
        CorruptCopyError: what arrived is not what was sent; it was removed.
    """
    ends = os.fspath(source), os.fspath(target)
    return _Convert(*ends, verify, source_options, target_options, watch or Silent()).run(
        overwrite, part_bytes, save_seconds
    )


def plan_samples(size: int) -> list[Range]:
    """`NUM_SAMPLES` ranges spread evenly over an object, its first and last bytes among them; all of a small one."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    starts = (number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return [(start, start + SAMPLE_BYTES) for start in starts]


def same_samples(left: RangeReader, right: RangeReader, watch: Watch) -> bool:
    """Whether two objects of one size hold the same bytes in `plan_samples`: one read of each."""
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)


class _Convert:
    """One run, with what its steps share."""

    def __init__(
        self, source: str, target: str, verify: str, source_options: Options, target_options: Options, watch: Watch
    ) -> None:
        if verify not in ("checksum", "size"):
            raise ConfigError(f"verify: {verify!r}, needed 'checksum' or 'size'")
        if target.endswith("/"):
            raise ConfigError(
                f"{target}: a folder, needed a prefix such as {target}{source.rstrip('/').split('/')[-1]}"
            )
        self.began = time.monotonic()
        self.source, self.target, self.verify, self.watch = source, target, verify, watch
        self.source_options, self.target_options = source_options, target_options
        self.identity = self._source_identity()
        index = IndexedDataset(source, storage_options=source_options).index
        # Only the counts: the index of a remote source lies in memory.
        self.counts = len(index), len(index.document_indices) - 1, index.num_tokens
        self.journal = ConvertJournal(target, self.identity, target_options)

    def run(self, overwrite: bool, part_bytes: int, save_seconds: float) -> Conversion:
        earlier = self.journal.adopt()
        if self._target_is_source():
            if earlier == "ours":
                self._clean_up()
            return self._report(copied=False)
        self._check_target(overwrite, ours=earlier == "ours")
        if earlier == "other":
            self.watch.say(f"{self.journal.uri}: of another source, or the source has changed; beginning again")
            self.journal.forget_other()
        self.journal.save()
        counts = [self._copy(end, part_bytes, save_seconds) for end in ENDS]
        self.journal.remove()
        return self._report(copied=True, counts=counts)

    def _copy(self, end: str, part_bytes: int, save_seconds: float) -> CopyCounts:
        reader = self._open(self.source, end, self.source_options)
        state = self.journal.states.setdefault(end, plan_copy(reader.size, part_bytes))
        try:
            return copy_object(
                reader,
                f"{self.target}.{end}",
                state,
                save=self.journal.save,
                before_publish=self._check_unchanged if end == "idx" else self._make_way,
                watch=self.watch,
                checksum=self.verify == "checksum",
                save_seconds=save_seconds,
                storage_options=self.target_options,
            )
        except CorruptCopyError:
            self._begin_again(end)
            raise

    def _make_way(self) -> None:
        self._check_unchanged()
        delete_object(f"{self.target}.idx", self.target_options)

    def _check_unchanged(self) -> None:
        if self._source_identity() != self.identity:
            raise ObjectChangedError(f"{self.source}: changed while it was copied; run it again")

    def _check_target(self, overwrite: bool, ours: bool) -> None:
        """Nothing stands at the target, or it may go. A lone .bin that an earlier run published may go, too."""
        standing = [end for end in ENDS if object_exists(f"{self.target}.{end}", self.target_options)]
        if standing == ["bin"] and (ours or self._is_published()):
            return
        if standing and not overwrite:
            what = "another dataset" if len(standing) == 2 else f"a .{standing[0]} without its other half"
            raise ObjectExistsError(f"{self.target}: holds {what}, needed a free name; --overwrite replaces it")

    def _is_published(self) -> bool:
        return object_identity(f"{self.target}.bin", self.target_options) == self.journal.published

    def _target_is_source(self) -> bool:
        """Whether the target is this dataset already. The .idx first: it is small and mostly differs first."""
        ends = ("idx", "bin")
        if not all(object_exists(f"{self.target}.{end}", self.target_options) for end in ends):
            return False
        pairs = [
            (self._open(self.source, end, self.source_options), self._open(self.target, end, self.target_options))
            for end in ends
        ]
        if any(left.size != right.size for left, right in pairs):
            return False
        index, tokens = pairs
        same_tokens = same_samples if self.verify == "size" else same_content
        return same_content(*index, self.watch) and same_tokens(*tokens, self.watch)

    def _clean_up(self) -> None:
        """A run of ours was killed after its last step but one."""
        for end, state in self.journal.states.items():
            forget_parts(f"{self.target}.{end}", state.token, self.target_options)
        self.journal.remove()

    def _begin_again(self, end: str) -> None:
        """What was sent of this object is gone; a .bin that was verified may stay for the next run."""
        del self.journal.states[end]
        if self.journal.states:
            self.journal.save()
        else:
            self.journal.remove()

    def _open(self, prefix: str, end: str, options: Options) -> RangeReader:
        return open_object(f"{prefix}.{end}", storage_options=options, cache=False)

    def _source_identity(self) -> dict[str, Any]:
        objects = {end: object_identity(f"{self.source}.{end}", self.source_options) for end in ENDS}
        path = filesystem.local_path(self.source)
        return {"uri": self.source if path is None else os.path.abspath(path), **objects}

    def _report(self, *, copied: bool, counts: list[CopyCounts] | None = None) -> Conversion:
        return Conversion(
            self.source,
            self.target,
            copied,
            *self.counts,
            sum(self.identity[end]["size"] for end in ENDS),
            sum(each.bytes_sent for each in counts or []),
            sum(each.parts_sent for each in counts or []),
            sum(each.parts_kept for each in counts or []),
            self.verify if copied or self.verify == "checksum" else "sample",
            time.monotonic() - self.began,
        )
