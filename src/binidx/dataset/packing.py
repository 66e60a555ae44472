"""Conversations one after the other in a row of S tokens, with the bounds that attention keeps to.

    conversation      A A A A A . B B B B .  C C C C          each ends in EOD
    padded            A A A A A E B B B E p p C C C E         to a multiple of what context parallel ranks share
    row of S + 1      A A A A A E B B B E p p C C C E p p p   what is too long is cut off, what is too short is padded
    cu_seqlens        0           6           12            S

Source: Megatron-LM, `SFTDataset.__getitem__`: the last sequence has the pads at the end; one that begins beyond S is
empty; the label of a row that was cut off is a pad.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Tokenized = tuple[Ids, Ids]
"""Tokens, and what is to be learnt of them: the same, or IGNORE."""

IGNORE = -100


@dataclass(frozen=True)
class Row:
    """Attributes:
    tokens, targets: each of shape (S + 1,).
    positions: of each token in its sequence, shape (S,).
    is_real: not a pad that was put in, shape (S + 1,).
    cu_seqlens: where each sequence begins, and the end, shape (n + 1,) int32.
    """

    tokens: Ids
    targets: Ids
    positions: Ids
    is_real: NDArray[np.bool_]
    cu_seqlens: NDArray[np.int32]


def pack(conversations: Iterable[Tokenized], sequence_length: int, *, eod: int, pad: int, multiple: int = 1) -> Row:
    """One row of conversations, up to the first that does not fit.

    Args:
        conversations: at least one; those behind the end are not asked for.
        sequence_length: S.
        multiple: of it each sequence's length is one, but that of the last, which ends at S.
    """
    lines = np.full((2, sequence_length + 1), pad, np.int64)
    is_real = np.zeros(sequence_length + 1, np.bool_)
    positions, bounds = np.zeros(sequence_length, np.int64), [0]
    for conversation in conversations:
        first, both = bounds[-1], np.stack(ended(*conversation, eod))
        here = both[:, : sequence_length - first]
        lines[:, first : first + here.shape[1]] = here
        is_real[first : first + here.shape[1]] = True
        positions[first:] = np.arange(sequence_length - first)
        bounds.append(first + round_up(both.shape[1], multiple))
        if bounds[-1] > sequence_length:
            break
    bounds[-1] = sequence_length
    return Row(lines[0], lines[1], positions, is_real, np.array(bounds, np.int32))


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-count // multiple) * multiple


def ended(tokens: Ids, targets: Ids, eod: int) -> Tokenized:
    """With an EOD at the end, to be learnt, where there is none yet."""
    if len(tokens) and tokens[-1] == eod:
        return tokens, targets
    return np.append(tokens, eod), np.append(targets, eod)
