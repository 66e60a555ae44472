"""Stand-in for `megatron.core.datasets.utils`."""

from __future__ import annotations

from binidx.dataset.blend_arguments import get_blend_from_list as get_blend_from_list
from binidx.dataset.config import Split as Split
from binidx.index.blend import normalize as normalize


def compile_helpers() -> None:
    """Do nothing: the package contains the compiled C core. (Megatron runs `make`.)"""
