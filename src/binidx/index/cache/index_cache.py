"""Index arrays in a store: loaded where they are whole and right, else built and published.

    {directory}/{hash}-GPTDataset-train-description.txt       what Megatron hashes; for people
    {directory}/{hash}-GPTDataset-train-document_index.npy    numpy.save's bytes; Megatron's names
    {directory}/{hash}-GPTDataset-train-binidx.json           last: the `manifest`
    {directory}/{key}-binidx-orders.json                      which indices are of the same data: `reuse`

Megatron's hash forgets the content of the data and two options; the manifest remembers them. An array is served only
under a manifest with what was asked for and a checksum that its bytes meet, so racing builders, kills, lost power and
stale data cost a rebuild and never a wrong order. (So nothing is synced to the disk either.)
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from binidx.errors import BinidxError, FormatError, StorageError
from binidx.index.cache.array_reuse import OrderKey, copy_twin, remember
from binidx.index.cache.build_context import BUILT, FOUND, TAKEN_OVER, BuildContext, Outcome
from binidx.index.cache.build_lock import Built, Tell, load_else_build
from binidx.index.cache.building import Arrays, Build, Building
from binidx.index.cache.index_files import DESCRIPTION, MANIFEST, IndexFiles
from binidx.index.cache.manifest import (
    ALGORITHM,
    NO_DATA,
    Manifest,
    Origin,
    StoredArray,
    differences,
    library_version,
    mismatches,
)
from binidx.index.cache.megatron_cache import Check, load_foreign, tell_of_foreign
from binidx.storage.threads import OPENS

TOLD_BYTES = 16 << 20
"""Of an array: a smaller one comes sooner than a claim is looked at again."""

logger = logging.getLogger(__name__)
Access = Literal["load", "ranges"]
"""How cached arrays are read: "load" reads or maps all of them and compares their checksums; "ranges" gives
`RangedArray`s where a manifest proves that the arrays belong to it, and loads or builds them elsewhere."""

UNPROVEN = (FormatError, StorageError, ValueError, KeyError, TypeError)


class StaleError(Exception):
    """An index of something else."""


@dataclass(frozen=True)
class IndexCache:
    """The arrays of one index.

    Args:
        directory: URI; made where the store knows directories.
        name: first part of every file name, `{hash}-{class}-{split}`.
        storage_options: passed to fsspec.
        origin: the data it is of.
        order: tells what decides its arrays besides data and options, where other indices may hold the same.
        trusted: lets in what has no manifest, as Megatron leaves it, after this check; None: nothing of the kind.
        context: options of the build that asks.
    """

    directory: str
    name: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    origin: Origin = NO_DATA
    order: Callable[[], OrderKey] | None = None
    trusted: Check | None = None
    context: BuildContext = field(default=BuildContext(), repr=False, compare=False)

    def load_or_build(
        self,
        description: str,
        fingerprint: Mapping[str, Any],
        names: Sequence[str],
        build: Build,
        access: Access = "load",
    ) -> Arrays:
        """The cached arrays where they are whole and right, else the built ones, published while they are built.

        Of all processes that ask now one builds: `turn`. A store that cannot be written to, or is full, costs a warning
        in the log: the arrays are right without it.

        Memory: what `build` takes; see `index.building` for the arrays themselves. Loaded from a local disk, or built
        for one, they are page cache; from elsewhere they are anonymous memory.

        Raises:
            FormatError: what was to be trusted is no index of this dataset.
            PeerError: another process of the run was to build it, and failed.
        """
        wanted, how, began = {"algorithm": ALGORITHM, **fingerprint}, FOUND, time.monotonic()
        said: set[str] = set()
        if access == "ranges" and (found := self.open_ranges(names, lambda each: has_fingerprint(each, fingerprint))):
            return found

        def make(say: Tell) -> Built:
            nonlocal how
            how, reused = TAKEN_OVER, self.reuse(description, wanted, names)
            if reused is not None:
                return reused, True
            how, built = BUILT, self.build(description, wanted, build, partial(announce, say))
            return built.arrays, built.failure is None

        arrays = load_else_build(
            self.files.uri(MANIFEST),
            load=lambda: self.load(wanted, names, said),
            build=make,
            storage_options=self.storage_options,
            ahead=FetchDone(self.files, names),
            checks=self.context.checks,
        )
        self.context.report(Outcome(self.files, how, time.monotonic() - began))
        return arrays

    @property
    def files(self) -> IndexFiles:
        return IndexFiles(self.directory, self.name, self.storage_options)

    def open_ranges(self, names: Sequence[str], is_wanted: Callable[[Manifest], bool]) -> Arrays | None:
        """The arrays, to be read by ranges; None where nothing proves that they belong to a manifest that is wanted.

        Args:
            is_wanted: checks the options and the data of a manifest; may raise what `IndexFiles.open_arrays` raises.
        """
        try:
            opened: Any = self.files.open_arrays(names)
            return opened[1] if opened and is_wanted(opened[0]) else None
        except UNPROVEN as error:
            logger.info("%s: not read by ranges: %s", self.files.uri(MANIFEST), error)
            return None

    def load(self, fingerprint: Mapping[str, Any], names: Sequence[str], said: set[str] | None = None) -> Arrays | None:
        """The arrays; None, and why in the log, where there is no manifest, another one, or not what it speaks of.

        Args:
            said: what the log has been told, by who looks more than once.
        """
        uri = self.files.uri(MANIFEST)
        try:
            prefetched = self.context.prefetch.take(self.files) if self.context.prefetch else None
            manifest, arrays = prefetched or (self.files.read_manifest(), None)
            if manifest is not None:
                return self._load(manifest, fingerprint, names, arrays)
        except StaleError as error:
            _warn(f"{uri}: stale, rebuilding: {error}", said)
            return None
        except (FormatError, StorageError, KeyError) as error:
            _warn(f"{uri}: unusable, rebuilding: {error}", said)
            return None
        return load_foreign(self.files, names, self.trusted) if self.trusted else None

    def _load(
        self, manifest: Manifest, fingerprint: Mapping[str, Any], names: Sequence[str], arrays: Arrays | None
    ) -> Arrays:
        if wrong := mismatches(manifest, fingerprint, self.origin):
            raise StaleError("; ".join(wrong))
        arrays = arrays or self.files.read_arrays({name: manifest.arrays[name] for name in names})
        tokens = self.origin.data().get("bin")
        if tokens != manifest.data.get("bin"):
            # What no array depends on: the same documents in other words, or only copied.
            was = manifest.data.get("bin")
            logger.info("%s: the .bin is %s, was %s; the order is the same", self.files.uri(MANIFEST), tokens, was)
        return arrays

    def reuse(self, description: str, fingerprint: Mapping[str, Any], names: Sequence[str]) -> Arrays | None:
        """The arrays of an index of the same order, copied by the store under this name; None where there is none."""
        tell_of_foreign(self.files)
        if self.order is None:
            return None
        copied = copy_twin(self.files, description, fingerprint, self.origin, self.order(), names)
        return self.load(fingerprint, names) if copied else None

    def build(
        self,
        description: str,
        fingerprint: Mapping[str, Any],
        build: Build,
        tell: Callable[[Mapping[str, StoredArray]], None] = lambda stored: None,
    ) -> Building:
        """Build the arrays into their files, then write the manifest that makes them count."""
        building = Building(self.files.array_uri, self.storage_options, tell)
        build(building)
        if building.failure is None:
            try:
                self._publish(description, fingerprint, building)
            except (OSError, NotImplementedError) as error:
                building.failure = error
        if building.failure is not None:
            logger.warning("%s: index not cached, every start builds it again: %s", self.directory, building.failure)
        return building

    def _publish(self, description: str, fingerprint: Mapping[str, Any], building: Building) -> None:
        order = self.order() if self.order else None
        self.files.write(DESCRIPTION, description.encode())
        self.files.publish_manifest(
            Manifest(
                library=library_version(),
                fingerprint=fingerprint,
                content={**self.origin.content(), **self.origin.facts()},
                data=self.origin.data(),
                order=order.fields if order else None,
                arrays=building.stored,
            )
        )
        if order:
            remember(self.files, fingerprint, self.origin, order)
        self.files.remove_leftovers()


def has_fingerprint(manifest: Manifest, fingerprint: Mapping[str, Any]) -> bool:
    """Whether the arrays of a manifest were built with these options."""
    return not differences(manifest.fingerprint, {"algorithm": ALGORITHM, **fingerprint})


def _warn(text: str, said: set[str] | None) -> None:
    if said is None or text not in said:
        logger.warning("%s", text)
    if said is not None:
        said.add(text)


def announce(tell: Tell, stored: Mapping[str, StoredArray]) -> None:
    """Tell the waiting nodes of the large arrays that are published so far, by the identities of their objects."""
    done = {name: asdict(each) for name, each in stored.items() if each.identity and each.bytes >= TOLD_BYTES}
    if done:
        tell(done)


class FetchDone:
    """Fetch finished arrays, each once, while another node builds the next one.

    Only work is saved: an array lies in the directory of the node under the identity that the store gave it, and is
    used if the manifest names that very object. A failed fetch is repeated when the index is loaded.
    """

    def __init__(self, files: IndexFiles, names: Sequence[str]) -> None:
        self._files, self._waiting = files, {*names}

    def __call__(self, done: Mapping[str, Any]) -> None:
        # A claim may have been written by anybody.
        for name in self._waiting.intersection(done if isinstance(done, Mapping) else ()):
            self._waiting.discard(name)
            OPENS.submit(partial(_bring, self._files, name, done[name]))


def _bring(files: IndexFiles, name: str, fields: Any) -> None:
    with contextlib.suppress(BinidxError, TypeError, ValueError, KeyError, AttributeError):
        files.bring(name, StoredArray(**fields))

