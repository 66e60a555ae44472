"""Streams of bytes in one temporary file: each grows at its end, in extents, and is read back at any place.

    file      | a a a a | b b b b | a a . . | c c c . |      an extent after the other, as they are begun
    streams     a: 1, 3   b: 2   c: 4

The file has no name: when its process ends, however it ends, its room is free again.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, StorageError

EXTENT_BYTES = 4 << 20
"""What is not filled of the last one of a stream is a hole: it takes no room where files may have holes."""


class Scratch:
    """The streams 0, 1, ... of a shuffle.

    Args:
        directory: where the file is to be; None: the directory for temporary files.

    Attributes:
        sizes: bytes of each stream.

    Raises:
        ConfigError: there is no such directory, or nobody may write to it.
        StorageError: there is no room.
    """

    def __init__(self, directory: str | None, num_streams: int) -> None:
        self._directory = directory or tempfile.gettempdir()
        self.sizes = np.zeros(num_streams, np.int64)
        try:
            self._file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"scratch {self._directory}: {error.strerror}, needed a folder to write to") from error
        except OSError as error:
            raise self._error(error) from error
        self._extents: list[list[int]] = [[] for _ in range(num_streams)]
        self._end = 0

    def append(self, stream: int, data: NDArray[np.uint8]) -> None:
        """Bytes to the end of a stream."""
        size, done = int(self.sizes[stream]), 0
        while done < len(data):
            if size % EXTENT_BYTES == 0:
                self._extents[stream].append(self._end)
                self._end += EXTENT_BYTES
            offset = size % EXTENT_BYTES
            part = data[done : done + EXTENT_BYTES - offset]
            self._write(part, self._extents[stream][-1] + offset)
            size, done = size + len(part), done + len(part)
        self.sizes[stream] = size

    def read(self, stream: int, start: int, out: NDArray[np.uint8]) -> None:
        """Bytes [start, start + len(out)) of a stream."""
        done = 0
        while done < len(out):
            extent, offset = divmod(start + done, EXTENT_BYTES)
            part = out.data[done : done + EXTENT_BYTES - offset]
            count = os.preadv(self._file.fileno(), [part], self._extents[stream][extent] + offset)
            assert count, "a stream holds what was appended"
            done += count

    def close(self) -> None:
        """Give the room back."""
        self._file.close()

    def _write(self, data: NDArray[np.uint8], offset: int) -> None:
        rest = data.data
        try:
            while rest:
                count = os.pwrite(self._file.fileno(), rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> StorageError:
        held = int(self.sizes.sum())
        return StorageError(
            f"{self._directory}: {error.strerror}, with {held:,} bytes of a shuffle there; needed room for all that is "
            "shuffled; --scratch names another directory"
        )
