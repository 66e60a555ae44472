"""Dataset of a run with a read plan: its samples, from the run's own tokens and without any index.

position ─ rows of the plan ─►  byte ranges of each `.bin` ─ one vectored read ─►  rows of the batch

Source: ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import xxhash

from binidx.dataset.affects import described_fields, words_of
from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.stored.baked import StoredRunDataset
from binidx.dataset.token_dataset import SourceRows, SourceTokens
from binidx.dataset.torch_bridge import is_first_rank
from binidx.errors import ObjectChangedError, ObjectNotFoundError, redacted
from binidx.order.stored.planned_order import PlannedRequest
from binidx.storage.location import Location

logger = logging.getLogger(__name__)

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


def locate_plans(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> list[Location]:
    """Return where the plan of a split is that belongs to a config: its place, then that of early versions of binidx.

    The list is empty without a `path_to_cache`, and for a list of validation sets.

    Args:
        kind: recorded name of the class of the datasets.
        config: options of the run.
        split: the split.
        num_samples: the least number of samples of the split; None is one epoch.
    """
    blend = config.blend if config.blend_per_split is None else config.blend_per_split[split.value]
    is_list = config.multiple_validation_sets and split is Split.valid
    if config.path_to_cache is None or blend is None or is_list:
        return []
    names, lacking = hashed_fields(config, split)
    early: dict[str, Any] = {name: getattr(config, name) for name in names}
    order = config.order and config.order.pinned(config.storage_options).to_json()
    bookends = config.split_matrix and config.split_matrix[split.value]
    prefixes = [config.as_written(prefix) for prefix in blend[0]]
    early |= {"kind": kind, "prefixes": prefixes, "weights": blend[1], "bookends": bookends, "order": order}
    early |= {"split": split.name, "num_samples": num_samples}
    cache, now = Location(config.path_to_cache, config.storage_options), early.keys() - lacking
    both = [json.dumps({name: early[name] for name in kept}, sort_keys=True, default=str) for kept in (now, early)]
    return [cache / f"{xxhash.xxh3_128_hexdigest(text.encode())}-{split.name}-read-plan" for text in both]


class PlannedDataset(StoredRunDataset):
    """Dataset of a run whose read plan `binidx prepare read-plan` has written.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError. No `.idx` and no index is opened: a process reads
    the description of the plan, the rows that it needs, and the tokens, in the version of which the plan was made. It
    opens each file at its first use.

    The state of a loader over it is that of a loader over the run's own dataset, if that has the "single" sampler.

    Args:
        directory: URI of the read plan.
        config: config of the run. It names the data that may be read; sequence_length, extra token and masks must be
            the run's.

    Attributes:
        order_identity: identity of the samples and their order, in JSON values: that of the run's own dataset, if its
            sampler is "single".

    Raises:
        ConfigError: the config has another sequence_length or extra token, or does not name a prefix of the plan.
        FormatError: the description is invalid. On read: rows are damaged.
        ObjectNotFoundError: the description is missing: the plan is not finished. On read: a file with tokens is.
        ObjectChangedError: on read, a file with tokens is another one than that of which the plan was made.

    Example:
        >>> dataset = binidx.PlannedDataset("s3://corpus/plan", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "PlannedDataset"

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        folder = Location(directory, config.storage_options)
        super().__init__(directory, config, PlannedRequest(folder, config.prefixes))
        self.order_identity = self.order.identity

    def _read(self, parts: Sequence[SourceRows]) -> list[SourceTokens]:
        try:
            return super()._read(parts)
        except (ObjectChangedError, ObjectNotFoundError) as error:
            again = "is of the data as it was; bring that back, or write the plan again with binidx prepare read-plan"
            raise type(error)(f"{error}; the read plan {self.directory} {again}") from error


def open_plan(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> PlannedDataset | None:
    """Open the plan of a split, with the arguments of `locate_plans`; log its name if there is none."""
    places = locate_plans(kind, config, split, num_samples)
    for folder in places:
        with contextlib.suppress(ObjectNotFoundError):
            return PlannedDataset(folder.uri, config)
    if places and num_samples != 0 and is_first_rank():
        logger.warning(
            "%s: no read plan, so each .idx is read; binidx prepare read-plan writes it", redacted(places[0].uri)
        )
    return None
