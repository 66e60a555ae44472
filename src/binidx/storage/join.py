"""Pieces of objects -> one object, moved by the store itself where it can; unseen until it is published.

    from and to       how                                      through this process
    s3 -> s3          parts copied by the store                pieces under 5 MiB, and what fills them up to that
    gs -> gs          compose, 32 whole objects a call         nothing; of pieces that are not whole: all
    disk -> disk      copy_file_range, reflinks where it can   nothing
    else              streamed                                 all

The two ends are one store if they have the same protocol and the same storage options. What is copied is pinned: the
object that was opened, by its ETag or generation, or an error.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from binidx.storage import filesystem
from binidx.storage.join_files import FileJoin
from binidx.storage.join_plan import Copied, Part, Piece, num_bytes, plan_parts
from binidx.storage.publish import create_object, delete_object
from binidx.storage.ranges import Bytes, cut
from binidx.storage.s3_parts import S3Parts
from binidx.storage.transfer import ROUND_BYTES

Options = Mapping[str, Any] | None

IN_FLIGHT = 16
"""Parts that the store copies at once; those that pass through this process have `join_plan.LEAST_PART` bytes."""

COMPOSED = 32
"""Objects in one compose, of Google's."""


class Join(Protocol):
    """An object made of pieces, on its way.

    Attributes:
        moved_bytes: what passed through this process.
        how: "server", "copy_file_range" or "stream".
    """

    moved_bytes: int
    how: str

    def fill(self, advance: Callable[[int], object]) -> None:
        """Bring all pieces together, unseen; `advance` is told of bytes done."""

    def publish(self, make_way: Callable[[], object]) -> None:
        """When all that can fail before has been done: call `make_way`, and make the object visible."""

    def abandon(self) -> None:
        """Leave nothing. Never raises; after `publish` it does nothing."""


def open_join(
    uri: str, pieces: Sequence[Piece], source_options: Options = None, target_options: Options = None
) -> Join:
    """A new object under `uri` that will be the pieces, one after the other.

    Args:
        pieces: their readers were opened with `source_options`.

    Raises:
        StorageError: the store refuses.
    """
    here = _store_of(uri)
    same = all(_store_of(piece.reader.uri) == here for piece in pieces if piece.reader is not None)
    with filesystem.storage_errors(uri):
        if here == "file" and same:
            return FileJoin(uri, pieces)
        if same and dict(source_options or {}) == dict(target_options or {}):
            if here == "s3" and any(isinstance(part, Copied) for part in plan_parts(pieces)):
                return _S3Join(uri, pieces, target_options)
            if here == "gs" and _composable(uri, pieces):
                return _GcsJoin(uri, pieces, target_options)
        return _Streamed(uri, pieces, target_options)


