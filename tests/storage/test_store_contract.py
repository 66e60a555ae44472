"""The contract of stores accepts a store of every protocol, and refuses one that breaks a promise."""

from __future__ import annotations

import fnmatch
import io
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.toy_store import OBJECTS, ToyStore, ToyUpload

from binidx.storage.store_protocols import ListRequest, ObjectInfo, Store
from binidx.testing import check_object_store


class Stream(io.BytesIO):
    """Stream into a toy store; `lies` are promises that it breaks."""

    def __init__(self, store: LyingStore, uri: str) -> None:
        super().__init__()
        self.store, self.uri = store, uri

    def close(self) -> None:
        if not self.closed and self.store.lie == "invisible until commit":
            self.commit()

    def commit(self) -> None:
        data = self.getvalue()
        self.store.put(self.uri, [memoryview(data[:-1] if self.store.lie == "stream" else data)])

    def discard(self) -> None:
        if self.store.lie == "discard":
            self.commit()


class KeptParts(ToyUpload):
    """Upload that keeps the caller's buffers, and so all parts in memory, until it ends."""

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        self.parts[part] = data[0]  # type: ignore[assignment]
        return "tag"


class LyingStore(ToyStore):
    """Store that meets every protocol, but for one promise."""

    hides_uploads, max_composed = True, 32

    def __init__(self, lie: str = "") -> None:
        super().__init__("")
        self.lie = lie

    def delete(self, uri: str) -> None:
        if self.lie == "delete":
            del OBJECTS[uri]
        super().delete(uri)

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        if self.lie == "find":
            return []
        if self.lie == "pattern":
            pattern, uri = False, uri.rpartition("/")[0]
        return [name for name in OBJECTS if fnmatch.fnmatchcase(name, uri if pattern else f"{uri}/*")]

    def open_stream(self, uri: str) -> Any:
        if self.lie == "open_stream":
            raise NotImplementedError
        return Stream(self, uri)

    def move(self, source: str, target: str) -> None:
        if self.lie == "move":
            raise NotImplementedError
        OBJECTS[target] = OBJECTS[source] if self.lie == "move copies" else OBJECTS.pop(source)

    def upload(self, uri: str, token: str = "") -> ToyUpload:
        upload = super().upload(uri, token)
        return KeptParts(self, uri, upload.token) if self.lie == "parts sent" else upload

    def compose(self, uri: str, sources: Sequence[ObjectInfo]) -> ObjectInfo:
        parts = [OBJECTS[source.uri][1] for source in sources]
        self.put(uri, [memoryview(part) for part in (parts[:1] if self.lie == "compose" else parts)])
        return ObjectInfo(uri, sum(map(len, parts)), {"size": 0})

    def split(self, uri: str) -> tuple[str, str]:
        bucket, _, key = uri.removeprefix("toy://").partition("/")
        return bucket, key

    async def list_page(self, request: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        if self.lie == "empty page":
            return {}, "next"
        prefix = request.prefix if self.lie != "prefix" else request.prefix[:-1].removesuffix("-non")
        keys = [self.split(uri)[1] for uri in OBJECTS if self.split(uri)[0] == request.bucket]
        infos = {key: (await self.head(f"toy://{request.bucket}/{key}"))[0] for key in keys if key.startswith(prefix)}
        return infos, ""


def check(store: Store) -> None:
    folder = f"toy://{uuid.uuid4().hex}"

    def make(name: str, data: bytes) -> tuple[Store, str]:
        store.put(f"{folder}/{name}", [memoryview(data)])  # type: ignore[attr-defined]
        return store, f"{folder}/{name}"

    check_object_store(make)


def test_a_store_of_every_protocol_keeps_the_contract() -> None:
    check(LyingStore())


LIES = [
    *("delete", "find", "pattern", "open_stream", "stream", "invisible until commit", "discard"),
    *("move", "move copies", "parts sent", "compose", "empty page", "prefix"),
]


@pytest.mark.parametrize("lie", LIES)
def test_the_contract_refuses_a_store_that_breaks_a_promise(lie: str) -> None:
    with pytest.raises((AssertionError, NotImplementedError)):
        check(LyingStore(lie))
