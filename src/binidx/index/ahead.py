"""The cached indices of a large dataset, fetched while its `.idx` comes down; and a proof that the `.idx` is sound.

    .idx        ████████████████████████████████████     known by its size: LARGE_BYTES
    manifests   █ of this very .idx?
    arrays       ██████████████████ compared
                                                    parsed, with no pass over it

What an index is cached under is told by the config alone, so it need not wait for the `.idx`. A manifest names the
object that its index was built of, by ETag or generation, and nobody builds an index of an `.idx` that he did not check
in full: where the store still has that very object, its lengths, pointers and bounds are not checked again. Who could
forge a manifest could as well forge the arrays, which are believed by it too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from binidx.errors import FormatError, StorageError
from binidx.format.ahead import current_ahead
from binidx.index.files import MANIFEST, IndexFiles
from binidx.index.manifest import Manifest
from binidx.storage import filesystem
from binidx.storage.filesystem import same_object
from binidx.storage.threads import Threads

logger = logging.getLogger(__name__)

LARGE_BYTES = 16 << 20
"""Of an `.idx`: what is smaller comes within some round trips, and may have no index in a cache."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Fetched:
    """An index as it is cached: its manifest, and its arrays once they were compared; None: not all of them."""

    manifest: Manifest
    arrays: Future[Arrays | None]


class IndexAhead:
    """The `Ahead` of a dataset.

    Args:
        wanted: tells in which files its indices lie, if they are cached.
    """

    def __init__(self, wanted: Callable[[], Sequence[IndexFiles]]) -> None:
        self._wanted = wanted
        self._pending: dict[str, Future[Fetched | None]] = {}

    def begin(self, identity: Mapping[str, Any]) -> None:
        if identity.get("size", 0) < LARGE_BYTES:
            return
        remote = [files for files in self._wanted() if filesystem.local_path(files.directory) is None]
        self._pending = {files.uri(MANIFEST): _submit(partial(fetch, files, identity)) for files in remote}

    def vouches(self, identity: Mapping[str, Any]) -> bool:
        found = [each.result() for each in self._pending.values()]
        return any(each is not None and same_object(each.manifest.data.get("idx"), identity) for each in found)

    def take(self, files: IndexFiles) -> tuple[Manifest, Arrays] | None:
        """What was fetched of an index, once: who asks again wants what is there then."""
        pending = self._pending.pop(files.uri(MANIFEST), None)
        fetched = pending.result() if pending else None
        arrays = fetched.arrays.result() if fetched else None
        return (fetched.manifest, arrays) if fetched and arrays is not None else None


def taken(files: IndexFiles) -> tuple[Manifest, Arrays] | None:
    """What was fetched of an index while its dataset was opened, if anything was."""
    ahead = current_ahead()
    return ahead.take(files) if isinstance(ahead, IndexAhead) else None


def fetch(files: IndexFiles, identity: Mapping[str, Any]) -> Fetched | None:
    """None: there is no index of the `.idx` with this identity, or it is another's matter to tell why."""
    try:
        manifest = files.read_manifest()
    except (FormatError, StorageError) as error:
        logger.debug("%s: not fetched ahead: %s", files.name, error)
        return None
    if manifest is None or not same_object(manifest.data.get("idx"), identity):
        return None
    return Fetched(manifest, _submit_arrays(partial(_fetch_arrays, files, manifest)))


def _fetch_arrays(files: IndexFiles, manifest: Manifest) -> Arrays | None:
    try:
        return files.read_arrays(manifest.arrays)
    except (FormatError, StorageError, ValueError) as error:
        logger.debug("%s: not fetched ahead: %s", files.name, error)
        return None


_submit = Threads("binidx-ahead", lambda: 8).submit
_submit_arrays = Threads("binidx-arrays", lambda: 8).submit
