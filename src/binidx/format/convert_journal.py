"""What a convert leaves beside its target so that the next one goes on: `TARGET.convert.json`.

    {"binidx_convert": 2,
     "owner": who writes it now,
     "source": {"uri": ..., "bin": identity, "idx": identity, "way": how it is to be stored},
     "objects": {"bin" or "bin.zst": CopyState, "bin.xxh3": CopyState, "idx": CopyState}}      those that were begun

It is there while a copy is under way or broken off, and gone once the dataset stands. Each run writes its own name as
the owner before anything else, and looks again before each later save: whoever finds another name there has been
overtaken and stops. Two runs with one source write the same bytes to the same parts, so the time between is harmless.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.json_models import JsonFile
from binidx.storage.checksums import SUFFIX
from binidx.storage.copy_state import CopyState
from binidx.storage.parts import forget_parts, sweep
from binidx.storage.publish import create_object, delete_object
from binidx.storage.segments import CODECS
from binidx.storage.transfer import read_document

BINS = tuple(f"bin{codec.suffix}" for codec in CODECS.values())
ENDS = (*BINS, f"bin{SUFFIX}", "idx")
"""The objects of a dataset, in the order in which they are written: data first, index last."""


@dataclass(frozen=True)
class JournalFile:
    """The fields of the file besides its version."""

    owner: str
    source: dict[str, Any]
    objects: dict[str, CopyState]


JOURNAL_FILE = JsonFile(JournalFile, {"binidx_convert": 2})


class ConvertJournal:
    """The journal of one target.

    Args:
        target: prefix of the target.
        source: what identifies the source: its URI, the identity of both objects, and how they are to be stored.
        storage_options: fsspec's own, of the target.

    Attributes:
        states: how far each object got, by its end, one of `ENDS`.
        published: identity of the .bin that an earlier run, of whatever source, had verified.
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
            "none": there was no earlier run. "ours": its states are ours now. "other": it had another source, or the
            source has changed, or nobody can read it; nothing is taken over.
        """
        try:
            found = self._read()
            if found is None:
                return "none"
        except FormatError:
            return "other"
        self.published = next((found.objects[end].done for end in BINS if end in found.objects), None)
        if found.source != self.source:
            return "other"
        self.states = {end: found.objects[end] for end in ENDS if end in found.objects}
        return "ours"

    def forget_other(self) -> None:
        """Remove what the earlier run, which is not ours, had sent: its partial files, its uploads."""
        try:
            found = self._read()
        except FormatError:
            return
        for end in ENDS:
            if found is not None and end in found.objects:
                forget_parts(f"{self.target}.{end}", found.objects[end].token, self._options)

    def save(self) -> None:
        """Write it, as ours.

        Raises:
            ObjectChangedError: another run has written it since we did.
        """
        if self._claimed:
            self.check_ours()
        text = json.dumps({**JOURNAL_FILE.tags, **asdict(JournalFile(self._owner, self.source, self.states))})
        with create_object(self.uri, self._options) as writer:
            writer.write(text.encode())
        self._claimed = True

    def check_ours(self) -> None:
        """ObjectChangedError unless the journal is as we left it."""
        try:
            found = self._read()
        except FormatError:
            found = None
        if found is None or found.owner != self._owner:
            raise ObjectChangedError(f"{self.uri}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """The dataset stands, or must begin again."""
        delete_object(self.uri, self._options)
        for end in ENDS:
            sweep(f"{self.target}.{end}", ".partial")
        sweep(self.uri, ".tmp")

    def _read(self) -> JournalFile | None:
        try:
            data = read_document(JOURNAL_FILE, self.uri, self._options)
        except ObjectNotFoundError:
            return None
        return JOURNAL_FILE.decode(data, self.uri)
