"""Pieces of files -> one file beside its target, copied by the kernel; file systems with reflinks copy nothing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence

from binidx.errors import ObjectChangedError
from binidx.storage import filesystem
from binidx.storage.join_plan import Piece
from binidx.storage.unfinished import File


class FileJoin:
    """A file beside the target, filled by the kernel: a `join.Join`."""

    how = "copy_file_range"

    def __init__(self, uri: str, pieces: Sequence[Piece]) -> None:
        self._pieces, self.moved_bytes = pieces, 0
        path = filesystem.local_path(uri)
        assert path is not None
        self._file: File | None = File(path)

    def fill(self, advance: Callable[[int], object]) -> None:
        assert self._file is not None
        with filesystem.storage_errors(self._file.path):
            for piece in self._pieces:
                if piece.reader is None:
                    self._file.file.write(piece.data)
                    self.moved_bytes += len(piece.data)
                    advance(len(piece.data))
                else:
                    self._copy(piece, advance)
            self._file.complete()

    def publish(self, make_way: Callable[[], object]) -> None:
        make_way()
        assert self._file is not None
        self._file.publish()
        self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.abandon()
        self._file = None

    def _copy(self, piece: Piece, advance: Callable[[int], object]) -> None:
        assert piece.reader is not None
        assert self._file is not None
        path = filesystem.local_path(piece.reader.uri)
        with open(str(path), "rb", buffering=0) as source:
            at, copy = piece.start, copy_in_kernel
            while at < piece.stop:
                want = min(piece.stop - at, 1 << 30)
                copied = copy(source.fileno(), self._file.file.fileno(), want, at)
                if copied < 0:
                    copy, self.how = copy_through, "stream"
                    continue
                if not copied:
                    raise ObjectChangedError(f"{path}: ends at byte {at}, needed {piece.stop}; it changed meanwhile")
                self.moved_bytes += copied if copy is copy_through else 0
                at += copied
                advance(copied)


def copy_in_kernel(source: int, target: int, count: int, offset: int) -> int:
    """Bytes copied from `offset` to the target's position; 0 at the end, -1 where the kernel cannot."""
    if not hasattr(os, "copy_file_range"):
        return -1
    try:
        return os.copy_file_range(source, target, count, offset_src=offset)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


def copy_through(source: int, target: int, count: int, offset: int) -> int:
    """The same, through this process."""
    view = memoryview(os.pread(source, min(count, 8 << 20), offset))
    total = len(view)
    while view:
        view = view[os.write(target, view) :]
    return total
