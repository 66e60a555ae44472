"""How far the copy of one object got: pure values, written to a journal and read back by a successor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from binidx.json_models import Count, Positive
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

    size: Count
    part_bytes: Positive
    token: str = ""
    sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    done: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        last = -(-self.size // self.part_bytes)
        if any(not 1 <= part <= last for part in self.sent):
            raise ValueError(f"sent: parts {min(self.sent)} to {max(self.sent)}, the object has 1 to {last}")

    @property
    def ranges(self) -> dict[int, Range]:
        """part -> its bytes."""
        return dict(enumerate(cut((0, self.size), self.part_bytes), 1))

    @property
    def complete(self) -> bool:
        """Whether every part was sent."""
        return self.sent.keys() == self.ranges.keys()


def plan_copy(size: int, part_bytes: int = PART_BYTES) -> CopyState:
    """Parts of `part_bytes`, or larger ones where an S3 upload could not hold so many."""
    needed = -(-size // MAX_PARTS)
    whole_mebibytes = -(-needed // (1 << 20)) << 20
    return CopyState(size, max(part_bytes, whole_mebibytes if needed > part_bytes else 0))
