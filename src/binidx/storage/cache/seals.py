"""Seals: notes on this node that a file was checked whole, so that its other processes do not check it again.

    {index_dir}/seals/{NODE}-{key}    key: digest of the file's path and version (inode, ctime, size) and of the check
                                      content: the result of the check

A file that is written to, replaced or restored has another inode or ctime, and after a restart of the machine, which
may lose pages that were never synced, NODE is another: its seals no longer apply. (Of a block of a disk cache the mtime
counts, since its ctime changes when it is marked as used.) What a seal says was true of these very bytes; bits that
flip on the disk later are found as late as those of any mapped file.

Without seals each process of a node hashes every array of an index, and checks every length of the `.idx`: 0.6 s of
CPU for 10^8 documents, times 8 ranks, at every start.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.interfaces import RangeReader, SealableReader
from binidx.storage.location import Location
from binidx.storage.ranges import as_capability
from binidx.storage.stores.local import node_id, staging_path

KEPT_SECONDS = 86_400.0
"""Age at which the seals of other nodes, or of earlier starts of this one, are removed."""

LARGEST_SEAL_BYTES = 1000
"""Bytes of the result of a check, at most."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Note on one check of one version of a file.

    Args:
        path: path of the note; None: this version of the file cannot be sealed.
    """

    path: str | None = None

    def read(self) -> str | None:
        """Return the result of the check; None if no process of this node has noted it."""
        if self.path is None:
            return None
        with contextlib.suppress(OSError, ValueError), open(self.path, encoding="ascii") as file:
            return file.read(LARGEST_SEAL_BYTES) or None
        return None

    def read_count(self) -> int | None:
        """Return the number that a check found; None if no process of this node has noted a number."""
        text = self.read() or ""
        return int(text) if text.isdecimal() else None

    def recall(self, check: Callable[[], str]) -> str:
        """Return the result of the check, made now and noted if no process of this node has noted it."""
        if (result := self.read()) is None:
            self.write(result := check())
        return result

    def write(self, result: str) -> None:
        """Note the result of the check; a failure costs the others a check of their own."""
        if self.path is None:
            return
        directory, staged = os.path.dirname(self.path), staging_path(self.path)
        with contextlib.suppress(OSError):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with open(staged, "x", encoding="ascii") as file:
                file.write(result)
            os.replace(staged, self.path)
            _remove_old(directory, os.getpid(), int(os.stat(self.path).st_mtime // KEPT_SECONDS - 1) * KEPT_SECONDS)


def find_seal(reader: RangeReader | None, location: Location, check: str) -> Seal:
    """Return the seal of a check of the file that a reader maps.

    Args:
        reader: of the whole file; None: its bytes are in memory.
        location: of the file.
        check: name of the check; another result has another name.
    """
    sealable = reader and as_capability(reader, SealableReader)
    version = sealable.version_key() if sealable else None
    directory = directory_of_index(location.settings) if version else None
    return make_seal(directory, version, check) if directory else Seal()


def make_seal(directory: str, version: str | None, check: str) -> Seal:
    """Return the seal of a check of a version of a file.

    Args:
        directory: of index files, or of a cache.
        version: see `SealableReader.version_key`.
        check: name of the check.
    """
    if version is None:
        return Seal()
    key = xxhash.xxh3_128_hexdigest(f"{check} {version}".encode())
    return Seal(os.path.join(directory, "seals", f"{node_id()}-{key}"))


@functools.lru_cache(16)
def _remove_old(directory: str, _pid: int, before: float) -> None:
    """Remove the seals of earlier starts of this machine, which nothing reads any more; once a day and process."""
    for entry in os.scandir(directory):
        if not entry.name.startswith(f"{node_id()}-") and entry.stat().st_mtime < before:
            os.unlink(entry.path)
