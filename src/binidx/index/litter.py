"""What killed builders leave beside local caches, and when it goes.

    *.npy.{random}.tmp        a file on its way, never read; swept an hour after it was last written to
    an unfinished upload      invisible in the store; left to the bucket's rule (AbortIncompleteMultipartUpload)

Whoever publishes sweeps, once a process and directory. The hour is counted by the clock of the file system: against
the manifest that was just written there. A builder that was stopped for so long finds its file gone: it warns that its
index is not cached, and serves the right arrays.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import lru_cache

from binidx.index.files import MANIFEST, IndexFiles
from binidx.storage import filesystem

LEFT_SECONDS = 3600.0
OURS = re.compile(r"[0-9a-f]{32}-.*\.(npy|json|json-claim|json-claim-after-[^.]*|txt)(\.[0-9a-f]{32}\.tmp){1,2}")
"""Twice: a whole file that is to be linked to a name is itself written beside its own."""


def sweep_litter(files: IndexFiles) -> None:
    """Remove what was left long ago in the directory of these files; never raises."""
    path = filesystem.local_path(files.uri(MANIFEST))
    if path is not None:
        with contextlib.suppress(OSError):
            _sweep(os.path.dirname(os.path.abspath(path)), os.getpid(), path)


@lru_cache(maxsize=1024)
def _swept(directory: str, pid: int) -> list[bool]:
    return []


def _sweep(directory: str, pid: int, written_now: str) -> None:
    done = _swept(directory, pid)
    if done:
        return
    done.append(True)
    oldest = os.stat(written_now).st_mtime - LEFT_SECONDS
    for name in filter(OURS.fullmatch, os.listdir(directory)):
        left = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if os.stat(left).st_mtime < oldest:
                os.unlink(left)
