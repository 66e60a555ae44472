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

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from binidx import errors
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.requests.listing import list_matches
from binidx.storage.requests.remote_object import read_small
from binidx.storage.threads import READS, REQUESTS
from binidx.storage.writing.publish import delete_object, put_if_absent, write_object

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

    def is_claimed(self) -> bool:
        """Return whether parts of this job may exist."""
        return read_small(self.job_file) == self.content

    def claim(
        self,
        *,
        overwrite: bool | None = None,
        parts: Sequence[JobPart] = (),
        check_free: Callable[[], object] = lambda: None,
    ) -> None:
        """Write job.json, unless it is there.

        Args:
            overwrite: whether to remove parts of another job; None if the caller has no such option.
            parts: those of this job; if another job had them, they stay.
            check_free: called before a job begins that may not overwrite; raises an error if the target is taken.

        Raises:
            ObjectExistsError: the folder holds parts of another job, or another job has begun at this moment.
        """
        if (found := read_small(self.job_file)) == self.content:
            return
        others = [] if found is None else self._list_others()
        if not overwrite:
            if found is not None and (others or not self.replaceable):
                way = "or remove the folder" if overwrite is None else "or give --overwrite, which removes them"
                raise self.refusal(found, f"finish that job, {way}")
            check_free()
        kept = {file.name for part in parts if others for file in self.files(part)}
        REQUESTS.map(delete_object, [file for file in others if file.name not in kept])
        if found is not None:
            write_object(self.job_file, [self.content])
        elif not put_if_absent(self.job_file, self.content):
            raise errors.ObjectExistsError(f"{self.job_file}: another job has just begun; give the same command again")

    def _list_others(self) -> list[Location]:
        """Return all objects but job.json."""
        found = [Location(uri, self.location.options) for uri in list_matches(self.location + "/")]
        return [file for file in found if file.name != self.job_file.name]

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
        return f"which differs in {', '.join(names)}"

    def file(self, part: JobPart) -> Location:
        """Return the location of a part's record."""
        return self.location / f"{part.name}.json"

    def files(self, part: Any) -> list[Location]:
        """Return the locations of a part's record and, in a subclass, its other objects."""
        return [self.file(part)]

    def read(self, part: JobPart) -> Any:
        """Return the result in a part's record; None if it has no record that is valid for this job."""
        data = read_small(self.file(part))
        return None if data is None else self.parse(part, data)

    def parse(self, part: Any, data: bytes) -> Any:
        """Return the result in the bytes of a part's record; None if it is not valid for this job."""
        return RECORD_FILE.decode(data, self.file(part).uri).result

    def read_all(self, parts: Sequence[JobPart]) -> PartResults[Any]:
        """Return the result of each part that has a record, by its name."""
        found = zip(parts, READS.map(self.read, parts), strict=True)
        return PartResults({part.name: result for part, result in found if result is not None})

    def write(self, part: JobPart, result: Any) -> None:
        """Write a part's record, after all its objects."""
        write_object(self.file(part), [self.format(result)])

    def format(self, result: Any) -> bytes:
        """Return the bytes of a record."""
        return RECORD_FILE.encode({"result": result})

    def remove(self, parts: Iterable[JobPart], objects: Iterable[Location] = ()) -> None:
        """Remove the records and all objects of the parts, then job.json and, on a disk, the folder."""
        of_parts = [self.files(part) for part in parts]
        REQUESTS.map(delete_object, [record for record, *_ in of_parts])  # first: a record names what exists
        REQUESTS.map(delete_object, [*objects, *(file for _, *files in of_parts for file in files)])
        delete_object(self.job_file)
        if (path := self.location.local_path) is not None:
            with contextlib.suppress(OSError):
                for staging in Path(path).glob("*.tmp"):  # of killed workers
                    staging.unlink()
                os.rmdir(path)
