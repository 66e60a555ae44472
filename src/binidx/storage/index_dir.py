"""The directory of a node through which index files of remote stores come down once, for all its processes.

    {tempdir}/binidx-{uid}      0700, ours and nobody else's: what lies there is believed by its sums alone, and sums
                                can be made to agree by whoever can write them

It is a `disk_cache`, for what is read whole and kept for as long as a run lasts: `.idx` files and arrays of indices.
BINIDX_INDEX_DIR names another one, or with "off" none; where there is a cache_dir, they go there with the rest. Where
no such directory can be had (none that is ours, a file system that is read-only or full) each process has them in its
own memory, which is said once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile

from binidx.storage.settings import ReadSettings

logger = logging.getLogger(__name__)

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def directory_of_index(settings: ReadSettings) -> tuple[str, int | None] | None:
    """Where index files are kept and the bytes that may lie there, as `DiskCache` takes them; None: nowhere."""
    if settings.index_dir == "":
        return None
    found = settings.index_dir or _of_this_user(os.getuid())
    return (found, settings.index_bytes) if found else None


@functools.cache
def _of_this_user(uid: int) -> str | None:
    """The default one, made and looked at once a process; None, with a line in the log, where it cannot be trusted."""
    path = ""
    try:
        path = os.path.join(tempfile.gettempdir(), f"binidx-{uid}")
        trouble = _claim(path, uid)
    except OSError as error:
        trouble = f"{error.strerror}"
    if trouble is None:
        return path
    logger.warning(
        "%s: %s; each process keeps index files in its own memory, unless BINIDX_INDEX_DIR names a directory",
        path or "temporary directory",
        trouble,
    )
    return None


def _claim(path: str, uid: int) -> str | None:
    """Make the directory; what is wrong with the one that is there, if anything."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Not through a link, which somebody else may have put there: nobody can move what is ours in a sticky /tmp.
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return "found something else there, needed a directory"
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}, needed {uid}"
    if found.st_mode & OTHERS_MAY_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}), needed 700"
    return None
