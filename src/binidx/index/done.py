"""Arrays that come to the nodes that wait while the builder is at the next one.

    builder       document_index ▐ sample_index ▐ shuffle_index ▐ manifest
    its claim                    └ "done": {"document_index": ..}         └ gone
    who waits                       fetches it                      the rest, and what the manifest says

Only work is saved: what was fetched lies in the directory of the node under the identity that the store gave it, and is
used if the manifest names that very object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from binidx.errors import BinidxError
from binidx.index.files import IndexFiles
from binidx.index.manifest import StoredArray
from binidx.storage.threads import Threads

TOLD_BYTES = 16 << 20
"""Of an array: what is smaller comes sooner than a claim is looked at again."""


def telling(tell: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, StoredArray]], None]:
    """Tell of the arrays that are worth it, by the identities of their objects."""

    def say(stored: Mapping[str, StoredArray]) -> None:
        done = {name: asdict(each) for name, each in stored.items() if each.identity and each.bytes >= TOLD_BYTES}
        if done:
            tell(done)

    return say


class FetchDone:
    """Begins to fetch each array of an index that it is told of, once; what fails is fetched again when it counts."""

    def __init__(self, files: IndexFiles, names: Sequence[str]) -> None:
        self._files, self._waiting = files, {*names}

    def __call__(self, done: Mapping[str, Any]) -> None:
        # What stands in a claim may be anybody's.
        for name in self._waiting.intersection(done if isinstance(done, Mapping) else ()):
            self._waiting.discard(name)
            _submit(partial(_bring, self._files, name, done[name]))


def _bring(files: IndexFiles, name: str, fields: Any) -> None:
    with contextlib.suppress(BinidxError, TypeError, ValueError, KeyError, AttributeError):
        files.bring(name, StoredArray(**fields))


_submit = Threads("binidx-done", lambda: 4).submit
