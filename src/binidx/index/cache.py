"""Index arrays as `.npy` files in a store, published so that a reader finds them whole and right, or not at all.

    {directory}/{hash}-GPTDataset-train-description.txt       what Megatron hashes; for people
    {directory}/{hash}-GPTDataset-train-document_index.npy    numpy.save's bytes; Megatron's names
    {directory}/{hash}-GPTDataset-train-binidx.json           last: our fingerprint, size and XXH3 of each file

Megatron's hash forgets the content of the data and two options; the fingerprint remembers them. An array is served only
under a marker with the fingerprint asked for and a checksum that its bytes meet, so racing builders, kills, lost power
and stale data cost a rebuild and never a wrong order. (So nothing is synced to the disk either.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from numpy.typing import NDArray

from binidx.index.building import Arrays, Build, Building
from binidx.index.npy import parse_npy
from binidx.storage.backends import Keep, open_object
from binidx.storage.publish import create_object, join_uri

ALGORITHM = 2
"""Grows when the same arguments would give other arrays, or the marker another form."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexCache:
    """The arrays of one index.

    Args:
        directory: URI; made where the store knows directories.
        name: first part of every file name, `{hash}-{class}-{split}`.
        storage_options: passed to fsspec.
    """

    directory: str
    name: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def load_or_build(
        self, description: str, fingerprint: Mapping[str, Any], names: Sequence[str], build: Build
    ) -> Arrays:
        """The cached arrays where they are whole and right, else the built ones, published while they are built.

        A store that cannot be written to, or is full, costs a warning in the log: the arrays are right without it.

        Memory: what `build` takes; see `index.building` for the arrays themselves. Loaded from a local disk, or built
        for one, they are page cache; from elsewhere they are anonymous memory.
        """
        wanted = {"algorithm": ALGORITHM, **fingerprint}
        return load_else_build(
            self._uri("binidx.json"),
            load=lambda: self.load(wanted, names),
            build=lambda: self.build(description, wanted, build),
        )

    def build(self, description: str, fingerprint: Mapping[str, Any], build: Build) -> Arrays:
        """Build the arrays into their files, then write the marker that makes them count."""
        building = Building(lambda name: self._uri(f"{name}.npy"), self.storage_options)
        build(building)
        failure = building.failure
        if failure is None:
            try:
                self._write("description.txt", description.encode())
                marker = {"fingerprint": fingerprint, "arrays": building.marks}
                self._write("binidx.json", json.dumps(marker, indent=1).encode())
            except (OSError, NotImplementedError) as error:
                failure = error
        if failure is not None:
            logger.warning("%s: index not cached, every start builds it again: %s", self.directory, failure)
        return building.arrays

    def load(self, fingerprint: Mapping[str, Any], names: Sequence[str]) -> Arrays | None:
        """The arrays, or None where there is no marker, another fingerprint, or an array that is not what it marks."""
        try:
            marker = json.loads(bytes(self._read("binidx.json")))
            differing = [key for key, value in fingerprint.items() if marker["fingerprint"].get(key) != value]
            if differing:
                logger.info("%s: stale (%s), rebuilding", self._uri("binidx.json"), ", ".join(differing))
                return None
            return {name: self._load_array(name, marker["arrays"][name]) for name in names}
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a broken file makes its readers raise, the answer is to build again
            logger.warning("%s: unusable, rebuilding: %s", self._uri("binidx.json"), error)
            return None

    def _uri(self, suffix: str) -> str:
        return join_uri(self.directory, f"{self.name}-{suffix}")

    def _read(self, suffix: str) -> memoryview[int]:
        cache: Keep = "disk" if suffix.endswith(".npy") else False
        reader = open_object(self._uri(suffix), storage_options=self.storage_options, cache=cache)
        return reader.read([(0, reader.size)])[0]

    def _write(self, suffix: str, data: bytes) -> None:
        with create_object(self._uri(suffix), self.storage_options, durable=False) as out:
            out.write(data)

    def _load_array(self, name: str, mark: Mapping[str, Any]) -> NDArray[Any]:
        content = self._read(f"{name}.npy")
        if len(content) != mark["bytes"] or xxhash.xxh3_64_hexdigest(content) != mark["xxh3_64"]:
            raise ValueError(f"{name}.npy is not the array that was marked")
        return parse_npy(content)


def load_else_build(uri: str, *, load: Callable[[], Arrays | None], build: Callable[[], Arrays]) -> Arrays:
    """What is published under the manifest's `uri`, else what `build` makes and publishes there."""
    found = load()
    return build() if found is None else found
