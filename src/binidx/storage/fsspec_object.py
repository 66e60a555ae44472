"""An object of any fsspec filesystem, read by few concurrent range requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from binidx.storage import filesystem
from binidx.storage.pinned import Opened, fetch_pinned, smells_of_change
from binidx.storage.ranges import Range, assemble, check_ranges, coalesce
from binidx.storage.stats import ObjectStats

# A request of s3fs costs 0.6 ms of CPU; a connection carries 64 KiB in that time. Up to there a gap is cheaper.
MAX_GAP = 64 << 10
# At 25 ms to the first byte and 100 MB/s a connection is 77 % busy with 8 MiB parts, 29 % with 1 MiB.
MAX_REQUEST = 8 << 20


class FsspecObject:
    """An object of any fsspec filesystem: one read is a few coalesced requests, sent at once.

    Args:
        uri: with a protocol; chains such as simplecache::s3://bucket/key work.
        storage_options: fsspec's own.

    Raises:
        MissingDriverError, ObjectNotFoundError, StorageError: see `filesystem.open_filesystem` and `object_info`.
        ShortReadError: on read, an answer is not as long as its range: s3fs and gcsfs hand on a 206 that is too short
            and a 200 with the whole object without a word.
        ObjectChangedError: on read, the object is not the one that was opened, as far as the store can tell: `pinned`.

    The size and `identity` (ETag, generation or time) are those at opening, also in a pickle. Clients are made on first
    use in each process and thread, so one made before a fork is never used after it: an inherited boto3 client returned
    wrong bytes without an error. Pickles without its clients, and needs no request when it is unpickled.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri
        self.storage_options = dict(storage_options or {})
        self.stats = ObjectStats(filesystem.protocols(uri)[-1])
        # (process, thread) -> filesystem and path. fsspec hands threads the same instance where its class allows that.
        self._clients: dict[tuple[int, int], tuple[Any, str]] = {}
        info = filesystem.object_info(*self._client(), uri)
        self.size = int(info["size"])
        self.identity = filesystem.identity_of(info)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        requests = coalesce(ranges, max_gap=MAX_GAP, max_request=MAX_REQUEST)
        began = time.perf_counter()
        answers = self._fetch(requests) if requests else []
        self.stats.add(
            requests=len(requests),
            bytes_asked=sum(stop - start for start, stop in ranges),
            bytes_moved=sum(map(len, answers)),
            seconds=time.perf_counter() - began,
        )
        return assemble(ranges, requests, answers)

    def _fetch(self, requests: Sequence[Range]) -> list[bytes]:
        fs, path = self._client()
        opened = Opened(self.uri, path, self.identity)
        try:
            with filesystem.storage_errors(self.uri):
                answers = fetch_pinned(fs, opened, requests)
                self._check_answers(requests, answers)
        except StorageError as error:
            if smells_of_change(error):
                self._look_again(opened, error)
            raise
        return answers

    def _look_again(self, opened: Opened, error: StorageError) -> None:
        """ObjectChangedError or ObjectNotFoundError if that is what made a read fail."""
        fs, path = self._client()
        try:
            opened.check(filesystem.identity_of(filesystem.object_info(fs, path, self.uri)))
        except (ObjectChangedError, ObjectNotFoundError) as found:
            raise found from error
        except StorageError:
            return  # the first error says more

    def _check_answers(self, requests: Sequence[Range], answers: Sequence[Any]) -> None:
        if len(answers) != len(requests):
            raise ShortReadError(f"{self.uri}: {len(answers)} answers to {len(requests)} requests")
        for (start, stop), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                raise filesystem.translated(self.uri, answer) from answer
            if len(answer) != stop - start:
                raise ShortReadError(
                    f"{self.uri}: {len(answer)} bytes for range {start}-{stop}, needed {stop - start}; "
                    f"the store or a proxy before it does not honour ranges"
                )

    def _client(self) -> tuple[Any, str]:
        key = os.getpid(), threading.get_ident()
        if key not in self._clients:
            self._clients[key] = filesystem.open_filesystem(self.uri, self.storage_options)
        return self._clients[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "stats": ObjectStats(self.stats.store)}

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"FsspecObject({self.uri!r})"
