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
from typing import Any

from binidx.errors import ObjectChangedError, ObjectNotFoundError
from binidx.storage.backends import open_object
from binidx.storage.checksums import SUFFIX
from binidx.storage.copy_state import CopyState
from binidx.storage.parts import forget_parts, sweep
from binidx.storage.publish import create_object, delete_object
from binidx.storage.segments import CODECS
from binidx.storage.transfer import read_whole

BINS = tuple(f"bin{codec.suffix}" for codec in CODECS.values())
ENDS = (*BINS, f"bin{SUFFIX}", "idx")
"""The objects of a dataset, in the order in which they are written: data first, index last."""


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
            objects = found["objects"]
            self.published = next((objects[end]["done"] for end in BINS if end in objects), None)
            if found["source"] != self.source:
                return "other"
            self.states = {end: CopyState.from_json(objects[end]) for end in ENDS if end in objects}
        except (KeyError, TypeError, ValueError, AttributeError):
            return "other"
        return "ours"

    def forget_other(self) -> None:
        """Remove what the earlier run, which is not ours, had sent: its partial files, its uploads."""
        try:
            found = (self._read() or {}).get("objects", {})
            for end in ENDS:
                if end in found:
                    forget_parts(f"{self.target}.{end}", str(found[end]["token"]), self._options)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def save(self) -> None:
        """Write it, as ours.

        Raises:
            ObjectChangedError: another run has written it since we did.
        """
        if self._claimed:
            self.check_ours()
        states = {end: state.to_json() for end, state in self.states.items()}
        text = json.dumps({"binidx_convert": 2, "owner": self._owner, "source": self.source, "objects": states})
        with create_object(self.uri, self._options) as writer:
            writer.write(text.encode())
        self._claimed = True

    def check_ours(self) -> None:
        """ObjectChangedError unless the journal is as we left it."""
        try:
            found = self._read()
        except ValueError:
            found = None
        if found is None or found.get("owner") != self._owner:
            raise ObjectChangedError(f"{self.uri}: written by another convert to this target; this one stops")

    def remove(self) -> None:
        """The dataset stands, or must begin again."""
        delete_object(self.uri, self._options)
        for end in ENDS:
            sweep(f"{self.target}.{end}", ".partial")
        sweep(self.uri, ".tmp")

    def _read(self) -> dict[str, Any] | None:
        try:
            data = read_whole(open_object(self.uri, storage_options=self._options, cache=False))
        except ObjectNotFoundError:
            return None
        found = json.loads(bytes(data))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found
