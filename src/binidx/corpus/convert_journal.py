"""Journal of a convert, with which the next run resumes it: `TARGET.convert.json`.

    {"binidx_convert": 2,
     "owner": random name of the run that writes the file now,
     "source": {"uri": ..., "bin": identity, "idx": identity, "way": the chosen StorageFormat},
     "objects": {"bin" or "bin.zst": CopyState, "bin.xxh3": CopyState, "idx": CopyState}}      those already started

The journal exists while a copy runs or is interrupted, and is removed once the dataset is complete. A run first writes
its own name as the owner, and checks it before each later save: a run that finds another name stops, as a later run has
replaced it. Two runs of one source write the same bytes to the same parts, so their overlap is harmless.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.dataset_target import BIN_SUFFIXES
from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.json_models import JsonFile
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.open import read_document
from binidx.storage.writing.copy import CopyState
from binidx.storage.writing.multipart import discard_parts, remove_staging_files
from binidx.storage.writing.publish import create_object, delete_object

OBJECT_SUFFIXES = (*BIN_SUFFIXES, f"bin{SUFFIX}", "idx")
"""Objects of a dataset in the order in which they are written: tokens first, index last."""


@dataclass(frozen=True)
class JournalFile:
    """Fields of the file besides its version."""

    owner: str
    source: dict[str, Any]
    objects: dict[str, CopyState]


JOURNAL_FILE = JsonFile(JournalFile, {"binidx_convert": 2})


class ConvertJournal:
    """Journal of one target.

    Args:
        target: prefix of the target.
        source: identity of the source: its URI, the identities of both objects, and the chosen storage format.
        storage_options: fsspec options of the target.

    Attributes:
        states: progress of each object, by its suffix in `OBJECT_SUFFIXES`.
        published: identity of the .bin that an earlier run, of any source, verified.
    """

    def __init__(self, target: str, source: dict[str, Any], storage_options: Mapping[str, Any] | None) -> None:
        self.uri = f"{target}.convert.json"
        self.target = target
        self.source = source
        self.states: dict[str, CopyState] = {}
        self.published: dict[str, Any] | None = None
        self._owner = uuid.uuid4().hex
        self._options = storage_options
        self._claimed = False

    def adopt(self) -> str:
        """Take over the states of an earlier run with the same source.

        Returns:
            "none" if there was no earlier run, "ours" if its states were taken over, "other" if it had another source,
            the source has changed, or the journal is not readable.
        """
        try:
            found = self._read()
            if found is None:
                return "none"
        except FormatError:
            return "other"
        self.published = next((found.objects[suffix].done for suffix in BIN_SUFFIXES if suffix in found.objects), None)
        if found.source != self.source:
            return "other"
        self.states = {suffix: found.objects[suffix] for suffix in OBJECT_SUFFIXES if suffix in found.objects}
        return "ours"

    def forget_other(self) -> None:
        """Remove the partial files and uploads of an earlier run of another source."""
        try:
            found = self._read()
        except FormatError:
            return
        for suffix in OBJECT_SUFFIXES:
            if found is not None and suffix in found.objects:
                discard_parts(f"{self.target}.{suffix}", found.objects[suffix].token, self._options)

    def save(self) -> None:
        """Write the journal with this run as its owner.

        Raises:
            ObjectChangedError: another run has written it since the last save.
        """
        if self._claimed:
            self.check_ours()
        text = json.dumps({**JOURNAL_FILE.tags, **asdict(JournalFile(self._owner, self.source, self.states))})
        with create_object(self.uri, self._options) as writer:
            writer.write(text.encode())
        self._claimed = True

    def check_ours(self) -> None:
        """ObjectChangedError if another run owns the journal."""
        try:
            found = self._read()
        except FormatError:
            found = None
        if found is None or found.owner != self._owner:
            raise ObjectChangedError(f"{self.uri}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """Remove the journal and local staging files: the dataset is complete, or the copy must start again."""
        delete_object(self.uri, self._options)
        for suffix in OBJECT_SUFFIXES:
            remove_staging_files(f"{self.target}.{suffix}", ".partial")
        remove_staging_files(self.uri, ".tmp")

    def _read(self) -> JournalFile | None:
        try:
            data = read_document(JOURNAL_FILE, self.uri, self._options)
        except ObjectNotFoundError:
            return None
        return JOURNAL_FILE.decode(data, self.uri)
