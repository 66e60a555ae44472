"""Orders: the tokens of each sample, as values that read none.

`RunOrder`, `account`, `bake` and the other names that this package had are in `binidx` or `binidx.packed`; here they
give a warning.
"""

from __future__ import annotations

from typing import Any

from binidx.lazy_names import load_moved

MOVED = dict.fromkeys(("RunOrder", "account", "bake", "plan_bake"), "binidx")
MOVED |= dict.fromkeys(("Nesting", "PackedRunOrder", "load_packed_run"), "binidx.packed")


def __getattr__(name: str) -> Any:
    if name not in MOVED:
        raise AttributeError(f"module 'binidx.order' has no attribute {name!r}")
    return load_moved("binidx.order", name, MOVED[name])