class _S3Join:
    """A multipart upload whose parts the store copies."""

    how = "server"

    def __init__(self, uri: str, pieces: Sequence[Piece], options: Options) -> None:
        self._plan, self.moved_bytes = plan_parts(pieces), 0
        self._parts: S3Parts | None = S3Parts(uri, "", options or {})
        self._tags: dict[int, str] = {}

    def fill(self, advance: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            jobs = iter(enumerate(self._plan, 1))
            pending: dict[Future[str], tuple[int, Part]] = {}
            try:
                while True:
                    while len(pending) < IN_FLIGHT and (job := next(jobs, None)):
                        pending[threads.submit(self._bring, *job)] = job
                    if not pending:
                        return
                    for done in wait(pending, return_when=FIRST_COMPLETED).done:
                        number, part = pending.pop(done)
                        self._tags[number] = done.result()
                        advance(num_bytes(part))
            finally:
                for each in pending:
                    each.cancel()

    def publish(self, make_way: Callable[[], object]) -> None:
        assert self._parts is not None
        make_way()
        self._parts.publish(self._tags)
        self._parts = None

    def abandon(self) -> None:
        if self._parts is not None:
            self._parts.abandon()
        self._parts = None

    def _bring(self, number: int, part: Part) -> str:
        assert self._parts is not None
        if isinstance(part, Copied):
            reader, where = part.reader, (part.start, part.stop)
            etag = str(getattr(reader, "identity", {}).get("etag", ""))
            return self._parts.copy(number, reader.uri, None if part.whole else where, etag)
        data = b"".join(bytes(view) for piece in part.pieces for view in read_piece(piece))
        self.moved_bytes += len(data)
        return self._parts.write(number, (0, len(data)), data)


class _GcsJoin:
    """Compose, in rounds while there are more than 32; what lies under temporary names goes."""

    how = "server"

    def __init__(self, uri: str, pieces: Sequence[Piece], options: Options) -> None:
        self._uri, self._pieces, self._options = uri, pieces, options
        self._fs, path = filesystem.open_filesystem(uri, options or {})
        self._bucket, self._key, _ = self._fs.split_path(path)
        self._temporary: list[str] = []
        self._composed: list[dict[str, Any]] = []
        self.moved_bytes = 0

    def fill(self, advance: Callable[[int], object]) -> None:
        objects = [self._object(piece) for piece in self._pieces]
        while len(objects) > COMPOSED:
            groups = [objects[start : start + COMPOSED] for start in range(0, len(objects), COMPOSED)]
            objects = [self._compose(f"{self._key}.{uuid.uuid4().hex}.tmp", group) for group in groups]
        self._composed = objects
        advance(sum(map(num_bytes, self._pieces)))

    def publish(self, make_way: Callable[[], object]) -> None:
        make_way()
        self._compose(self._key, self._composed)
        self.abandon()

    def abandon(self) -> None:
        for key in self._temporary:
            with contextlib.suppress(Exception):
                delete_object(f"gs://{self._bucket}/{key}", self._options)
        self._temporary = []

    def _object(self, piece: Piece) -> dict[str, Any]:
        assert piece.reader is not None
        _, path = filesystem.open_filesystem(piece.reader.uri, self._options or {})
        generation = getattr(piece.reader, "identity", {}).get("generation")
        return {"name": self._fs.split_path(path)[1], **({"generation": str(generation)} if generation else {})}

    def _compose(self, key: str, objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if key != self._key:
            self._temporary.append(key)
        body = {"sourceObjects": list(objects), "destination": {"contentType": "application/octet-stream"}}
        with filesystem.storage_errors(self._uri):
            made = self._fs.call("POST", "b/{}/o/{}/compose", self._bucket, key, json=body, json_out=True)
        self._fs.invalidate_cache()
        return {"name": key, "generation": str(made["generation"])}


class _Streamed:
    """All of it through this process."""

    how = "stream"

    def __init__(self, uri: str, pieces: Sequence[Piece], options: Options) -> None:
        self._pieces, self.moved_bytes = pieces, 0
        self._make_way: Callable[[], object] = lambda: None
        self._open = contextlib.ExitStack()
        self._writer = self._open.enter_context(create_object(uri, options, before_publish=lambda: self._make_way()))

    def fill(self, advance: Callable[[int], object]) -> None:
        for piece in self._pieces:
            for view in read_piece(piece):
                self._writer.write(view)
                self.moved_bytes += len(view)
                advance(len(view))

    def publish(self, make_way: Callable[[], object]) -> None:
        self._make_way = make_way
        self._open.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception), self._open:
            raise _Abandoned


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""


def read_piece(piece: Piece) -> Iterator[Bytes]:
    """Its bytes, in views of up to 8 MiB."""
    if piece.reader is None:
        yield piece.data
        return
    for around in cut((piece.start, piece.stop), ROUND_BYTES):
        yield from piece.reader.read(cut(around, 8 << 20))


def _store_of(uri: str) -> str:
    """What two places must have in common; "" for what is no store of which we know more."""
    if filesystem.local_path(uri) is not None:
        return "file"
    protocol, *chained = filesystem.protocols(uri)
    return "" if chained else {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}.get(protocol, "")


def _composable(uri: str, pieces: Sequence[Piece]) -> bool:
    """Whether these are whole objects of one bucket: ranges cannot be composed, nor what lies elsewhere."""
    buckets = {each.reader.uri.split("/")[2] for each in pieces if each.reader is not None} | {uri.split("/")[2]}
    return len(buckets) == 1 and bool(pieces) and all(piece.whole for piece in pieces)
