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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from binidx.corpus.whole_dataset import object_suffixes
from binidx.errors import FormatError, ObjectChangedError
from binidx.format.bin_file import BinWriter
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.progress import ProgressWatcher
from binidx.json_models import JsonFile
from binidx.storage import effects
from binidx.storage.cache.node_lock import acquire_node_lock
from binidx.storage.location import Location
from binidx.storage.writing.multipart import discard_parts


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
    """Content of TARGET.convert.json. Versions before 3 had no folder, and named their source here."""

    binidx_convert: int = 3
    owner: str = ""
    objects: dict[str, BegunObject] = field(default_factory=dict)


OWNER_FILE = JsonFile(OwnerFields, open=True)


@dataclass(frozen=True)
class DiscardParts(effects.Effect[None]):
    """Do `discard_parts`."""

    location: Location
    token: str
    every: bool = False

    def perform(self) -> None:
        discard_parts(self.location, self.token, every=self.every)


class ConvertOwner:
    """Ownership of a target by this call.

    Args:
        target: prefix of the target.
    """

    def __init__(self, target: Location) -> None:
        self.file, self._target, self._name = target + ".convert.json", target, ""
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

    def read_steps(self) -> effects.Steps[OwnerFields | None]:
        """Return the content of the file; None if there is none. A malformed file has no owner and no objects."""
        try:
            # One request: another call may replace the file between two.
            data = yield from effects.ReadObject(self.file)
            return None if data is None else OWNER_FILE.decode(data, self.file.uri)
        except FormatError:
            return OwnerFields()

    def claim_steps(
        self, folder: JobFolder, *, by_workers: bool, check_free: Callable[[bool], object], say: Callable[[str], object]
    ) -> effects.Steps[None]:
        """Take the target, and the folder of the parts; remove what an earlier call for another copy left there.

            folder's job.json   TARGET.convert.json   folder                             file; workers have none
            absent              absent                claimed                            written
            of this copy        any                   kept                               written, with begun uploads
            of another copy     present               parts are removed, claimed last    written, uploads are removed
            of another copy     absent                the same if it is of one process; else an error

        Args:
            by_workers: whether workers make the parts; such a call only removes the file of a call for another copy.
            check_free: raises ObjectExistsError if the target is taken; called with whether a call left something.

        Raises:
            ObjectExistsError: something stands at the target, or the folder has parts of another copy by workers.
        """
        earlier = yield from self.read_steps()
        claimed = yield from effects.ReadObject(folder.job_file)
        resumed, is_other = claimed == folder.content, claimed not in (None, folder.content)
        yield from effects.Call(check_free, (resumed or earlier is not None,))
        # A folder of another copy by workers is theirs; one process leaves its name, or parts of another form.
        other = dict[str, Any]()
        with contextlib.suppress(FormatError):  # a malformed job.json has no identity
            other = JobFolder.IDENTITY_FILE.decode(claimed or b"", "") if is_other else {}
        is_left = is_other and (other.get("job") == "convert" or not other) and (earlier is not None or "form" in other)
        if not resumed and not is_left:
            yield from folder.claim_steps()
        if earlier is not None and not resumed:
            say(f"{self.file}: of another source or form, or the source has changed; beginning again")
            yield from self._discard_steps(earlier)  # the file stays, so that a kill leaves an owner
        if not by_workers:
            yield from self.take_steps(earlier if resumed else None)
        elif earlier is not None and not resumed:
            yield from self.remove_steps()
        if is_left:
            yield from folder.claim_steps(overwrite=True)

    def take_steps(self, earlier: OwnerFields | None) -> effects.Steps[None]:
        """Become the owner, and continue the uploads of an earlier call for the same copy, if there is one."""
        self._objects = {} if earlier is None else earlier.objects
        self._name = yield from effects.NewName()
        yield from self._write_steps()

    def clean_up_steps(
        self, folder: JobFolder, parts: Sequence[Any], objects: Sequence[Location]
    ) -> effects.Steps[None]:
        """Remove the files of the work, if it is of this copy: those of the owner first, as the folder proves it."""
        is_own = yield from folder.holds_parts_steps()
        if not is_own and (yield from effects.ReadObject(folder.job_file)) is None:
            late = yield from self.read_steps()  # of a call that became the owner while another one cleaned up
            if is_own := late is not None and late.owner != "" and late.binidx_convert == OwnerFields.binidx_convert:
                yield from self._discard_steps(late)
        if is_own:
            yield from self.remove_steps()
            yield from folder.remove_steps(parts, objects)

    def _discard_steps(self, earlier: OwnerFields) -> effects.Steps[None]:
        """Remove the uploads of an earlier call."""
        for suffix in object_suffixes():
            of_tokens = "bin" in earlier.objects and suffix in BinWriter.suffixes()  # in any form
            key = "bin" if of_tokens else suffix
            yield from DiscardParts(self._target + f".{suffix}", earlier.objects.get(key, BegunObject()).token)

    def begun(self, suffix: str) -> BegunObject:
        """Return the state of an object."""
        return self._objects.get(suffix, BegunObject())

    def save_steps(self, suffix: str, token: str, *, published: bool = False) -> effects.Steps[None]:
        """Keep the state of an object; raises as `check`."""
        yield from self.check_steps()
        self._objects[suffix] = BegunObject(token, published)
        yield from self._write_steps()

    def check_steps(self) -> effects.Steps[None]:
        """Raise ObjectChangedError if another call has become the owner."""
        if (found := (yield from self.read_steps())) is None or found.owner != self._name:
            raise ObjectChangedError(f"{self.file}: written by another convert to this target; this one stops")

    def remove_steps(self) -> effects.Steps[None]:
        """Remove the file, and the partial files of a local target."""
        yield from effects.DeleteObject(self.file)
        for suffix in object_suffixes():
            yield from DiscardParts(self._target + f".{suffix}", "", every=True)

    def _write_steps(self) -> effects.Steps[None]:
        fields = asdict(OwnerFields(owner=self._name, objects=self._objects))
        yield from effects.WriteObject(self.file, OWNER_FILE.encode(fields), durable=True)

    claim, save = effects.blocking(claim_steps), effects.blocking(save_steps)
    check, clean_up = effects.blocking(check_steps), effects.blocking(clean_up_steps)
