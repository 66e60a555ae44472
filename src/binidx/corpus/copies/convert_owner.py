"""Owner of a target: TARGET.convert.json, the file of the call that copies to it in its own process; and its lock.

    {"binidx_convert": 3, "owner": random name of that call, "objects": {"bin" or "idx": {"token": of its upload}}}

The call writes its name first, and checks it before it records or publishes something: a call that finds another name,
or no file, stops, as a later one has replaced it. On disks the lock TARGET.convert.lock refuses the later call instead.
The file goes when the dataset is complete. What was copied is in the records of the parts, see `copy_job`.

Earlier versions kept a journal under this name, version 2. A journal is replaced, its uploads are removed, and the copy
begins again. Those versions replace this file by a journal, so this call stops at its next check; the upload that the
file named stays until the bucket's rule for unfinished uploads removes it, and TARGET-parts/ until the next convert.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from binidx.corpus.whole_dataset import object_suffixes
from binidx.errors import FormatError, ObjectChangedError
from binidx.format.bin_file import BinWriter
from binidx.jobs.progress import ProgressWatcher
from binidx.json_models import JsonFile
from binidx.storage.cache.node_lock import acquire_node_lock
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.requests.retries import retried
from binidx.storage.writing.multipart import discard_parts
from binidx.storage.writing.publish import delete_object, write_object


@dataclass(frozen=True)
class BegunObject:
    """An object of the target that is being written.

    Attributes:
        token: continues its upload, see `open_parts`.
        published: whether the upload was about to be published; what stood under its name before was removed then.
    """

    token: str = ""
    published: bool = False


@dataclass(frozen=True)
class OwnerFields:
    """Fields of TARGET.convert.json besides its version."""

    owner: str = ""
    objects: dict[str, BegunObject] = field(default_factory=dict)


OWNER_FILE = JsonFile(OwnerFields, open=True)


class ConvertOwner:
    """Ownership of a target by this call.

    Args:
        target: prefix of the target.
    """

    def __init__(self, target: Location) -> None:
        self.file, self._target, self._name = target + ".convert.json", target, uuid.uuid4().hex
        self._objects = dict[str, BegunObject]()

    @contextlib.contextmanager
    def lock(self, watch: ProgressWatcher, *, wait: bool) -> Iterator[str]:
        """Hold the lock of a target on a disk for the block; yield the name of its holder if that is another process.

        Args:
            wait: whether to wait until another process has released it.
        """
        path = (self._target + ".convert.lock").local_path
        if path is not None:
            path = os.path.abspath(path)
            with contextlib.suppress(OSError):  # the first write reports it
                os.makedirs(os.path.dirname(path), exist_ok=True)
        with acquire_node_lock(path, wait=False) as lock:
            lock.leave_message(f"process {os.getpid()} of {socket.gethostname()}".encode())
            holder = "" if lock.first else lock.message.decode() or "another process"
            if not holder or not wait:
                yield holder
                return
            watch.say(f"{self._target}: {holder} converts to it; waiting")
        with acquire_node_lock(path) as lock:
            yield "" if lock.first else holder

    def read(self) -> OwnerFields | None:
        """Return the content of the file; None if there is none. A malformed file has no owner and no objects."""
        try:
            # One request: another call may replace the file between two.
            data = retried(self.file, lambda: read_small(self.file))
            return None if data is None else OWNER_FILE.decode(data, self.file.uri)
        except FormatError:
            return OwnerFields()

    def take(self, earlier: OwnerFields | None) -> None:
        """Become the owner, and continue the uploads of an earlier call for the same copy, if there is one."""
        self._objects = {} if earlier is None else earlier.objects
        self._write()

    def discard(self, earlier: OwnerFields) -> None:
        """Remove the uploads of an earlier call for another copy. The file stays, so that a kill leaves an owner."""
        for suffix in object_suffixes():
            of_tokens = "bin" in earlier.objects and suffix in BinWriter.suffixes()  # in any form
            key = "bin" if of_tokens else suffix
            discard_parts(self._target + f".{suffix}", earlier.objects.get(key, BegunObject()).token)

    def begun(self, suffix: str) -> BegunObject:
        """Return the state of an object."""
        return self._objects.get(suffix, BegunObject())

    def save(self, suffix: str, token: str, *, published: bool = False) -> None:
        """Keep the state of an object; raises as `check`."""
        self.check()
        self._objects[suffix] = BegunObject(token, published)
        self._write()

    def check(self) -> None:
        """Raise ObjectChangedError if another call has become the owner."""
        if (found := self.read()) is None or found.owner != self._name:
            raise ObjectChangedError(f"{self.file}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """Remove the file, and the partial files of a local target."""
        delete_object(self.file)
        for suffix in object_suffixes():
            discard_parts(self._target + f".{suffix}", "", every=True)

    def _write(self) -> None:
        fields = {"binidx_convert": 3, **asdict(OwnerFields(self._name, self._objects))}
        write_object(self.file, [OWNER_FILE.encode(fields)])
