"""How far the copy of one object got: pure values, written to a journal and read back by a successor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from binidx.storage.parts import MAX_PARTS
from binidx.storage.ranges import Range, cut

PART_BYTES = 8 << 20


@dataclass
class CopyState:
    """How far the copy of one object got, in JSON values.

    Attributes:
        size: bytes of the source.
        part_bytes: of each part but the last.
        token: what `open_parts` continues with.
        sent: part -> (digest, tag).
        done: identity of the target once it stands there verified.
    """

    size: int
    part_bytes: int
    token: str = ""
    sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    done: dict[str, Any] | None = None

    @property
    def ranges(self) -> dict[int, Range]:
        """part -> its bytes."""
        return dict(enumerate(cut((0, self.size), self.part_bytes), 1))

    @property
    def complete(self) -> bool:
        """Whether every part was sent."""
        return self.sent.keys() == self.ranges.keys()

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CopyState:
        """What `to_json` gave; KeyError, TypeError or ValueError for anything else."""
        size, part_bytes = int(values["size"]), int(values["part_bytes"])
        sent = {int(part): (str(digest), str(tag)) for part, (digest, tag) in values["sent"].items()}
        state = cls(size, part_bytes, str(values["token"]), sent, values["done"])
        if part_bytes < 1 or not sent.keys() <= state.ranges.keys():
            raise ValueError("parts outside the object")
        return state


def plan_copy(size: int, part_bytes: int = PART_BYTES) -> CopyState:
    """Parts of `part_bytes`, or larger ones where an S3 upload could not hold so many."""
    needed = -(-size // MAX_PARTS)
    whole_mebibytes = -(-needed // (1 << 20)) << 20
    return CopyState(size, max(part_bytes, whole_mebibytes if needed > part_bytes else 0))
