"""Index arrays in a store: loaded if a valid cache exists, else built and published.

    {directory}/{hash}-GPTDataset-train-description.txt       the text that Megatron hashes; for people
    {directory}/{hash}-GPTDataset-train-document_index.npy    numpy.save's bytes; Megatron's names
    {directory}/{hash}-GPTDataset-train-binidx.json           the manifest, written last
    {directory}/{key}-binidx-orders.json                      the indices of the same data: see `order_record`

Megatron's hash leaves out the content of the data and two options; the manifest has them. An array is served only under
a manifest of the requested options and data, with a checksum that its bytes meet. So racing builders, kills, lost power
and stale data cost a rebuild and never a wrong order, and nothing is synced to the disk.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import binidx
from binidx.errors import FormatError, ObjectNotFoundError, StorageError
from binidx.forks import cached_property
from binidx.format.prefix_listing import ListedPair
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.build_lock import BuildLock, Built, Check, Checks
from binidx.index.cache.index_files import DESCRIPTION, MANIFEST, Arrays, IndexFiles, parse_npy, read_cached
from binidx.index.cache.manifest import (
    ALGORITHM,
    NO_DATA,
    Manifest,
    Origin,
    format_manifest,
    list_differences,
    list_mismatches,
)
from binidx.index.cache.order_record import OrderKey, record_order
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.stats import span

Access = Literal["whole", "ranges"]
"""Access to cached arrays: "whole" reads or maps all of them and compares their checksums; "ranges" returns
`RangedArray`s if a manifest proves that the arrays belong to it, and otherwise loads or builds them."""

Build = Callable[[ArrayWriter], None]
ArrayCheck = Callable[[Arrays], None]
"""Function that raises ValueError for arrays that are no index of this dataset."""


UNPROVEN = (FormatError, StorageError, ValueError, KeyError, TypeError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of one request for an index.

    files: of the index in the cache.
    how: FOUND in the cache, also when another process has just built it; BUILT; NOT_KEPT: built but not cached, as it
        is built faster than fetched.
    seconds: time until the arrays were loaded, including the wait for other processes; 0 for NOT_KEPT.
    """

    FOUND, BUILT, NOT_KEPT = "found", "built", "not kept"

    files: IndexFiles
    how: str
    seconds: float

    def is_written(self) -> bool:
        """Return whether the files are there: of a built index that was not written, a build only logs a warning."""
        try:
            return self.how != self.BUILT or object_exists(self.files.file(MANIFEST))
        except StorageError:
            return False


OnOutcome = Callable[[Outcome], None] | None


@dataclass(frozen=True)
class BuildContext:
    """Options of one build: they change when and where an index is built, never its bytes.

    Args:
        checks: called while the build waits for another process; an exception ends the wait.
        slot: held while this index is computed, so that not too many indices are computed at a time.
        num_threads: number of threads that compute the index; None: the number in the dataset's config.
        on_outcome: called with the outcome of each index, by any thread.
        listed: by prefix, its files in a listing of their folder, if one was made.
        parent: context of the span of the start, of which that of the build is a part.
        warns: whether a new order of the same data is a warning in the log.
        run_prefixes: prefixes of the run besides those of the config, which lists of documents may name.
    """

    checks: Checks = ()
    slot: AbstractContextManager[Any] = contextlib.nullcontext()  # noqa: RUF009
    num_threads: int | None = None
    on_outcome: OnOutcome = None
    listed: Mapping[str, ListedPair] = field(default_factory=dict)
    parent: Any = None
    warns: bool = True
    run_prefixes: Collection[str] = ()

    @contextlib.contextmanager
    def threads(self, threads: int) -> Iterator[int]:
        """Hold the slot; yield how many threads the block may use: `threads` if this context does not limit them."""
        with self.slot:
            yield self.num_threads or threads

    @cached_property
    def unlisted(self) -> BuildContext:
        """These options without the listing: what an index is built with need not keep it."""
        return replace(self, listed={})

    def with_check(self, check: Check) -> BuildContext:
        """Return these options with one more check."""
        return replace(self, checks=(*self.checks, check))

    def report(self, outcome: Outcome) -> None:
        if self.on_outcome is not None:
            self.on_outcome(outcome)


