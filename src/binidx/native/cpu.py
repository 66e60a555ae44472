"""Which vector paths this machine can run: `native/cpu.c`."""

from __future__ import annotations

from enum import IntEnum

from binidx._native import lib


class Level(IntEnum):
    """A vector level of the C core; every level gives the same result."""

    PORTABLE = lib.BINIDX_PORTABLE
    AVX2 = lib.BINIDX_AVX2
    AVX512 = lib.BINIDX_AVX512
    NEON = lib.BINIDX_NEON


LEVEL = Level(lib.binidx_cpu_level())
"""The best of this machine."""

LEVELS = {
    Level.PORTABLE: (Level.PORTABLE,),
    Level.AVX2: (Level.PORTABLE, Level.AVX2),
    Level.AVX512: (Level.PORTABLE, Level.AVX2, Level.AVX512),
    Level.NEON: (Level.PORTABLE, Level.NEON),
}[LEVEL]
"""All that this machine can run."""


def runnable(level: int | None) -> int:
    """`level` as C takes it, LEVEL for None.

    Raises:
        ValueError: this machine would die of its instructions.
    """
    if level is None:
        return LEVEL
    if level not in LEVELS:
        raise ValueError(f"level: {level}, this machine runs {', '.join(f'{each} ({each.name})' for each in LEVELS)}")
    return level
