"""Comparison of new bytes with an object that exists, for a job that runs again.

A killed job may have published some of its objects, even all. The same job then compares those with what it would
write: equal objects stay untouched; at the first difference the object belongs to another job, and the job stops.

Memory: 8 MiB. Cost: the object is read once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from binidx.errors import ObjectExistsError
from binidx.storage.interfaces import Bytes, Writer
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.publish import Hook, create_object

COMPARED_BYTES = 8 << 20
"""Bytes that are compared at once."""


class ComparingWriter:
    """Writer that compares the bytes with an existing object instead of writing them.

    Args:
        refusal: message of the error if the object differs.
        codec: "raw" to compare the stored bytes; None: plain bytes of a `.bin.zst`.
    """

    def __init__(self, location: Location, refusal: str, *, codec: str | None = None) -> None:
        name = location.uri.rsplit("/", 1)[-1]
        self._refusal = f"{refusal} ({name} differs from what this job writes, from byte {{:,}} on)"
        self._reader = open_object(location, mmap=False, cache=False, codec=codec)
        self._held, self._at = bytearray(), 0

    def write(self, data: Bytes, /) -> int:
        """Compare the next bytes, now or with later ones.

        Raises:
            ObjectExistsError: the object has other bytes.
        """
        self._held += data
        if len(self._held) >= COMPARED_BYTES:
            self._compare()
        return memoryview(data).nbytes

    def finish(self) -> None:
        """Compare the last bytes; raise ObjectExistsError if the object has other bytes, or more."""
        self._compare()
        if self._at != self._reader.size:
            raise ObjectExistsError(self._refusal.format(self._at))

    def _compare(self) -> None:
        stop = self._at + len(self._held)
        if stop > self._reader.size or self._held != self._reader.read([(self._at, stop)])[0]:
            raise ObjectExistsError(self._refusal.format(self._at))
        self._held, self._at = bytearray(), stop


@contextlib.contextmanager
def compare_object(
    location: Location, refusal: str, *, codec: str | None = None, before_publish: Hook = None
) -> Iterator[Writer]:
    """Do `create_object` for an object that exists: the written bytes are only compared with it.

    Args:
        refusal, codec: as in `ComparingWriter`.
        before_publish: called when all bytes were equal.

    Raises:
        ObjectExistsError: the object has other bytes.
    """
    writer = ComparingWriter(location, refusal, codec=codec)
    yield writer
    writer.finish()
    if before_publish is not None:
        before_publish()


def create_or_compare(location: Location, refusal: str, *, overwrite: bool) -> AbstractContextManager[Writer]:
    """Do `create_object`, or `compare_object` for an existing object unless `overwrite`.

    Args:
        refusal: message of the error if an existing object differs.

    Raises:
        ObjectExistsError: the object exists and has other bytes.
    """
    if overwrite or not object_exists(location):
        return create_object(location)
    return compare_object(location, refusal, codec="raw")
