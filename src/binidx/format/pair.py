"""Open both files of a dataset so that they belong together.

    local     identity of .idx ─► open .bin, read .idx ─► identity of .idx again: unchanged? a pair; else an error
    remote    identities of .idx and .bin ─► both again, while the .idx arrives: unchanged? a pair; else an error

A writer removes the .idx first and publishes the new one last (`indexed_dataset_builder`, `corpus.convert`). If the
.idx is the same before and after the .bin was opened, the .bin belongs to it, as no writer was at work in between; if
both are the same twice, both existed at the moment between. For tools that replace files in another order, or in place,
there is no such proof, only their times and sizes.

For many datasets of one folder, two lists prove the same without a request for each: `prefix_listing`. Otherwise the
cost is two HEADs more, at the same time as other requests, and two for objects that may exist instead of the .bin or
beside it (`bin_file`); for local files two stat calls. Checksums of local files are checked only on demand
(BINIDX_VERIFY=1): a warm sample of 8 KiB takes 2 us, checking its blocks would take 10.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.bin_file import check_bin_size, count_surplus_bytes, describe_need, open_bin
from binidx.format.idx import SequenceIndex, parse_index
from binidx.format.prefix_listing import ListedPair
from binidx.format.sidecars.dataset_manifest import MANIFEST, read_manifest
from binidx.format.virtual import VirtualParts, concatenate_indices, pair_or_parts
from binidx.storage.adapters import InMemory, JoinedReader
from binidx.storage.cache.disk_cache import check_content
from binidx.storage.cache.seals import Seal, find_seal
from binidx.storage.interfaces import RangeReader, VersionMark
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole, replace_cached
from binidx.storage.ranges import stored_reader, version_marks
from binidx.storage.requests.remote_object import head, object_identity
from binidx.storage.stores.identity import check_unchanged
from binidx.storage.threads import REQUESTS, run_both

logger = logging.getLogger(__name__)
DIGEST = "index_digest"
"""Name of the seal of `IndexedDataset.identity`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Index and tokens of a dataset, and the identities of both objects, "idx" and "bin", when they were opened.

    Attributes:
        marks: by URI, the marks of the versions that no identity records; of a virtual merge those of all parts.
        digest_seal: seal of the digest of the index, `IndexedDataset.identity`.
    """

    index: SequenceIndex
    bin_reader: RangeReader
    identities: dict[str, Any]
    marks: dict[str, VersionMark] = field(default_factory=dict)
    digest_seal: Seal = field(default_factory=Seal)


def open_pair(
    prefix: Location,
    multimodal: bool = False,
    mmap: bool = True,
    *,
    cache: bool | None = None,
    listed: ListedPair | None = None,
) -> Pair:
    """Open the dataset under a prefix; the parts of a virtual merge are opened as one dataset.

    Args:
        cache: for the `.bin`, as in `open_object`.
        listed: the pair's files in a listing of their folder, if one was made.

    Raises:
        ObjectNotFoundError: one of the two files is missing.
        FormatError: the `.idx` breaks a rule of the format, or the `.bin` is shorter than it requires; or it is longer,
            and its manifest contradicts the `.idx`.
        ObjectChangedError: the dataset was replaced while it was opened.
    """
    opening = _Opening(multimodal, mmap, cache)
    return pair_or_parts(prefix, lambda: opening.open_alone(prefix, listed), opening.open_parts)


@dataclass(frozen=True)
class _Opening:
    """Opening of datasets with the arguments of `open_pair`."""

    multimodal: bool
    mmap: bool
    cache: bool | None

    def open_parts(self, parts: VirtualParts) -> Pair:
        """Open the parts of a virtual merge as one pair."""
        pairs = parts.open_each(self.open_alone)
        parts.check([pair.identities for pair in pairs])
        indices = parts.check_counts([pair.index for pair in pairs])
        index, sizes = concatenate_indices(indices), [part.num_bytes for part in indices]
        bin_reader = JoinedReader(parts.location.uri, [pair.bin_reader for pair in pairs], sizes)
        digest = {"parts": parts.digest}
        marks = {uri: mark for pair in pairs for uri, mark in pair.marks.items()}
        return Pair(index, bin_reader, {"idx": digest, "bin": {"size": bin_reader.size, **digest}}, marks)

    def open_alone(self, prefix: Location, listed: ListedPair | None = None) -> Pair:
        """Open the pair of files under a prefix, and compare their sizes."""
        pair = self._open_listed(prefix, listed) if listed else None
        if pair is None and listed and listed.remedy:  # a cache of this node may be damaged
            check_pinned(prefix, listed)
            pair = self._open_unlisted(prefix)
            check_pinned(prefix, listed)
        pair = pair or self._open_unlisted(prefix)
        check_opened(prefix, pair.bin_reader, pair.index, listed)
        return pair

    def _open_unlisted(self, prefix: Location) -> Pair:
        return self._open_remote(prefix) if prefix.local_path is None else self._open_local(prefix)

    def _open_local(self, prefix: Location) -> Pair:
        idx = prefix + ".idx"
        # Its own stat, not the reader's: the inode tells files apart whose times are equal.
        before = _current_identity(idx)
        idx_reader, bin_reader = self._open_idx(idx), self._open_tokens(prefix)
        try:
            return self._pair(idx, idx_reader, (idx_reader, bin_reader))
        finally:
            # If the .idx was replaced meanwhile, neither result nor error is valid.
            _check_not_replaced(idx, before or dict(idx_reader.identity))

    def _open_remote(self, prefix: Location) -> Pair:
        idx = prefix + ".idx"
        idx_reader, bin_reader = run_both(partial(self._open_idx, idx), partial(self._open_tokens, prefix))
        tokens = stored_reader(bin_reader)
        opened = {
            idx: dict(idx_reader.identity),
            prefix + tokens.uri.removeprefix(prefix.uri): dict(tokens.identity),
        }

        def read() -> Pair:
            try:
                return self._pair(idx, idx_reader, (idx_reader, bin_reader))
            except FormatError as error:
                # A bit may have flipped on the way, and be cached on this node.
                again = InMemory(idx.uri, read_whole(stored_reader(idx_reader)))
                pair = self._pair(idx, again, (idx_reader, bin_reader))
                logger.warning("%s: damaged on its way or on the node, fetched again from its store: %s", idx, error)
                replace_cached(idx_reader, again.data)
                return pair
            finally:
                check_content(idx_reader)

        return run_both(lambda: REQUESTS.map(lambda each: _check_not_replaced(*each), opened.items()), read)[1]

    def _open_idx(self, idx: Location) -> RangeReader:
        return open_object(idx, mmap=self.mmap, cache="disk")

    def _open_tokens(self, prefix: Location) -> RangeReader:
        return open_bin(prefix, mmap=self.mmap, cache=self.cache)

    def _pair(
        self,
        idx: Location,
        stored: RangeReader,
        readers: Sequence[RangeReader],
        listed: ListedPair | None = None,
    ) -> Pair:
        """Return the pair of an index, fully checked by this process or by another one of this node, and its tokens.

        Args:
            stored: reader of the bytes of the index.
            readers: readers of the objects whose marks are kept; the last one reads the tokens.
            listed: the files in a listing; it has the identity of the index.
        """
        data, bin_reader = read_whole(stored), readers[-1]
        seal = find_seal(stored, idx, f"idx {self.multimodal}")  # of what is mapped now
        num_tokens = seal.read_count()
        index = parse_index(data, uri=idx.uri, multimodal=self.multimodal, num_tokens=num_tokens)
        if num_tokens is None:
            seal.write(str(index.num_tokens))
        fits = bin_reader.size == index.num_bytes
        if not fits and may_lack_a_bit(index, count_surplus_bytes(bin_reader.uri, bin_reader.size, index.counts)):
            problem = f"{bin_reader.size} bytes, {describe_need(index.counts)}"
            cause = "as if a bit in the length of its last sequence had flipped"
            way = "restore the .idx, or cut the .bin if the bytes after its last token are a leftover"
            raise FormatError(f"{bin_reader.uri}: {problem}, {cause}; {way}")
        identities = {"idx": listed.identity if listed else dict(readers[0].identity), "bin": bin_reader.identity}
        return Pair(index, bin_reader, identities, version_marks(*readers), find_seal(stored, idx, DIGEST))

    def _open_listed(self, prefix: Location, listed: ListedPair) -> Pair | None:
        """Open a pair as its listing shows it; return None if a file was replaced since, or is not valid."""
        idx, data = prefix + ".idx", listed.index
        try:
            stored = open_object(idx, cache="disk", found=listed.idx) if data is None else InMemory(idx.uri, data)
            return self._pair(idx, stored, [open_bin(prefix, listed=listed, cache=self.cache)], listed)
        except (FormatError, StorageError):
            return None


def check_pinned(prefix: Location, pinned: ListedPair) -> None:
    """Raise ObjectChangedError if the store has other versions of a pair than the pinned ones, or none."""
    for found in (pinned.idx, pinned.bin):
        location = Location(found.info.uri, prefix.options)
        try:
            check_unchanged(found.info, head(location, location.settings))
        except ObjectNotFoundError as error:
            raise ObjectChangedError(f"{error}; {pinned.remedy}") from error


def check_opened(
    prefix: Location, bin_reader: RangeReader, index: SequenceIndex, listed: ListedPair | None = None
) -> None:
    """Check the size of an opened `.bin`; the manifest is read only if that size is not what the `.idx` needs.

    Args:
        prefix: of the dataset.
        bin_reader: reader of the plain tokens.
        index: the fully checked `.idx`.
        listed: the pair's files in a listing of their folder, if one was made.
    """

    def read() -> dict[str, Any] | None:
        return None if listed and MANIFEST not in listed.sidecars else read_manifest(prefix + MANIFEST)

    if bin_reader.size != index.num_bytes:
        check_bin_size(prefix.uri, bin_reader.uri, bin_reader.size, index.counts, read)


def may_lack_a_bit(index: SequenceIndex, spare_bytes: int) -> bool:
    """Return whether one bit of an `.idx` that flipped to 0 explains the bytes after the last token of its `.bin`.

    The pointers prove every length but the last. Neither Megatron nor binidx writes bytes after the last token, but
    other tools may leave some, which both ignore: they are accepted unless they are as many as such a bit takes away.

    Args:
        index: the fully checked `.idx`.
        spare_bytes: bytes of the `.bin` after its last token.
    """
    tokens, rest = divmod(spare_bytes, index.dtype_size)
    last = int(index.sequence_lengths[-1]) if len(index) else -1
    return not rest and tokens.bit_count() == 1 and tokens < 2**31 and not last & tokens


def _check_not_replaced(location: Location, opened: Any) -> None:
    if _current_identity(location) != opened:
        raise ObjectChangedError(f"{location}: replaced while it was opened; open it when its writer has finished")


def _current_identity(location: Location) -> Any:
    """Return the identity of the object that has this name now, of a local file its version; None without an object."""
    if location.local_path is not None:
        return location.local_version()
    try:
        return object_identity(location)
    except ObjectNotFoundError:
        return None
