"""Journal of a copy to one target, TARGET.convert.json, from which an interrupted copy resumes.

    {"binidx_convert": 2,
     "owner": random name of the run that writes the file now,
     "source": {"uri": ..., "bin": identity, "idx": identity, "way": the chosen StorageFormat},
     "objects": {"bin" or "bin.zst": CopyState, "bin.xxh3": CopyState, "idx": CopyState}}      those already started

The journal exists while a copy runs or is interrupted, and is removed once the dataset is complete. On disks a run
locks TARGET.convert.lock, and another run to the same target is refused meanwhile. Elsewhere the owner decides: a run
first writes its own name, and checks it before it saves, publishes or removes something. A run that finds another name
stops, as a later run has replaced it. If the earlier run published parts that the later one continues, the later one
copies that object again.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.whole_dataset import bin_suffixes, object_suffixes
from binidx.errors import FormatError, ObjectChangedError
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.requests.retries import retried
from binidx.storage.writing.copy import CopyState
from binidx.storage.writing.multipart import discard_parts, remove_partial_files
from binidx.storage.writing.publish import delete_object, write_object


@dataclass(frozen=True)
class JournalFile:
    """Fields of TARGET.convert.json besides its version."""

    owner: str
    source: dict[str, Any]
    objects: dict[str, CopyState]


JOURNAL_FILE = JsonFile(JournalFile, {"binidx_convert": 2})


class ConvertJournal:
    """Progress of a copy to one target, in TARGET.convert.json, from which an interrupted copy resumes.

    Args:
        target: prefix of the target.
        source: identity of the source: its URI, the identities of `.bin` and `.idx`, and the chosen storage format.

    Attributes:
        states: progress of each object, by its suffix in `object_suffixes`.
        published: identity of the `.bin` that an earlier run, of any source, has verified; None if there is none.
    """

    def __init__(self, target: Location, source: dict[str, Any]) -> None:
        self.file = target + ".convert.json"
        self.target = target
        self.source = source
        self.states: dict[str, CopyState] = {}
        self.published: dict[str, Any] | None = None
        self._earlier: dict[str, CopyState] = {}
        self._owner = uuid.uuid4().hex
        self._claimed = False

    def adopt(self) -> str:
        """Take over the states of an earlier run with the same source.

        Returns:
            "none" if there was no earlier run, "ours" if its states were taken over, "other" if it had another source,
            the source has changed, or the journal is not readable.
        """
        try:
            journal = self._read()
        except FormatError:
            return "other"
        if journal is None:
            return "none"
        earlier = {suffix: journal.objects[suffix] for suffix in object_suffixes() if suffix in journal.objects}
        tokens = next((suffix for suffix in bin_suffixes() if suffix in earlier), None)
        self._earlier, self.published = earlier, earlier[tokens].done if tokens else None
        if journal.source != self.source:
            return "other"
        self.states = self._earlier
        return "ours"

    def forget_earlier(self) -> None:
        """Remove the partial files and uploads of the earlier run, whatever its source."""
        for suffix, state in self._earlier.items():
            discard_parts(self.target + f".{suffix}", state.token)

    def save(self) -> None:
        """Write the journal with this run as its owner.

        Raises:
            ObjectChangedError: another run has written it since the last save.
        """
        self.check_owner()
        text = json.dumps({**JOURNAL_FILE.tags, **asdict(JournalFile(self._owner, self.source, self.states))})
        write_object(self.file, [text.encode()])
        self._claimed = True

    def check_owner(self) -> None:
        """Raise ObjectChangedError if another run has written the journal since this one saved it."""
        if not self._claimed:
            return
        try:
            journal = self._read()
        except FormatError:
            journal = None
        if journal is None or journal.owner != self._owner:
            raise ObjectChangedError(f"{self.file}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """Remove the journal and local staging files, once the dataset is complete or the copy must start again.

        Raises:
            ObjectChangedError: another run has written it since the last save.
        """
        self.check_owner()
        delete_object(self.file)
        for suffix in object_suffixes():
            remove_partial_files(self.target + f".{suffix}")

    def _read(self) -> JournalFile | None:
        # One request: another run may replace the journal between two.
        data = retried(self.file, lambda: read_small(self.file))
        return None if data is None else JOURNAL_FILE.decode(data, self.file.uri)


class NoJournal(ConvertJournal):
    """Journal of a copy in parts: it only finds, and removes, that of an earlier copy by one process."""

    def save(self) -> None: ...
