"""State of a loader: one integer, a fingerprint of the order in which it counts, and the samples there are.

    {"consumed_samples": 4194304, "fingerprint": "7adca21e0c51d6f3", "total_samples": 9765625,
     "library": "0.2.0"}

The fingerprint covers the order of the samples, not the files: moved or copied data has the same one; other lengths or
documents, or another seed, split, weight or sequence length, have another. It does not cover the number of samples
requested for the run, as long as these come in the same order; errors name it. `facts` are the values that it covers,
by which errors name what differs; states of before 0.2 have none. Two more keys are compared where both sides have
them: `order`, the identity of the run whose order a baked run stores, and `tokens`, where a file beside the data
describes them: `IndexedDataset.token_digests`. `megatron_samples` names the release of Megatron whose samples were
served, for kinds of which releases make different ones. `library` is the version that wrote the state; it is never
compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from binidx.dataset.served import find_order_option, get_stored_order, identify_order
from binidx.errors import ConfigError
from binidx.loader.dataset_protocols import compare_releases, digest_tokens, find_megatron_samples
from binidx.loader.samplers import MegatronPretrainingRandomSampler, PretrainingSampler, check_consumed_samples
from binidx.order.view import describe_place, find_read, without_view

logger = logging.getLogger(__name__)
State = dict[str, Any]

WALK = ("dataloader_type", "samples", "micro_batch_size", "data_parallel_size", "data_sharding", "surplus_batches")
"""Names of the values of `describe_walk`."""

MOST_CHARACTERS = 80
"""Length of a value up to which a state has it itself."""


def check_state(state: Mapping[str, Any], dataset: Any, sampler: PretrainingSampler) -> int:
    """Return the consumed samples of a state, of a loader over this dataset and sampler.

    Args:
        state: returned by `state_dict` of a loader of the same order, on any number of ranks.
        dataset: of the loader.
        sampler: of the loader.

    Raises:
        ConfigError: not a state, or one of another order or of other tokens.
    """
    try:
        consumed, theirs, order = state["consumed_samples"], state["fingerprint"], state.get("order")
        tokens = [dict(digests) for digests in state.get("tokens", ())]
    except (AttributeError, KeyError, TypeError, ValueError):
        way = "a number of samples, such as Megatron's consumed_train_samples, is the argument consumed_samples"
        raise ConfigError(f"resume: found {state!r}, needs what state_dict() of a loader gave; {way}") from None
    consumed = check_consumed_samples(consumed, None)
    ours = fingerprint(dataset, sampler)
    if theirs != ours:
        size = f" of {state['total_samples']} samples" if "total_samples" in state else ""
        suspects = _compare_facts(state.get("facts"), order_facts(dataset, sampler)) or (
            "check data, split, weights, seed and sequence length, and for a cyclic loader its micro_batch_size and "
            "data_parallel_size, as they are part of its order"
        )
        raise ConfigError(
            f"resume: state is for fingerprint {theirs}{size}, this loader is {ours} of "
            f"{sampler.total_samples} samples; {suspects}{_describe_release(state, dataset)}. "
            f"{_describe_way(consumed, theirs, dataset, sampler)}"
        )
    stored = get_stored_order(dataset)
    if stored is not None and order is None:
        logger.warning("resume: the state does not name the run whose order it counts: check %r", dataset)
    elif stored != order:
        raise ConfigError(
            f"resume: state is for the order {order}, {dataset!r} stores the order {stored}; open the bake of "
            f"that run. To continue all the same, set consumed_samples={consumed}"
        )
    for number, (was, now) in enumerate(zip(tokens, digest_tokens(dataset) if tokens else (), strict=False)):
        if changed := [kind for kind in was.keys() & now.keys() if was[kind] != now[kind]]:
            raise ConfigError(
                f"resume: dataset {number} of this loader has other tokens than the state's ({', '.join(changed)} "
                f"digest); bring the data back. To continue all the same, set consumed_samples={consumed}"
            )
    return consumed


def order_facts(dataset: Any, sampler: PretrainingSampler) -> dict[str, Any]:
    """Return the values that a fingerprint covers, by name: those of all sources of a blend under one name.

    A value that is equal for all sources is stored once, and a long one as its digest.
    """
    found = defaultdict[str, Any](list)

    def collect(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                collect(part, key)
        elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for part in value:
                collect(part, name)
        else:
            found[name].append(value)

    walk = describe_walk(sampler)
    collect(identify_order(dataset), "dataset")
    collect(dict(zip(WALK, walk if isinstance(walk, list) else [walk], strict=False)), "")
    for name, values in found.items():
        text = json.dumps(values if values != values[:1] * len(values) else values[0], default=str)
        found[name] = json.loads(text) if len(text) <= MOST_CHARACTERS else f"digest {_digest(text)}"
    return dict(found)


def _compare_facts(theirs: Any, ours: Mapping[str, Any]) -> str:
    """Return what differs between two orders; "" if the state does not tell."""
    if not isinstance(theirs, dict):
        return ""
    differing = [
        f"{name} ({theirs.get(name, 'none')} in the state, {ours.get(name, 'none')} here)"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    return f"they differ in {', '.join(differing)}" if differing else ""


def _describe_release(state: Mapping[str, Any], dataset: Any) -> str:
    """Return the words of an error on the release of Megatron; none if samples do not depend on it."""
    if (ours := find_megatron_samples(dataset)) is None:
        return ""
    if (theirs := state.get("megatron_samples")) is None:
        return f"; megatron_samples: {ours!r} here; states of before this option need '0.16.1'"
    differing = ", ".join(compare_releases(dataset, theirs)) or "none"
    return f"; megatron_samples: {ours!r} here, {theirs!r} in the state; rules that differ: {differing}"


def fingerprint(dataset: Any, sampler: PretrainingSampler, order: Any = None) -> str:
    """Return the digest of the order in which all ranks together are served, 16 hex digits.

    Args:
        dataset, sampler: of the loader.
        order: identity of another order than that of the dataset.
    """
    text = json.dumps([order or identify_order(dataset), describe_walk(sampler)], sort_keys=True, default=str)
    return _digest(text)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _describe_way(consumed: int, theirs: str, dataset: Any, sampler: PretrainingSampler) -> str:
    """Return how a loader of another order continues a state: by its place in a view of the order, if it is one."""
    option = find_order_option(dataset)
    if option is None:
        return f"To continue all the same, set consumed_samples={consumed}"
    inner = without_view(dataset.order)
    if inner is None or fingerprint(dataset, sampler, inner.identity) != theirs:
        name = type(option).__name__
        return f"No place in {name} continues this run; begin a stage anew of what binidx where --count shows as unread"
    was_read, *_ = find_read([(inner, 0, consumed)], dataset.order)
    text = f"{type(option).__name__} has {was_read.sum():,} of the {consumed:,} samples that were read: "
    return text + describe_place(dataset.order, was_read, sampler.samples_per_step)


def describe_walk(sampler: PretrainingSampler) -> Any:
    """Return the values that a sampler's order depends on; that of a cyclic sampler depends on the topology, too."""
    if not isinstance(sampler, MegatronPretrainingRandomSampler):
        return "single"
    topology = sampler.total_samples, sampler.micro_batch_size, sampler.data_parallel_size
    return ["cyclic", *topology, sampler.data_sharding, sampler.surplus_batches]
