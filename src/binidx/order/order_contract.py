"""Contract of orders as a function, for their implementers: `binidx.testing.check_order`."""

from __future__ import annotations

import json
import pickle
import random

import numpy as np

from binidx.order.blended_order import list_members
from binidx.order.order_protocols import Order


def check_order(order: Order, *, seed: int = 0) -> None:
    """Raise AssertionError unless an order keeps the promises of `Order`; `find` is compared with all spans.

    Args:
        order: of some thousand samples at most; with at least one.
        seed: seed of the random choices.

    Raises:
        AssertionError: a promise is broken; the message says which.

    Example:
        >>> train = binidx.load_dataset("corpus/en", sequence_length=16, order="best_fit")
        >>> check_order(train.wrapped.order)

    Source: ours.
    """
    choose, count = random.Random(seed), len(order)
    samples = np.arange(count)
    require(count > 0, "the order has no sample to check")
    source, number = order.locate(samples)
    members = list_members(order)
    require(len(members) == len(order.sources), "an order of several sources is a ComposedOrder with a member for each")
    require(source.shape == number.shape == (count,), "locate returns a source and a number for each sample")
    require(bool(source.min() >= 0 and source.max() < len(order.sources)), "locate returns an unknown source")
    spans, bounds = order.spans(samples)
    tiled = bounds[0] == 0 and bounds[-1] == len(spans) and bool((np.diff(bounds) >= 0).all())
    require(bool(tiled), "bounds do not hold the spans")
    owner = np.repeat(samples, np.diff(bounds))
    for source_id, (stored, member) in enumerate(zip(order.sources, members, strict=True)):
        own = spans[spans[:, 0] == source_id]
        lengths = stored.dataset.sequence_lengths
        inside = (own[:, 1] >= 0) & (own[:, 1] < len(lengths)) & (own[:, 2] >= 0) & (own[:, 3] >= 0)
        require(bool(inside.all()), f"{stored.name}: a span of a sequence that does not exist")
        ends = own[:, 2] + own[:, 3]
        require(bool((ends <= lengths[own[:, 1]]).all()), f"{stored.name}: a span leaves its sequence")
        of_source = source == source_id
        if of_source.any():
            alone, _ = member.spans(number[of_source])
            same = (alone[:, 1:] == spans[np.isin(owner, samples[of_source])][:, 1:]).all()
            require(bool(same), f"{stored.name}: spans of the numbers that locate returns are other ones")
        chosen = np.array(sorted(choose.sample(range(len(lengths)), min(len(lengths), 5))), np.int64)
        for sequences in (chosen, chosen[:1], chosen[:0], np.arange(len(lengths))):
            hits = (spans[:, 0] == source_id) & np.isin(spans[:, 1], sequences) & (spans[:, 3] > 0)
            needed, answer = np.unique(owner[hits]), order.find(source_id, sequences)
            require(np.array_equal(needed, answer), f"find: found samples {answer[:9]}, all spans have {needed[:9]}")
    shuffled = np.array(choose.sample(range(count), min(count, 50)), np.int64)
    for chosen in (shuffled, shuffled[:1], shuffled[:0]):
        some, own_bounds = order.spans(chosen)
        needed_spans = [spans[bounds[sample] : bounds[sample + 1]] for sample in chosen.tolist()]
        require(np.array_equal(some, np.concatenate([spans[:0], *needed_spans])), "spans depend on the other samples")
        require(np.array_equal(np.diff(own_bounds), [len(rows) for rows in needed_spans]), "bounds of some samples")
    epochs = order.epochs(samples)
    require(epochs.shape == (count,), "epochs returns a number for each sample")
    require(
        bool(epochs.min() >= 0 and epochs.max() < order.num_epochs), f"epochs beyond num_epochs, {order.num_epochs}"
    )
    again: Order = pickle.loads(pickle.dumps(order))
    require(np.array_equal(again.spans(samples)[0], spans), "a pickle of the order is another order")
    require(json.dumps(again.identity) == json.dumps(order.identity), "a pickle of the order has another identity")


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the broken promise unless the condition holds; asserts vanish under -O."""
    if not condition:
        raise AssertionError(message)
