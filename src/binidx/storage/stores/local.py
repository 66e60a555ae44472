"""Files of this machine: large ones are mapped, small ones are read at once.

A blend of thousands of mapped files needs more descriptors than the 1024 that most shells allow, and sockets and the
pipes of a DataLoader's workers need some, too, so a process that opens files raises its own (soft) limit.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import math
import mmap as mapping
import os
import resource
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from binidx.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.native.arguments import AskAhead, Mapped
from binidx.storage.interfaces import FileVersion, Range, VersionMark
from binidx.storage.ranges import check_ranges
from binidx.storage.stats import ObjectStats, note_seconds
from binidx.storage.store_protocols import Prices
from binidx.storage.stores.driver_errors import access_denied
from binidx.storage.stores.identity import is_rewritten
from binidx.storage.stores.registry import check_file_name, local_path

# A mapped file costs a descriptor and one of the 65,530 maps of a process; one that was read, its bytes once more: 819
# MB for 4,096 files of 200 KB.
READ_AT_ONCE = 16 << 10
SMALL_FILE = 256 << 10
"""Size up to which a file is read at once where half of the descriptors are in use, and too small for seals."""


FILE_PRICES = Prices("file")
OPENED = ("_found", "_map", "_view", "_content")
"""Attributes that opening the file sets."""

SETTLED_SECONDS = 2.0
"""Age at which a file's times prove that it is unchanged: a file that changes twice within a tick of its file system's
clock keeps its times, and FAT has the longest tick."""


class LocalFile:
    """A file of this machine, mapped once; reads are views of the map and copy nothing.

    A file of up to 16 KiB, or 256 KiB where descriptors are scarce, is not mapped, but read when it is opened.

    Args:
        path: of an existing file; an empty one is fine.
        identity: size and mtime that the file must have; with it, the file is opened at the first read only.
        mark: inode and ctime that the file must have, too, if this is the node where they were read.

    Raises:
        ObjectNotFoundError: there is no such file.
        StorageError: it cannot be read, or it changed while it was opened.
        MapRefusedError: the kernel or the file system maps no more of it; it can be read by ranges.
        ObjectChangedError: on read, the mapped file was written to in place since it was opened, or cut. The ctime
            shows it where size and mtime were restored. A view taken before that is lost: touching cut pages kills
            the process with SIGBUS, as with every mmap.

    Pickles as its arguments, so the copy is opened at its first read. In this process, a replaced file (a new inode
    under the name) goes on being read as it was.
    """

    _found: os.stat_result
    _map: mapping.mmap | None
    _view: memoryview
    _content: Mapped

    def __init__(
        self, path: str | os.PathLike[str], identity: dict[str, Any] | None = None, mark: FileVersion | None = None
    ) -> None:
        self.uri = check_file_name(os.fspath(path))
        # Not normalised: `link/../en.bin` is another file than `en.bin`.
        self._path = self.uri if os.path.isabs(self.uri) else os.path.join(os.getcwd(), self.uri)
        self.stats, self._ask_ahead = ObjectStats(FILE_PRICES), AskAhead()
        self.identity, self.mark = identity or {}, mark
        if identity is None:
            self._open()
            self.identity = {"size": self._found.st_size, "mtime": self._found.st_mtime}
        self.size: int = self.identity["size"]

    def _open(self) -> None:
        """Open and map the file, which must have the `identity` and the `mark`, if these are known."""
        descriptors, mapped = raise_descriptor_limit(), None
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size > (READ_AT_ONCE if file.fileno() < descriptors // 2 else SMALL_FILE):
                    mapped = mapping.mmap(file.fileno(), status.st_size, access=mapping.ACCESS_READ)
                    # Random reads through the kernel's read-ahead fetched 125 bytes from a cold disk for each wanted.
                    mapped.madvise(mapping.MADV_RANDOM)
                view = memoryview(mapped or file.read(status.st_size))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFoundError(f"{self.uri}: no such file") from error
        except OSError as error:
            if error.errno == errno.EACCES:
                raise access_denied(self.uri) from error
            kind = MapRefusedError if error.errno in (errno.EPERM, errno.ENOMEM) else StorageError
            way_out = WAYS_OUT.get(error.errno or 0, "needed a readable file")
            raise kind(f"{self.uri}: {error.strerror}; {way_out}") from error
        now = {"size": status.st_size, "mtime": status.st_mtime}
        version, pickled = file_version(status), self.mark
        if len(view) != status.st_size or self.identity not in ({}, now) or is_rewritten(pickled, version):
            was = f", was {self.identity}, {pickled} in the process that pickled it" if self.identity else ""
            raise ObjectChangedError(f"{self.uri}: {len(view)} bytes read, has {now}, {version}{was}; open it again")
        content, self.mark = Mapped(view, disk=mapped is not None), version
        vars(self).update(zip(OPENED, (status, mapped, view, content), strict=True))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Open the file at the first read after unpickling. Threads that open it twice do no harm."""
            if name not in OPENED:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            self._open()
            return vars(self)[name]

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        if self._map is not None:
            self._check_unchanged(self._map)
            self._content.read_ahead(np.array(ranges, np.int64).reshape(-1, 2))
        views = [self._view[start:stop] for start, stop in ranges]
        count = sum(map(len, views))
        self.stats.add(requests=len(views), bytes_asked=count, bytes_moved=count)
        return views

    def is_complete(self) -> bool:
        return True

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        if self._map is not None:
            self._check_unchanged(self._map)
        about = self._content.taking(ask_ahead=self._ask_ahead.wanted)
        began = time.perf_counter()
        requests = gather(about)
        self._ask_ahead.saw(bool(about.disk_moved))
        if about.disk_moved:
            note_seconds("local_read", time.perf_counter() - began, about.num_bytes + requests * mapping.PAGESIZE)
        self.stats.add(requests=requests, bytes_asked=about.num_bytes, bytes_moved=about.num_bytes)
        return True

    def version_key(self) -> str | None:
        status = self._found
        if self.size <= SMALL_FILE or time.time() - status.st_ctime < SETTLED_SECONDS:
            return None  # a small file is checked faster than a seal is read
        return f"{node_view()} {self._path} {status.st_ino} {status.st_ctime_ns} {status.st_size}"

    def _check_unchanged(self, mapped: mapping.mmap) -> None:
        """Raise ObjectChangedError if the file was written to in place, or cut: reads could mix contents, or SIGBUS.

        This takes 1.5 us. The file is looked up by name, since an fstat would need one more descriptor.
        """
        try:
            now = os.stat(self._path)
        except OSError:
            now = None  # removed, or the way to it: the map stays
        was = self._found
        if now is None or (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino):
            if (present := mapped.size()) < self.size:
                raise ObjectChangedError(f"{self.uri}: has {present} bytes, had {self.size} when it was opened")
        elif (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (self.size, was.st_mtime_ns, was.st_ctime_ns):
            same_times, version = (now.st_size, now.st_mtime_ns) == (self.size, was.st_mtime_ns), file_version(now)
            if same_times and not is_rewritten(self.mark, version):
                self._found, self.mark = now, version
                return
            times = f"mtime {was.st_mtime}, ctime {was.st_ctime}", f"mtime {now.st_mtime}, ctime {now.st_ctime}"
            raise ObjectChangedError(
                f"{self.uri}: changed since it was opened (size {self.size}, {times[0]}, now size {now.st_size}, "
                f"{times[1]}); open it again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.uri, self.identity, mark_to_pickle(self._path, self.mark))

    def __repr__(self) -> str:
        return f"LocalFile({self.uri}, {self.size:,} bytes)"


class MapRefusedError(StorageError):
    """A file that can be opened and not be mapped: there are too many maps, or the file system limits them."""


def file_version(status: os.stat_result) -> FileVersion:
    """Return the version of a local file from its stat."""
    owner = status.st_mode, status.st_uid, status.st_gid, status.st_nlink
    return FileVersion(node_view(), status.st_ino, status.st_ctime, owner)


def mark_to_pickle(uri: str, opened: VersionMark | None) -> VersionMark | None:
    """Return the mark of an opened object for another process: the present one if only chmod, chown or ln differ.

    A process that compared its own ctime with one from before a chmod could not tell that from a later write.
    """
    path = local_path(uri)
    if not isinstance(opened, FileVersion) or path is None or opened.node != node_view():
        return opened
    with contextlib.suppress(OSError):
        if not is_rewritten(opened, now := file_version(os.stat(path))):
            return now
    return opened


@functools.cache
def node_view() -> str:
    """Return a name that processes share if they see the same files: those of one kernel and one container.

    Where the kernel has no boot ID, as on macOS, each process has its own, so versions of files are not compared.
    """
    try:
        namespace = os.readlink("/proc/self/ns/mnt")
    except OSError:
        namespace = ""
    return f"{node_id()} {namespace}"


def staging_path(path: str) -> str:
    """Return a name in the same directory that no other writer has: `NAME.NODE<24 hex digits>.tmp`."""
    return f"{path}.{node_id()}{uuid.uuid4().hex[8:]}.tmp"


@functools.cache
def node_id() -> str:
    """Return 8 hex digits that are the same for the processes of one kernel, between which all flocks hold."""
    boot = boot_id() or uuid.uuid4().hex  # of this process only: MAC addresses and host names repeat in containers
    return hashlib.blake2b(boot.encode(), digest_size=4).hexdigest()


@functools.cache
def boot_id() -> str:
    """Return the boot ID of the kernel; empty if there is none, as on macOS."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""


def sync_directory(path: str) -> None:
    """Sync the directory of a file, where that is possible, so that the file's name is as durable as its bytes."""
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


WAYS_OUT = {
    errno.EMFILE: "raise the limit of open files, ulimit -n (binidx raises it to at most 65,536 by itself)",
    errno.ENFILE: "the machine is out of open files, sysctl fs.file-max",
    **dict.fromkeys((errno.EPERM, errno.ENOMEM), "not mapped: raise sysctl vm.max_map_count, ulimit -v, or a quota"),
}
"""errno -> the remedy, when opening fails for lack of descriptors or maps"""

MOST_DESCRIPTORS = 65_536
"""Highest limit that is set: by default a process has no more maps, and other libraries loop over all descriptors."""


@functools.cache
def raise_descriptor_limit() -> float:
    """Raise the soft limit of open files towards the hard one, once in a process; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where a limit is "unlimited", macOS takes no more than 10,240.
    wanted = 10_240 if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft
