"""A run that grows: which requests share one order, so that the arrays that are there serve the new one too.

Of one split, seed and sequence length S, everything is a function of two values of the `EpochPlan`:

    num_epochs E              the documents are written out E times, then shuffled all together
    separate_final_epoch      ... the first E - 1 together, the last by itself, where the last serves under 80 %

The samples that were asked for decide these two and nothing else: all arrays have room for every sample of E epochs. So
with T tokens an epoch, x the extra token, c samples an epoch and b samples before the last:

    samples asked    (E-1)T/S ................................ ET/S
    order            | E, separate      | E, together          |
                                b + int(0.80 c)

Within a stretch the arrays are the same to the last bit. Across its ends no sample keeps its place: the generator has
drawn another number of times before it shuffles them. (The document index of E epochs together is the beginning
of that of E + 1 with a separate last one, the shuffle index is not.) What a blend draws first does not depend on how
much it draws in all, so a longer blend begins with the shorter one, as long as its weights are the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import FormatError
from binidx.index.epochs import SEPARATE_BELOW, EpochPlan
from binidx.json_models import JsonFile

MOST_ORDERS = 16
"""How many orders of the same data a directory remembers."""


@dataclass(frozen=True)
class Order:
    """What decides the arrays of one split, seed and sequence length, and the requests that lead to it.

    fewest, most: samples asked for, both included.
    """

    num_epochs: int
    separate_final_epoch: bool
    fewest: int
    most: int

    @property
    def fields(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs, "separate_final_epoch": self.separate_final_epoch}

    def __str__(self) -> str:
        return in_words(self.fields)


@dataclass(frozen=True)
class Known:
    """An index in a directory: its name there, its order, and the most samples that this order serves."""

    name: str
    order: dict[str, Any]
    most: int

    def __post_init__(self) -> None:
        if not self.order.keys() >= {"num_epochs", "separate_final_epoch"}:
            raise ValueError(f"order: found {', '.join(self.order) or 'nothing'}, needs the fields of an order")


@dataclass(frozen=True)
class KnownFile:
    """The fields of the file."""

    indices: list[Known]


KNOWN_FILE = JsonFile(KnownFile, open=True)


def order_of(plan: EpochPlan, sequence_length: int, *, add_extra_token: bool) -> Order:
    """The order of a plan, and every `num_samples` that would lead to the same."""
    per_epoch = max(plan.tokens_per_epoch - add_extra_token, 0) // sequence_length
    before = plan.num_samples_sans_final_epoch
    threshold = before + int(SEPARATE_BELOW * per_epoch)
    # Requests of E epochs: those whose tokens do not fit into E - 1, and do into E.
    fewest = max(0, (plan.num_tokens - plan.tokens_per_epoch - add_extra_token) // sequence_length + 1)
    most = max(0, (plan.num_tokens - add_extra_token) // sequence_length)
    if plan.num_epochs == 1:
        fewest = 0
    elif plan.separate_final_epoch:
        most = min(most, threshold - 1)
    else:
        fewest = max(fewest, threshold)
    return Order(plan.num_epochs, plan.separate_final_epoch, fewest, most)


def in_words(order: dict[str, Any]) -> str:
    """For people who plan a run."""
    epochs = order["num_epochs"]
    if epochs == 1:
        return "1 epoch"
    last = ", the last shuffled by itself" if order["separate_final_epoch"] else ", shuffled together"
    return f"{epochs} epochs{last}"


def twins(known: Sequence[Known], order: Order, name: str) -> list[str]:
    """The names of indices that hold the same arrays."""
    return [each.name for each in known if each.order == order.fields and each.name != name]


def change_in_words(known: Sequence[Known], order: Order, name: str) -> str:
    """What it means for a run that only indices of other orders are there; empty where there are none.

    Args:
        name: of the index, `{hash}-{class}-{split}`. Splits may be of the same data, and one does not grow out of
            another.
    """
    mine = name.partition("-")[2]
    others = [each for each in known if each.order != order.fields and each.name.partition("-")[2] == mine]
    if not others:
        return ""
    last = others[-1]
    return (
        f"this run reads {order}; the index before it {in_words(last.order)}, up to {last.most} samples. Documents are "
        "shuffled over all their epochs, so each sample gets another place: a run that resumes across this change sees "
        f"some samples again and others never. The order of now holds for {order.fewest} to {order.most} samples"
    )


def with_index(known: Sequence[Known], name: str, order: Order) -> list[Known]:
    """The record with one more index, the newest last."""
    rest = [each for each in known if each.name != name]
    return [*rest, Known(name, order.fields, order.most)][-MOST_ORDERS:]


def format_known(known: Sequence[Known]) -> bytes:
    return json.dumps({"indices": [vars(each) for each in known]}, indent=1).encode()


def parse_known(data: bytes) -> list[Known]:
    """What `format_known` wrote; nothing where it is anything else, since all that a record does is save work."""
    try:
        return KNOWN_FILE.decode(data, "").indices
    except FormatError:
        return []
