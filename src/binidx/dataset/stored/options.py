"""Options of a run that decide on the order of its samples, as read plans and bakes record them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from binidx.dataset.affects import described_fields, words_of
from binidx.dataset.config import GPTDatasetConfig, Split, WrittenPaths
from binidx.errors import ConfigError, redacted_text
from binidx.order.order_options import find_kind
from binidx.storage.location import Location

IN_ANOTHER_FORM = {"split", "order", "tokenizer"}
"""Fields that names of plans have as bookends, and as the text of the order; the tokenizer in no form, since it has no
text that is the same in each process, and moves no token of stored data."""


def hashed_fields(config: GPTDatasetConfig, split: Split) -> tuple[list[str], set[str]]:
    """Return the fields of a config in the names of early plans, and those of them that today's names lack.

    Early names have all fields but those of places and of the start. Today's lack those that move no token of the split
    in the kinds that have plans. Both have all fields of a subclass, whatever they affect, as stored plans do.
    """
    known = described_fields(GPTDatasetConfig)
    ways = {name for name, option in known.items() if words_of(option) & {"place", "start"}} | IN_ANOTHER_FORM
    lacking = {name for name, option in known.items() if "order" not in words_of(option, split.name)}
    return [option.name for option in fields(config) if option.init and option.name not in ways], lacking


def hashed_options(config: GPTDatasetConfig, split: Split) -> dict[str, Any]:
    """Return the fields of early names of plans but kind and number of samples: what decides on the order of a split.

    Args:
        config: options of the run.
        split: the split.

    Returns:
        Values by name; without `order` if its class has no name, so that no text stands for it.
    """
    early: dict[str, Any] = {name: getattr(config, name) for name in hashed_fields(config, split)[0]}
    blend = config.blend if config.blend_per_split is None else config.blend_per_split[split.value]
    is_named = config.order is None or find_kind(config.order) is not None
    order = config.order.pinned(config.storage_options).to_json() if config.order and is_named else None
    bookends = config.split_matrix and config.split_matrix[split.value]
    prefixes, weights = blend or ([], None)
    early |= {"prefixes": [*map(config.as_written, prefixes)], "weights": weights}
    return early | {"bookends": bookends, **({"order": order} if is_named else {}), "split": split.name}


def describe_options(config: GPTDatasetConfig, split: Split) -> dict[str, Any]:
    """Return what a stored run records of its config: the options that move a token, with absolute prefixes.

    Args:
        config: config of the run.
        split: the split that is stored.

    Returns:
        JSON values by name.
    """
    opened, lacking = replace(config, written_paths=WrittenPaths()), hashed_fields(config, split)[1]
    options = {name: value for name, value in hashed_options(opened, split).items() if name not in lacking}
    options["prefixes"] = [Location(prefix, config.storage_options).absolute for prefix in options["prefixes"]]
    described: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return described


def check_options(found: Mapping[str, Any], config: GPTDatasetConfig, uri: str) -> None:
    """Raise ConfigError unless a config asks for the order of a stored run.

    Fields that only one of both has are not compared: they are those of another version, or of a subclass.

    Args:
        found: `options` of the stored run.
        config: options of the run.
        uri: of the description.
    """
    needed = describe_options(config, Split[found["split"]])
    if wrong := [*_differences(found, needed)]:
        way = "give the config of the run that was stored, or store this one in another directory"
        raise ConfigError(redacted_text(f"{uri}: is of another order: {'; '.join(wrong)}; {way}"))


def _differences(found: Mapping[str, Any], needed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each field whose values differ; of lists that are equally long for the first such item."""
    for name in sorted(found.keys() & needed.keys()):
        one, other = found[name], needed[name]
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(one, other, strict=False)
            one, other = next((pair for pair in pairs if pair[0] != pair[1]), (f"{len(one):,}", f"{len(other):,}"))
        if one != other:
            way = ": if it is the same data, mount or link it where it was and name that" if name == "prefixes" else ""
            yield f"{name} (found {one}, the config has {other}){way}"
