"""Whatever holds tokens -> one flat array of the stored type, or an error: no value is changed on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.format.idx import stored


def as_tokens(tokens: Any, dtype: DTypeLike, subject: str) -> NDArray[Any]:
    """Tokens as they will lie in the file: flat, contiguous, little-endian.

    An array of the right type passes without a copy or a look at its values; any other is checked, at the price of a
    pass or two over it.

    Args:
        tokens: an array of any shape, a torch tensor on the CPU, a list, anything NumPy takes.
        dtype: the type of the dataset.
        subject: who asks, for the message.

    Raises:
        FormatError: a value the type does not hold: 70000, -1 or 0.5 for uint16. Floats may be rounded to float32.

    Source: us. Megatron casts: 70000 becomes 4464 in uint16, and 0.5 becomes 0.
    """
    needed = stored(dtype)
    # A torch tensor says .numpy(), which shares its memory; asking so needs no import of torch.
    found = np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens)
    rounds = needed.kind == "f" and found.dtype.kind in "iu"  # which NumPy calls safe
    if found.size and (rounds or not np.can_cast(found.dtype, needed)):
        _check_values(found.reshape(-1), needed, subject)
    return np.ascontiguousarray(found, needed).reshape(-1)


def _check_values(found: NDArray[Any], needed: np.dtype[Any], subject: str) -> None:
    if found.dtype.kind not in "iuf":
        raise FormatError(f"{subject}: tokens of type {found.dtype}, needed numbers of at most 64 bits")
    low, high = _limits(found.dtype, needed)
    unfit = (found < low) | (found > high)
    if needed.kind != "f" and found.dtype.kind == "f":
        wide = found.astype(np.float64)  # where high + 1 is exact; high itself rounds up to it in int64's case
        unfit |= (wide != np.trunc(wide)) | (wide >= high + 1)
    if unfit.any():
        first = int(unfit.argmax())
        raise FormatError(f"{subject}: token {found[first]} at position {first}, {needed.name} holds {low} to {high}")


def _limits(found: np.dtype[Any], needed: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the greatest value of `found` that `needed` holds."""
    if needed.kind != "f":
        return np.iinfo(needed).min, np.iinfo(needed).max
    if found.kind == "f":
        return -np.finfo(needed).max, np.finfo(needed).max
    exact = 2 ** (np.finfo(needed).nmant + 1)  # from here on a float skips integers
    return -exact, exact
