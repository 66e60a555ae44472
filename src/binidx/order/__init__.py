"""Orders: the tokens of each sample, as values that read none.

`RunOrder`, `account`, `bake` and the other names that this package had are in `binidx` or `binidx.packed`; here they
give a warning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

MOVED = dict.fromkeys(("RunOrder", "account", "bake", "plan_bake"), "binidx")
MOVED |= dict.fromkeys(("Nesting", "PackedRunOrder", "load_packed_run"), "binidx.packed")


def __getattr__(name: str) -> Any:
    if name not in MOVED:
        raise AttributeError(f"module 'binidx.order' has no attribute {name!r}")
    import warnings

    warnings.warn(f"binidx.order.{name} is {MOVED[name]}.{name} now", DeprecationWarning, stacklevel=2)
    return getattr(import_module(MOVED[name]), name)
