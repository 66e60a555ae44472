"""WHO SAW WHAT: which sample is read at which step, by whom, and which documents are in it.

    order = RunOrder.of(binidx.Run.load("run.json"))
    order.table(range(41_200, 41_201), rank=17)        an Arrow table, a row a sample, with documents and spans
    order.where(0, [12_345_678], stop_step=41_200)     every step, rank and slot that saw a document
    account(order, stop_step=41_200)                   tokens and epochs of each source

The commands trace, where, order, account and bake are these calls with a face.
"""

from binidx.order.accounts import account
from binidx.order.baking import bake, plan_bake
from binidx.order.nesting import Nesting
from binidx.order.packed_description import load_packed_run
from binidx.order.packed_run import PackedRunOrder
from binidx.order.run_order import RunOrder

__all__ = ["Nesting", "PackedRunOrder", "RunOrder", "account", "bake", "load_packed_run", "plan_bake"]