DEFAULT_CONTEXT = BuildContext()


@dataclass(frozen=True)
class IndexCache:
    """Cached arrays of one index.

    Args:
        files: of the index.
        origin: the data that the index is built of.
        order: returns the order of the arrays, to be compared with earlier orders; None for indices without a record.
        trusted: check for arrays without a manifest, as Megatron writes them; None: they are not used.
        context: options of this build.
        digests: gets the XXH3 of the `.npy` of each array that is loaded or published under a manifest, by name.
        open_writer: returns the writer of the arrays.
    """

    files: IndexFiles
    origin: Origin = NO_DATA
    order: Callable[[], OrderKey] | None = None
    trusted: ArrayCheck | None = None
    context: BuildContext = field(default=BuildContext(), repr=False, compare=False)
    digests: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    open_writer: Callable[[IndexFiles], ArrayWriter] = field(default=ArrayWriter, repr=False, compare=False)
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def load_or_build(
        self,
        description: str,
        fingerprint: Mapping[str, Any],
        names: Sequence[str],
        build: Build,
        access: Access = "whole",
    ) -> Arrays:
        """Return the cached arrays if they are valid; else build them, publishing them to the cache meanwhile.

        If several processes request the same arrays at once, one builds and the others wait: see `build_lock`. If the
        store is full or cannot be written to, a warning is logged and the arrays are returned without being cached.
        (Not large ones of a full disk, unless memory was asked for: see `array_writer`.)

        Memory: that of `build`, plus the arrays; see `array_writer`. Arrays loaded from or built on a local disk occupy
        page cache; others occupy anonymous memory.

        Args:
            description: text that Megatron hashes.
            fingerprint: options that the arrays depend on.
            names: names of the arrays.
            build: function that fills the arrays provided by the writer.
            access: see `Access`.

        Raises:
            ConfigError: a cached array does not fit the index_dir of this node.
            FormatError: arrays without a manifest, accepted because of `trusted`, are no index of this dataset.
            IndexBuildError: a disk is too small for an array.
            PeerError: this process waited for another one to build the index, and that build failed.
        """
        needed, how, began = {"algorithm": ALGORITHM, **fingerprint}, Outcome.FOUND, time.monotonic()
        load = partial(self.load, needed, names)
        if access == "ranges" and (
            ranged := self.open_ranges(names, lambda manifest: has_fingerprint(manifest, fingerprint))
        ):
            return ranged

        def make() -> Built:
            nonlocal how
            with span("binidx.index.build", self.context.parent, index=self.files.name):
                how, writer = Outcome.BUILT, self.build(description, needed, build)
            return writer.arrays, writer.failure is None

        arrays = load()
        lock = BuildLock(self.files.file(MANIFEST), load, make, self.context.checks)
        if arrays is None:
            arrays = lock.build_or_wait()
        elif lock.remove_lease_of_killed_process() and self.order:  # it may have been killed before it recorded this
            record_order(self.files, needed, self.origin.content(), self.order(), self.context.warns, True)
        self.context.report(Outcome(self.files, how, time.monotonic() - began))
        return arrays

    def open_ranges(self, names: Sequence[str], is_wanted: Callable[[Manifest], bool]) -> Arrays | None:
        """Open the arrays to read ranges of them; None unless they are proven to belong to a wanted manifest.

        Args:
            is_wanted: checks the options and the data of a manifest; may raise the errors of `IndexFiles.open_arrays`.
        """
        try:
            opened: Any = self.files.open_arrays(names)
            return opened[1] if opened and is_wanted(opened[0]) else None
        except UNPROVEN as error:
            logger.info("%s: not read by ranges: %s", self.files.file(MANIFEST), error)
            return None

    def load(self, fingerprint: Mapping[str, Any], names: Sequence[str]) -> Arrays | None:
        """Return the cached arrays; None, with the reason once in the log, if there is no valid cache.

        Args:
            fingerprint: options that the arrays depend on, and "algorithm".
            names: names of the arrays.
        """
        problem = ""
        try:
            manifest = self.files.read_manifest()
            if manifest is not None:
                if not (wrong := list_mismatches(manifest, fingerprint, self.origin)):
                    return self._load_proven(manifest, names)
                problem = f"stale, rebuilding: {'; '.join(wrong)}"
        except (FormatError, StorageError, KeyError) as error:
            problem = f"unusable, rebuilding: {error}"
        if not problem:
            return self._load_without_manifest(names, self.trusted) if self.trusted else None
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("%s: %s", self.files.file(MANIFEST), problem)
        return None

    def _load_proven(self, manifest: Manifest, names: Sequence[str]) -> Arrays:
        """Return the arrays of a manifest of these options and data; raise the errors of `IndexFiles.read_arrays`."""
        arrays = self.files.read_arrays({name: manifest.arrays[name] for name in names})
        self.digests.update({name: manifest.arrays[name].xxh3_64 for name in names})
        tokens, recorded = self.origin.data().get("bin"), manifest.data.get("bin")
        if tokens != recorded:
            # No array depends on tokens: the same documents in other words, or only copied.
            file = self.files.file(MANIFEST)
            logger.info("%s: the .bin is %s, was %s; the order is the same", file, tokens, recorded)
        return arrays

    def _load_without_manifest(self, names: Sequence[str], check: ArrayCheck) -> Arrays | None:
        """Return the arrays that Megatron left, if `check` accepts them; None if one is missing.

        Raises:
            FormatError: the arrays are no index of this dataset. (Trusted arrays are not quietly replaced.)
        """
        files = self.files
        try:
            # Megatron's names have no number of algorithms.
            contents = {name: read_cached(files.directory / f"{files.name}-{name}.npy")[0] for name in names}
        except ObjectNotFoundError:
            return None
        try:
            arrays = {name: parse_npy(content) for name, content in contents.items()}
            check(arrays)
        except (ValueError, TypeError) as error:
            hint = "remove the files, or leave trust_cache out to build the index anew"
            raise FormatError(f"{files.file('*.npy')}: trust_cache finds {error}; {hint}") from error
        logger.warning("%s: taken as it is (trust_cache): nothing proves the data it was built of", files.file("*.npy"))
        return arrays

    def build(self, description: str, fingerprint: Mapping[str, Any], build: Build) -> ArrayWriter:
        """Build the arrays into their files, then write the manifest that makes them valid; return their writer.

        Args:
            description: text that Megatron hashes.
            fingerprint: options that the arrays depend on, and "algorithm".
            build: function that fills the arrays provided by the writer.
        """
        with contextlib.suppress(StorageError):
            if object_exists(self.files.file(DESCRIPTION)) and not object_exists(self.files.file(MANIFEST)):
                text = "%s: built anew and replaced, since no manifest names the data that they were built of; %s"
                way = "trust_cache='megatron' uses the arrays that Megatron left"
                logger.warning(text, self.files.file("*.npy"), way)
        writer = self.open_writer(self.files)
        build(writer)
        self.digests.update({name: stored.xxh3_64 for name, stored in writer.stored.items()})
        order = self.order() if self.order else None
        if writer.failure is None:
            try:
                self._publish(description, fingerprint, writer, order)
            except (OSError, NotImplementedError) as error:
                writer.failure = error
        if writer.failure is not None:
            logger.warning("%s: index not kept, every start builds it again: %s", self.files.directory, writer.failure)
        if order:
            record_order(self.files, fingerprint, self.origin.content(), order, self.context.warns, not writer.failure)
        return writer

    def _publish(
        self, description: str, fingerprint: Mapping[str, Any], writer: ArrayWriter, order: OrderKey | None
    ) -> None:
        self.files.write(DESCRIPTION, description.encode())
        manifest = Manifest(
            library=binidx.__version__,
            fingerprint=fingerprint,
            content={**self.origin.content(), **self.origin.facts()},
            data=self.origin.data(),
            order=order.fields if order else None,
            arrays=writer.stored,
        )
        self.files.write(MANIFEST, format_manifest(manifest))
        self.files.remove_staging_files()


def has_fingerprint(manifest: Manifest, fingerprint: Mapping[str, Any]) -> bool:
    """Return whether the arrays of a manifest were built with these options.

    Args:
        manifest: of a cached index.
        fingerprint: options, without "algorithm".
    """
    return not list_differences(manifest.fingerprint, {"algorithm": ALGORITHM, **fingerprint})
