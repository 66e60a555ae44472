"""Stand-in for `megatron.core.datasets.utils`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from binidx.dataset.config import Split as Split
from binidx.dataset.config import get_blend_from_list as get_blend_from_list
from binidx.dataset.config import normalize as normalize

logger = logging.getLogger(__name__)


def compile_helpers() -> None:
    """Do nothing: the package contains the compiled C core. (Megatron runs `make`.)"""


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank. Scripts import it from this module; Megatron defines it in `megatron.core.utils`."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == rank:
        logger.log(*args, **kwargs)
