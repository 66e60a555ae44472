"""Answers about a dataset of any class, for loaders and runs; of a user's own dataset only its class is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from binidx.dataset.config import Split
from binidx.dataset.megatron.ordered_dataset import OrderedDataset
from binidx.dataset.stored.baked import BakedDataset, StoredRunDataset
from binidx.dataset.stored.planned import PlannedDataset
from binidx.index.cache.index_files import recorded_name
from binidx.order.order_options import OrderOption


def list_parts(dataset: Any) -> Sequence[Any]:
    """Return the dataset of each source of a dataset or blend; none of a user's own, or of a stored run."""
    return dataset.parts if isinstance(dataset, OrderedDataset) else []


def get_sequence_length(dataset: Any) -> int:
    """Return the number of tokens of a sample; 0 for a user's own dataset."""
    return int(dataset.config.sequence_length) if isinstance(dataset, OrderedDataset | StoredRunDataset) else 0


def get_split(dataset: Any) -> Split | None:
    """Return the split of a dataset or blend of this library; None for a user's own, or if a stored run has no name."""
    options = dataset.stored.options if isinstance(dataset, StoredRunDataset) else None
    parts: Any = list_parts(dataset)
    split: Split | None = parts[0].index_split if parts else Split[options["split"]] if options else None
    return split


def find_order_option(dataset: Any) -> OrderOption | None:
    """Return the option `order` of the config of a dataset or blend; None if there is none."""
    return dataset.config.order_option if isinstance(dataset, OrderedDataset) else None


def identify_order(dataset: Any) -> Any:
    """Return all values that the samples and their order depend on; for a user's own dataset, its class and length."""
    if isinstance(dataset, OrderedDataset | PlannedDataset):
        return dataset.order_identity
    return [recorded_name(type(dataset)), len(dataset)]


def get_stored_order(dataset: Any) -> str | None:
    """Return the identity of the order in which a dataset is stored; None if its order is its own."""
    return dataset.stored.fingerprint if isinstance(dataset, BakedDataset) else None
