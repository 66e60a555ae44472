"""Index arrays as `.npy` files in a store, published so that a reader finds them whole and right, or not at all.

    {directory}/{hash}-GPTDataset-train-description.txt       what Megatron hashes; for people
    {directory}/{hash}-GPTDataset-train-document_index.npy    numpy.save's bytes; Megatron's names
    {directory}/{hash}-GPTDataset-train-binidx.json           last: our fingerprint, size and CRC-32 of each file

Megatron's hash forgets the content of the data and two options; the fingerprint remembers them. An array is served only
under a marker with the fingerprint asked for and a checksum that its bytes meet, so racing builders, kills and stale
data cost a rebuild and never a wrong order.
"""

from __future__ import annotations

import io
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.storage.backends import open_object
from binidx.storage.publish import Writer, create_object, join_uri

ALGORITHM = 1
"""Grows when the same arguments would give other arrays."""

Arrays = dict[str, NDArray[Any]]

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
        self,
        description: str,
        fingerprint: Mapping[str, Any],
        names: Sequence[str],
        build: Callable[[], Arrays],
    ) -> Arrays:
        """The cached arrays where they are whole and right, else the built ones, which are then published.

        A store that cannot be written to costs a warning in the log: the arrays are right without it.
        """
        wanted = {"algorithm": ALGORITHM, **fingerprint}
        arrays = self.load(wanted, names)
        if arrays is None:
            arrays = build()
            try:
                self.publish(description, wanted, arrays)
            except (OSError, NotImplementedError) as error:
                logger.warning("%s: index not cached, every start builds it again: %s", self.directory, error)
        return arrays

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

    def publish(self, description: str, fingerprint: Mapping[str, Any], arrays: Arrays) -> None:
        """Write the arrays, then the marker that makes them count."""
        self._write("description.txt", description.encode())
        marks = {}
        for name, array in arrays.items():
            with create_object(self._uri(f"{name}.npy"), self.storage_options) as out:
                counted = Counted(out)
                np.lib.format.write_array(counted, array, allow_pickle=False)
            marks[name] = {"bytes": counted.bytes, "crc32": counted.crc32}
        self._write("binidx.json", json.dumps({"fingerprint": fingerprint, "arrays": marks}, indent=1).encode())

    def _uri(self, suffix: str) -> str:
        return join_uri(self.directory, f"{self.name}-{suffix}")

    def _read(self, suffix: str) -> memoryview[int]:
        reader = open_object(self._uri(suffix), storage_options=self.storage_options, cache=False)
        return reader.read([(0, reader.size)])[0]

    def _write(self, suffix: str, data: bytes) -> None:
        with create_object(self._uri(suffix), self.storage_options) as out:
            out.write(data)

    def _load_array(self, name: str, mark: Mapping[str, int]) -> NDArray[Any]:
        content = self._read(f"{name}.npy")
        if len(content) != mark["bytes"] or zlib.crc32(content) != mark["crc32"]:
            raise ValueError(f"{name}.npy is not the array that was marked")
        return parse_npy(content)


class Counted:
    """A writer that counts and sums what passes: the header too, since one bit of it turns the array's bytes round."""

    def __init__(self, out: Writer) -> None:
        self.out, self.bytes, self.crc32 = out, 0, 0

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.out.write(data)


def parse_npy(buffer: memoryview[int]) -> NDArray[Any]:
    """The array in the bytes of a `.npy` file, without a copy. Raises ValueError where they are none."""
    header = io.BytesIO(bytes(buffer[:4096]))
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran_order, dtype = read_header[np.lib.format.read_magic(header)](header)
    if fortran_order:
        raise ValueError("a .npy in Fortran order, which we never write")
    return np.frombuffer(buffer, dtype, offset=header.tell()).reshape(shape)
