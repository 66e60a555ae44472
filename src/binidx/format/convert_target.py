"""What stands where a convert is to write: nothing, the same dataset, or another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from binidx.errors import ObjectExistsError
from binidx.format.bin_object import beside, find_bin
from binidx.format.bin_writer import delete_all
from binidx.format.convert_journal import BINS
from binidx.format.idx import get_idx_path
from binidx.format.sidecars import SIDECARS
from binidx.format.source import Source
from binidx.format.virtual import SUFFIX as PARTS
from binidx.format.virtual_source import VirtualSource
from binidx.storage.backends import open_object
from binidx.storage.publish import object_exists, object_identity
from binidx.storage.ranges import Range, RangeReader
from binidx.storage.resumable import Watch, same_content
from binidx.storage.segments import CODECS, codec_of

Options = Mapping[str, Any] | None

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


class Target:
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

    def holds(self, source: Source | VirtualSource, verify: str, watch: Watch) -> bool:
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
        standing = [end for end in (*BINS, "idx", PARTS[1:]) if object_exists(self.uri(end), self.options)]
        bins = [end for end in standing if end in BINS]
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
        delete_all([self.idx_uri, *beside(self.bin_uri), *tells], self.options)

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


def same_samples(left: RangeReader, right: RangeReader, watch: Watch) -> bool:
    """Whether two objects of one size hold the same bytes in `plan_samples`: one read of each."""
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)
