"""Spikes of the losses of a stretch of steps, by their formula, step by step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np


def mixture_losses(rows: dict[int, Any], sources: Any, losses: Any) -> dict[int, float]:
    """E of the formula for the steps of a stretch; of each step, the rows of its samples."""
    of_steps = defaultdict[int, list[float]](list)
    for own in rows.values():
        for source in set(sources[own].tolist()):
            known = [float(losses[row]) for row in own if sources[row] == source and np.isfinite(losses[row])]
            of_steps[source] += [float(np.mean(known))] if known else []
    level = {source: np.median(of_steps[source]) if of_steps[source] else 0.0 for source in set(sources.tolist())}
    added = {step: float(np.mean([level[source] for source in sources[own].tolist()])) for step, own in rows.items()}
    return {step: value - np.mean([*added.values()]) for step, value in added.items()}


def limits_of(mean: dict[int, float], added: dict[int, float], window: int, k: float) -> dict[int, float]:
    """Steps of a stretch above their limit, and the limit."""
    steps, limits = [*mean], dict[int, float]()
    for place, step in enumerate(steps[10:], 10):
        before = np.array([mean[each] - added[each] for each in steps[max(place - window, 0) : place]])
        median = np.nanmedian(before)
        limit = added[step] + median + k * 1.4826 * np.nanmedian(np.abs(before - median))
        if not mean[step] <= limit + 1e-6:
            limits[step] = limit
    return limits


def neighbours(steps: list[int], above: list[int]) -> list[tuple[int, int]]:
    """First and last of the steps above their limit that follow each other among all steps with losses."""
    found = list[tuple[int, int]]()
    for step in above:
        if found and steps.index(found[-1][1]) + 1 == steps.index(step):
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found
