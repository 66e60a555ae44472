"""What a convert leaves beside its target so that the next one goes on: `TARGET.convert.json`.

    {"binidx_convert": 2,
     "owner": who writes it now,
     "source": {"uri": ..., "bin": identity, "idx": identity, "way": how it is to be stored},
     "objects": {"bin" or "bin.zst": CopyState, "bin.xxh3": CopyState, "idx": CopyState}}      those that were begun

It is there while a copy is under way or broken off, and gone once the dataset stands. Each run writes its own name as
the owner before anything else, and looks again before each later save: whoever finds another name there has been
overtaken and stops. Two runs with one source write the same bytes to the same parts, so the time between is harmless.

What stands where a convert is to write: nothing, the same dataset, or another one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import FormatError, ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from binidx.format.bin_file import delete_objects, find_bin, superseded_objects
from binidx.format.idx import get_idx_path
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.source import PairSource
from binidx.format.virtual import SUFFIX as PARTS
from binidx.format.virtual_source import VirtualSource
from binidx.json_models import JsonFile
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.codecs.segments import CODECS, codec_of
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import open_object, read_document
from binidx.storage.writing.copy import CopyState, ProgressWatcher, same_content
from binidx.storage.writing.multipart import forget_parts, sweep
from binidx.storage.writing.publish import create_object, delete_object, object_exists, object_identity

BIN_SUFFIXES = tuple(f"bin{codec.suffix}" for codec in CODECS.values())


OBJECT_SUFFIXES = (*BIN_SUFFIXES, f"bin{SUFFIX}", "idx")


"""The objects of a dataset, in the order in which they are written: data first, index last."""


@dataclass(frozen=True)
class JournalFile:
    """The fields of the file besides its version."""

    owner: str
    source: dict[str, Any]
    objects: dict[str, CopyState]


JOURNAL_FILE = JsonFile(JournalFile, {"binidx_convert": 2})


class ConvertJournal:
    """The journal of one target.

    Args:
        target: prefix of the target.
        source: what identifies the source: its URI, the identity of both objects, and how they are to be stored.
        storage_options: fsspec's own, of the target.

    Attributes:
        states: how far each object got, by its end, one of `OBJECT_SUFFIXES`.
        published: identity of the .bin that an earlier run, of whatever source, had verified.
    """

    def __init__(self, target: str, source: dict[str, Any], storage_options: Mapping[str, Any] | None) -> None:
        self.uri = f"{target}.convert.json"
        self.target = target
        self.source = source
        self.states: dict[str, CopyState] = {}
        self.published: dict[str, Any] | None = None
        self._owner = uuid.uuid4().hex
        self._options = storage_options
        self._claimed = False

    def adopt(self) -> str:
        """Take over the states of an earlier run with the same source.

        Returns:
            "none": there was no earlier run. "ours": its states are ours now. "other": it had another source, or the
            source has changed, or nobody can read it; nothing is taken over.
        """
        try:
            found = self._read()
            if found is None:
                return "none"
        except FormatError:
            return "other"
        self.published = next((found.objects[end].done for end in BIN_SUFFIXES if end in found.objects), None)
        if found.source != self.source:
            return "other"
        self.states = {end: found.objects[end] for end in OBJECT_SUFFIXES if end in found.objects}
        return "ours"

    def forget_other(self) -> None:
        """Remove what the earlier run, which is not ours, had sent: its partial files, its uploads."""
        try:
            found = self._read()
        except FormatError:
            return
        for end in OBJECT_SUFFIXES:
            if found is not None and end in found.objects:
                forget_parts(f"{self.target}.{end}", found.objects[end].token, self._options)

    def save(self) -> None:
        """Write it, as ours.

        Raises:
            ObjectChangedError: another run has written it since we did.
        """
        if self._claimed:
            self.check_ours()
        text = json.dumps({**JOURNAL_FILE.tags, **asdict(JournalFile(self._owner, self.source, self.states))})
        with create_object(self.uri, self._options) as writer:
            writer.write(text.encode())
        self._claimed = True

    def check_ours(self) -> None:
        """ObjectChangedError unless the journal is as we left it."""
        try:
            found = self._read()
        except FormatError:
            found = None
        if found is None or found.owner != self._owner:
            raise ObjectChangedError(f"{self.uri}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """The dataset stands, or must begin again."""
        delete_object(self.uri, self._options)
        for end in OBJECT_SUFFIXES:
            sweep(f"{self.target}.{end}", ".partial")
        sweep(self.uri, ".tmp")

    def _read(self) -> JournalFile | None:
        try:
            data = read_document(JOURNAL_FILE, self.uri, self._options)
        except ObjectNotFoundError:
            return None
        return JOURNAL_FILE.decode(data, self.uri)


Options = Mapping[str, Any] | None


NUM_SAMPLES = 64


SAMPLE_BYTES = 64 << 10


class DatasetTarget:
    """A place for a dataset whose tokens are stored by `codec`."""

    def __init__(self, prefix: str, codec: str, options: Options) -> None:
        self.prefix, self.codec, self.options = prefix, codec, options
        self.bin_end = f"bin{CODECS[codec].suffix}"
        self.bin_uri, self.idx_uri = self.uri(self.bin_end), get_idx_path(prefix)

    def uri(self, end: str) -> str:
        """Of one of its objects."""
        return f"{self.prefix}.{end}"

    def size(self) -> int:
        """Bytes of the two that make a dataset."""
        return sum(int(object_identity(uri, self.options)["size"]) for uri in (self.bin_uri, self.idx_uri))

    def holds(self, source: PairSource | VirtualSource, verify: str, watch: ProgressWatcher) -> bool:
        """Whether it is this dataset already, stored as wanted. The .idx first: it mostly differs first."""
        found = find_bin(self.prefix, self.options)
        if found is None or codec_of(found) != self.codec or not object_exists(self.idx_uri, self.options):
            return False
        index = source.open_idx(), self._open(self.idx_uri)
        tokens = source.open_plain(), self._open(found)
        if any(left.size != right.size for left, right in (index, tokens)):
            return False
        same_tokens = same_samples if verify == "size" else same_content
        return same_content(*index, watch) and same_tokens(*tokens, watch)

    def check_free(self, published: dict[str, Any] | None, *, ours: bool) -> None:
        """Nothing stands there, or a lone .bin that an earlier run published.

        Args:
            published: identity of what an earlier run, of whatever source, had verified.
            ours: whether there was an earlier run of the same source.

        Raises:
            ObjectExistsError: something else does.
        """
        standing = [end for end in (*BIN_SUFFIXES, "idx", PARTS[1:]) if object_exists(self.uri(end), self.options)]
        bins = [end for end in standing if end in BIN_SUFFIXES]
        alone = len(standing) == 1
        if not standing or (alone and bins and (ours or self._identity(bins[0]) == published)):
            return
        if PARTS[1:] in standing:
            what = f"a virtual merge ({self.uri(PARTS[1:])})"
        elif alone:
            what = f"a .{standing[0]} without its other half"
        else:
            what = "another dataset" if self.bin_end in bins else f"a dataset with a .{bins[0]}"
        raise ObjectExistsError(f"{self.prefix}: holds {what}, needed a free name; --overwrite replaces it")

    def make_way(self) -> None:
        """The old index goes first, or the list of a virtual merge, then what could be taken for the new tokens, their
        sums, or what tells of them."""
        tells = [self.prefix + end for end in (PARTS, *SIDECARS)]
        delete_objects([self.idx_uri, *superseded_objects(self.bin_uri), *tells], self.options)

    def _identity(self, end: str) -> dict[str, Any]:
        return object_identity(self.uri(end), self.options)

    def _open(self, uri: str) -> RangeReader:
        return open_object(uri, storage_options=self.options, cache=False)


def plan_samples(size: int) -> list[Range]:
    """`NUM_SAMPLES` ranges spread evenly over an object, its first and last bytes among them; all of a small one."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    starts = (number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return [(start, start + SAMPLE_BYTES) for start in starts]


def same_samples(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Whether two objects of one size hold the same bytes in `plan_samples`: one read of each."""
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)
