"""Megatron's order of one source, of whose cached index only the ranges that a query needs are read.

manifest ─► its arrays and the .idx, pinned ─► shuffle_index of the samples ─► their rows of sample_index
         ─► their slices of document_index ─► lengths of these sequences           four round trips
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from binidx.format.idx import get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.ranged_arrays import CheckedIndex
from binidx.format.tokens import Tokens
from binidx.index.cache.index_cache import has_fingerprint
from binidx.index.cache.manifest import ONE_EACH, Manifest, get_origin
from binidx.index.documents import Documents
from binidx.index.gpt_indices import ARRAYS
from binidx.order.gpt_order import GPTOrder, GPTParameters
from binidx.order.opener import IndexOptions
from binidx.order.order_protocols import Bounds, Numbers, Order, Source, SpanIndex, Spans
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
        checked = CheckedIndex(
            int(content["num_sequences"]),
            content["index_digest"],
            content.get(ONE_EACH, False),
            recorded_object(get_idx_path(prefix.uri), recorded),
        )
        documents = split_documents(checked.num_sequences)
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


def open_order(order: Order) -> Order:
    """Return the order of one source itself, opened if it is a `LazyOrder`."""
    return order.order if isinstance(order, LazyOrder) else order


class LazyOrder:
    """Order of one source that is opened at its first use; threads may use it at once.

    Args:
        name: prefix, as the user wrote it.
        prefix: prefix of the data, as it is opened.
        parameters: options of the order.
        open_order: opens the order at the first use; it is pickled, the opened order is not.
    """

    def __init__(
        self, name: str, prefix: str, parameters: GPTParameters, open_order: Callable[[], SourceOrder]
    ) -> None:
        self.name, self.prefix, self.parameters, self.open_order = name, prefix, parameters, open_order
        self.sequence_length, self.full_length = parameters.sequence_length, parameters.full_length
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyOrder, (self.name, self.prefix, self.parameters, self.open_order)

    def __repr__(self) -> str:
        return f"LazyOrder({self.name})"

    @property
    def order(self) -> SourceOrder:
        """The opened order."""
        with self._opening:
            if "_order" not in vars(self):
                self._order = self.open_order()
        return self._order

    @property
    def sources(self) -> Sequence[Source]:
        return [self]

    @property
    def dataset(self) -> Tokens:
        return self.order.source.dataset

    @property
    def sequences(self) -> Documents:
        return self.order.source.sequences

    @property
    def identity(self) -> Any:
        return self.order.identity

    @property
    def index(self) -> SpanIndex | None:
        return self.order.index

    @property
    def num_epochs(self) -> int:
        return self.order.num_epochs

    def __len__(self) -> int:
        return len(self.order)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        return np.zeros_like(samples), samples

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        return self.order.spans(samples)

    def find(self, source: int, sequences: Numbers) -> Numbers:
        return self.order.find(source, sequences)

    def epochs(self, samples: Numbers) -> Numbers:
        return self.order.epochs(samples)
