"""Adapter of users' low-level datasets: anything with `get` and `sequence_lengths` is read like a `.bin`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.megatron.mock import ComputedTokens
from binidx.dataset.megatron.ordered_dataset import own_methods
from binidx.format.tokens import StoredTokens


def adapt(dataset: Any) -> Any:
    """Return a user's low-level dataset with binidx's interface; a binidx one, or another kind of object, as it is."""
    if not hasattr(dataset, "get") or not hasattr(dataset, "sequence_lengths"):
        return dataset
    ours = isinstance(dataset, StoredTokens | ComputedTokens) and not own_methods(type(dataset), "get")
    return dataset if ours else LowLevel(dataset)


class LowLevel(ComputedTokens):
    """User's low-level dataset with the interface of binidx's; all other attributes are those of the user's object.

    Args:
        own: the user's object, with `get(idx, offset, length)` and `sequence_lengths` (num_sequences,).
        lengths: the sequence lengths, if they are known.
    """

    def __init__(self, own: Any, lengths: NDArray[np.int32] | None = None) -> None:
        self.own = own
        if lengths is None:
            lengths = np.ascontiguousarray(own.sequence_lengths, np.int32)
        super().__init__(str(getattr(own, "path_prefix", type(own).__name__)), np.int64, lengths)

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # looked up while it is unpickled
            raise AttributeError(name)
        return getattr(self.own, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LowLevel, (self.own, self.sequence_lengths)  # unpickling must not open what the user's reads

    def __getitem__(self, idx: Any) -> Any:
        return self.own[idx]

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> Any:
        return self.own.get(idx, offset, length)

    def _compute(self, sequence: int, first: int, count: int) -> NDArray[Any]:
        return np.asarray(self.own.get(sequence, offset=first, length=count))
