"""binidx.native.arguments: the levels are those that the system itself lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from binidx.native.arguments import LEVEL, LEVELS, Level, runnable

CPUINFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "bmi1", "bmi2", "abm", "popcnt"}
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def listed_level(cpuinfo: str) -> Level:
    """What Linux says of its first processor."""
    lines = dict(line.split(":", 1) for line in cpuinfo.replace("\t", "").splitlines() if ":" in line)
    flags = set(lines.get("flags", "").split())
    if "asimd" in lines.get("Features", "").split():
        return Level.NEON
    return Level.AVX512 if flags >= AVX2 | AVX512 else Level.AVX2 if flags >= AVX2 else Level.PORTABLE


@pytest.mark.skipif(not CPUINFO.exists(), reason="needs Linux")
def test_the_level_is_what_the_system_lists() -> None:
    assert listed_level(CPUINFO.read_text()) == LEVEL


def test_every_level_below_the_best_runs_too() -> None:
    assert LEVELS[0] == Level.PORTABLE
    assert LEVELS[-1] == LEVEL
    assert [runnable(level) for level in LEVELS] == list(LEVELS)
    assert runnable(None) == LEVEL


def test_refuses_a_level_that_this_machine_cannot_run() -> None:
    other = next(level for level in Level if level not in LEVELS)
    with pytest.raises(ValueError, match=rf"level: {other}, this machine runs 0 \(PORTABLE\)"):
        runnable(other)
