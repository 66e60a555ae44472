"""Folder of a job: its identity, and a record of each finished part.

FOLDER/job.json       identity of the job; first object to appear, last to go
FOLDER/NAME.json      {"binidx_record": 1, "result": values}: proof that the part NAME is finished

The name of a part is a digest of all that decides its bytes, so a record is valid for any later call. A restart is the
same call, which finds job.json

    absent               and writes it
    of this job          and continues
    of another job       and is an error with the differences; `overwrite` removes the parts of that job
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from binidx import errors
from binidx.json_models import JsonFile
from binidx.storage import effects
from binidx.storage.effects import Steps, blocking
from binidx.storage.location import Location

Result = TypeVar("Result")


class JobPart(Protocol):
    """Unit of work. `str()` names it in errors."""

    @property
    def name(self) -> str:
        """Digest of all that decides its result."""

    @property
    def size(self) -> int:
        """Units of work, for progress: bytes, rows or samples."""


@dataclass(frozen=True)
class RecordFile:
    """Field of a record besides its version."""

    result: dict[str, Any]


RECORD_FILE = JsonFile(RecordFile, {"binidx_record": 1}, hint="delete it and give the same command again")


class PartResults(dict[str, Result]):
    """Results by the names of their parts; `num_made` of them are of this call, the others had records."""

    num_made = 0


class JobFolder:
    """Folder of a job's parts and records. Results are `dict[str, Any]`, unless a subclass gives records another form.

    Args:
        location: the folder.
        identity: all that decides the result of the job, in JSON values; no secrets. Workers do not get it.
        replaceable: whether another job that has made no part is replaced, as a call that failed before its first part.
    """

    IDENTITY_FILE: ClassVar = JsonFile(dict[str, Any], open=True)
    """Form of job.json."""

    def __init__(self, location: Location, identity: Mapping[str, Any], *, replaceable: bool = False) -> None:
        self.location, self.identity, self.replaceable = location, identity, replaceable

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "identity": {}}

    @property
    def job_file(self) -> Location:
        """Location of job.json."""
        return self.location / "job.json"

    @property
    def content(self) -> bytes:
        """Bytes of job.json."""
        return self.IDENTITY_FILE.encode(self.identity, sort_keys=True)

    def is_claimed_steps(self) -> Steps[bool]:
        """Return whether parts of this job may exist."""
        return (yield from effects.ReadObject(self.job_file)) == self.content

    def holds_parts_steps(self) -> Steps[bool]:
        """Return whether parts of this job may exist: `is_claimed`, or late workers left some after their removal."""
        if (found := (yield from effects.ReadObject(self.job_file))) is None:
            return bool((yield from effects.suppressed(iter(effects.ListObjects(self.location)))))
        return found == self.content

    def claim_steps(
        self,
        *,
        overwrite: bool | None = None,
        parts: Sequence[JobPart] = (),
        check_free: Callable[[], object] = lambda: None,
    ) -> Steps[None]:
        """Write job.json, unless it is there.

        Args:
            overwrite: whether to remove parts of another job; None if the caller has no such option.
            parts: those of this job; if another job had them, they stay.
            check_free: called before a job begins that may not overwrite; raises an error if the target is taken.

        Raises:
            ObjectExistsError: the folder holds parts of another job, or another job has begun at this moment.
        """
        if (found := (yield from effects.ReadObject(self.job_file))) == self.content:
            return
        listed = [] if found is None else (yield from effects.ListObjects(self.location))
        others = [file for file in listed if file.name != self.job_file.name]
        if not overwrite:
            if found is not None and (others or not self.replaceable):
                way = "or remove the folder" if overwrite is None else "or give --overwrite, which removes them"
                raise self.refusal(found, f"finish that job, {way}")
            yield from effects.Call(check_free)
        kept = {file.name for part in parts if others for file in self.files(part)}
        yield from self._delete([file for file in others if file.name not in kept])
        if found is not None:
            yield from effects.WriteObject(self.job_file, self.content, durable=True)
        elif not (yield from effects.PutIfAbsent(self.job_file, self.content, durable=True)):
            raise errors.ObjectExistsError(f"{self.job_file}: another job has just begun; give the same command again")

    def refusal(self, found: bytes, way: str) -> errors.ObjectExistsError:
        """Return the error for a job.json of another job, with the remedy `way`."""
        try:
            problem = self.describe_difference(found)
        except errors.FormatError as error:
            problem = f"of an unknown form ({error})"
        return errors.ObjectExistsError(f"{self.job_file}: parts of another job, {problem}; {way}")

    def describe_difference(self, found: bytes) -> str:
        """Return a clause for a message: the settings in which the job of another job.json differs.

        Raises:
            FormatError: it is malformed.
        """
        other = self.IDENTITY_FILE.decode(found, "")
        names = [name for name in {**self.identity, **other} if other.get(name) != self.identity.get(name)]
        return f"which differs in {', '.join(names)}" if {*other} & {*self.identity} else "of another command"

    def file(self, part: JobPart) -> Location:
        """Return the location of a part's record."""
        return self.location / f"{part.name}.json"

    def files(self, part: Any) -> list[Location]:
        """Return the locations of a part's record and, in a subclass, its other objects."""
        return [self.file(part)]

    def parse(self, part: Any, data: bytes) -> Any:
        """Return the result in the bytes of a part's record; None if it is not valid for this job."""
        return RECORD_FILE.decode(data, self.file(part).uri).result

    def read_steps(self, part: JobPart) -> Steps[Any]:
        """Return the result in a part's record; None if it has no record that is valid for this job."""
        data = yield from effects.ReadObject(self.file(part))
        return None if data is None else self.parse(part, data)

    def read_all_steps(self, parts: Sequence[JobPart]) -> Steps[PartResults[Any]]:
        """Return the result of each part that has a valid record, by its name."""
        found = zip(
            parts, (yield from effects.AtOnce([effects.ReadObject(self.file(part)) for part in parts])), strict=True
        )
        results = ((part.name, self.parse(part, data)) for part, data in found if data is not None)
        return PartResults({name: result for name, result in results if result is not None})

    def write_steps(self, part: JobPart, result: Any) -> Steps[None]:
        """Write a part's record, after all its objects."""
        yield from effects.WriteObject(self.file(part), self.format(result), durable=True)

    def format(self, result: Any) -> bytes:
        """Return the bytes of a record."""
        return RECORD_FILE.encode({"result": result})

    def remove_steps(self, parts: Iterable[JobPart], objects: Iterable[Location] = ()) -> Steps[None]:
        """Remove the records and all objects of the parts, then job.json and, on a disk, the folder."""
        files = [file for part in parts for file in self.files(part)]
        yield from self._delete([*files, *objects])
        yield from effects.DeleteObject(self.job_file)
        yield from effects.RemoveFolder(self.location)

    def _delete(self, files: Sequence[Location]) -> Steps[None]:
        """Delete files, records before all others: a record names what exists."""
        for are_records in True, False:
            chosen = [file for file in files if file.name.endswith(".json") == are_records]
            yield from effects.AtOnce([effects.DeleteObject(file) for file in chosen])

    is_claimed, holds_parts = blocking(is_claimed_steps), blocking(holds_parts_steps)
    claim, read = blocking(claim_steps), blocking(read_steps)
    read_all, write, remove = blocking(read_all_steps), blocking(write_steps), blocking(remove_steps)
