"""Public names of a run's order and provenance; each is imported when it is first used.

Example:
    order = RunOrder.of(binidx.Run.load("run.json"))
    order.table(range(41_200, 41_201), rank=17)        # an Arrow table, a row a sample, with documents and spans
    order.where(0, [12_345_678], stop_step=41_200)     # every step, rank and slot that read a document
    account(order, stop_step=41_200)                   # tokens and epochs of each source
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from binidx.packed.packed_run import Nesting as Nesting
    from binidx.packed.packed_run import PackedRunOrder as PackedRunOrder
    from binidx.packed.packed_run import load_packed_run as load_packed_run
    from binidx.run.provenance.accounts import account as account
    from binidx.run.provenance.baking import bake as bake
    from binidx.run.provenance.baking import plan_bake as plan_bake
    from binidx.run.provenance.run_order import RunOrder as RunOrder

HOMES = {
    "Nesting": "packed.packed_run",
    "PackedRunOrder": "packed.packed_run",
    "RunOrder": "run.provenance.run_order",
    "account": "run.provenance.accounts",
    "bake": "run.provenance.baking",
    "load_packed_run": "packed.packed_run",
    "plan_bake": "run.provenance.baking",
}

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'binidx.order' has no attribute {name!r}")
    return getattr(import_module(f"binidx.{HOMES[name]}"), name)
