"""Random cases by their number: a few in the suite, the rest in `make soak`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(in_suite: int, in_all: int) -> list[Any]:
    """The values of a parameter."""
    return [*range(in_suite), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(in_suite, in_all))]
