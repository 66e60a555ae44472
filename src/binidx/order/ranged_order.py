"""Megatron's order of one source, of whose cached index only the ranges that a query needs are read.

manifest ─► its arrays and the .idx, pinned ─► shuffle_index of the samples ─► their rows of sample_index
         ─► their slices of document_index ─► lengths of these sequences           four round trips
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from binidx.forks import opened_once
from binidx.format.idx import CheckedIndex, get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import Tokens
from binidx.index.cache.index_cache import has_fingerprint
from binidx.index.cache.manifest import ONE_EACH, Manifest, get_origin
from binidx.index.document_sample import EpochPlan
from binidx.index.documents import Documents
from binidx.index.gpt_indices import ARRAYS
from binidx.order.gpt_order import GPTOrder, GPTParameters
from binidx.order.opener import IndexOptions
from binidx.order.order_protocols import Source
from binidx.order.source_order import SourceOrder, StoredSource
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import recorded_object
from binidx.storage.stores.identity import same_object


def open_ranges(
    parameters: GPTParameters,
    prefix: Location,
    name: str,
    split_documents: Callable[[int], Documents],
    options: IndexOptions,
) -> GPTOrder | None:
    """Open an order to read ranges of its index.

    Args:
        parameters: options of the order.
        prefix: of the data.
        name: the prefix, as the user wrote it.
        split_documents: function of the number of sequences; returns those of the split.
        options: of the cache.

    Returns:
        The order; None if no index is cached, or its arrays cannot be proven to belong to the manifest.
    """

    def open_source(manifest: Manifest) -> bool:
        """Open the sequences that an index was built from; return False if it has other options or other data."""
        content, recorded = manifest.content, manifest.data.get("idx")
        num_sequences = int(content["num_sequences"])
        checked = CheckedIndex(
            num_sequences,
            content["index_digest"],
            content.get(ONE_EACH, False),
            recorded_object(get_idx_path(prefix.uri), recorded),
        )
        documents = split_documents(num_sequences)
        if not has_fingerprint(manifest, parameters.fingerprint(documents)):
            return False
        mmap = options.opener.mmap
        dataset = IndexedDataset(prefix.uri, mmap=mmap, storage_options=prefix.options, checked=checked)
        if not same_object(recorded, get_origin(dataset).data()["idx"]):
            return False
        opened.append(StoredSource(name, dataset, documents))
        return True

    opened: list[Source] = []
    arrays = options.cache().open_ranges(ARRAYS, open_source)
    return None if arrays is None else GPTOrder(parameters, opened[-1], arrays)


class LazySource:
    """Source of an order that is opened at the first use; threads may use it at once. Implements `Source`.

    Args:
        name: prefix, as the user wrote it.
        prefix: prefix of the data, as it is opened.
        open_order: opens the order at the first use; it is pickled, the opened order is not.
    """

    def __init__(self, name: str, prefix: str, open_order: Callable[[], SourceOrder]) -> None:
        self.name, self.prefix, self.open_order = name, prefix, open_order

    def __reduce__(self) -> tuple[Any, ...]:
        return LazySource, (self.name, self.prefix, self.open_order)

    @opened_once
    def order(self) -> GPTOrder:
        """The opened order."""
        return cast(GPTOrder, self.open_order())

    @property
    def dataset(self) -> Tokens:
        return self.order.source.dataset

    @property
    def sequences(self) -> Documents:
        return self.order.source.sequences


class LazyOrder(GPTOrder):
    """Order of one source that is opened at its first use.

    Args:
        parameters: options of the order.
        source: opens the order.
    """

    source: LazySource

    def __init__(self, parameters: GPTParameters, source: LazySource) -> None:
        super().__init__(parameters, source, None)

    def __repr__(self) -> str:
        return f"LazyOrder({self.source.name})"

    def __len__(self) -> int:
        return len(self.source.order)

    @property
    def plan(self) -> EpochPlan:
        return self.source.order.plan

    def get_array(self, name: str) -> Any:
        return self.source.order.get_array(name)
