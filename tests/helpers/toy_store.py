"""A provider in one module: objects in a dictionary, with versions and uploads in parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import ObjectInfo, Prices
from binidx.storage.stores.identity import check_unchanged

OBJECTS: dict[str, tuple[int, bytes]] = {}
"""URI -> version and content."""
UPLOADS: dict[str, dict[int, bytes]] = {}
VERSIONS = itertools.count(1)


class ToyStore:
    max_in_flight, max_gap = 4, 100
    min_part, max_part, max_parts, copied_part = 1, 1 << 20, 100, 1 << 20

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri

    def prices(self) -> Prices:
        return Prices("toy", dollars_per_read=0.001)

    def pins(self, info: ObjectInfo) -> bool:
        return True

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        if uri not in OBJECTS:
            raise FileNotFoundError(uri)
        version, data = OBJECTS[uri]
        info = ObjectInfo(uri, len(data), {"size": len(data), "version": str(version)})
        return info, data[-tail_bytes:] if tail_bytes else b""

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        check_unchanged(info, (await self.head(info.uri))[0])
        return OBJECTS[info.uri][1][slice(*where)]

    def get(self, uri: str, most_bytes: int) -> bytes:
        if uri not in OBJECTS:
            raise FileNotFoundError(uri)
        return OBJECTS[uri][1][: most_bytes + 1]

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        if if_absent and uri in OBJECTS:
            raise FileExistsError(uri)
        OBJECTS[uri] = next(VERSIONS), b"".join(data)
        return ""

    def delete(self, uri: str) -> None:
        OBJECTS.pop(uri, None)

    def upload(self, uri: str, token: str = "") -> ToyUpload:
        return ToyUpload(self, uri, token if token in UPLOADS else str(next(VERSIONS)))


class ToyUpload:
    def __init__(self, store: ToyStore, uri: str, token: str) -> None:
        self.store, self.uri, self.token, self.parts = store, uri, token, UPLOADS.setdefault(token, {})

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        return {part: (len(data), "tag") for part, data in self.parts.items()}

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        self.parts[part] = b"".join(data)
        return "tag"

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        return self.write(part, [memoryview(OBJECTS[source.uri][1])[slice(*where)]])

    def complete(self, tags: Mapping[int, str]) -> str:
        return self.store.put(self.uri, [memoryview(self.parts[part]) for part in sorted(tags)])

    def abort(self) -> None:
        UPLOADS.pop(self.token, None)
