"""Which reader a URI gets."""

from __future__ import annotations

import fsspec

from binidx.storage.cache.memory import STORE, ChunkCache
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject


def test_only_objects_that_stay_in_the_cache_are_cached_unless_asked() -> None:
    for name, size in (("small", STORE.largest), ("large", STORE.largest + 1)):
        with fsspec.open(f"memory://kept/{name}", "wb") as out:
            out.write(bytes(size))
    assert isinstance(open_object("memory://kept/small"), ChunkCache)
    assert isinstance(open_object("memory://kept/large"), RemoteObject)
    assert isinstance(open_object("memory://kept/large", cache=True), ChunkCache)
    fsspec.filesystem("memory").rm("/kept", recursive=True)
