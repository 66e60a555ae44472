"""Long windows cut into shorter samples: which part of which window is served when.

    windows of 8 tokens, served in groups of 3        0       1       2       3 ..
    samples of 4 tokens                               0a 0b   1a 1b   2a 2b
    served                                            0a 1a 2a  0b 1b 2b | 3a ..

The parts of a window lie as far apart as a group allows; when a group is over each of its windows was served whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError


def build_window_order(
    num_samples: int, parts: int, group: int, rows: slice | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The window and the part of each sample, both of shape (num_samples,), or of those in `rows`.

    Args:
        num_samples: a multiple of parts: whole windows.
        parts: samples of a window.
        group: windows whose parts are served in turn; the last group may have fewer.
        rows: from a sample to another.

    Raises:
        IndexBuildError: not whole windows, or groups of nothing.

    Source: ours.
    """
    if parts < 1 or group < 1 or num_samples < 0 or num_samples % parts:
        raise IndexBuildError(
            f"windows: {num_samples} samples, {parts} a window, {group} in a group; needs whole windows"
        )
    sample = np.arange(num_samples) if rows is None else np.arange(rows.start, rows.stop)
    first = sample // (group * parts) * group
    width = np.minimum(group, num_samples // parts - first)
    within = sample - first * parts
    return first + within % width, within // width
