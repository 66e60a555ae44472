"""As much of Megatron-LM's `megatron.training` as its scripts ask for their data: the global arguments."""

from __future__ import annotations

from argparse import Namespace

_ARGS = Namespace()


def get_args() -> Namespace:
    return _ARGS
