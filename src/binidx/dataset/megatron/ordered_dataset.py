"""Base of datasets and blends: an order that is served, its identity, and the arrays of its index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, GPTDatasetConfig
from binidx.errors import ConfigError
from binidx.index.cache.index_cache import BuildContext
from binidx.index.cache.index_files import describe, digest
from binidx.order.order_options import OrderOption
from binidx.order.order_protocols import ComposedOrder, Numbers, Order
from binidx.storage.interfaces import RangeReader

if TYPE_CHECKING:
    from binidx.dataset.megatron.megatron_dataset import MegatronDataset


def index_array(name: str) -> Any:
    """Return a property of a dataset: an array of its order, which can be assigned."""

    def assign(dataset: OrderedDataset, array: Any) -> None:
        dataset._order.set_arrays({name: array})
        dataset.index_digests.pop(name, None)

    return property(lambda dataset: getattr(dataset._order, name), assign)


class OrderedDataset(ABC):
    """Samples of an order: what a dataset and a blend of datasets have in common.

    Attributes:
        config: options of the run.
        unique_identifiers: class, data and options, in the order that Megatron hashes.
        build_context: options of the build of the index.
        index_digests: XXH3 of each array of the index, by name.
    """

    config: Any
    unique_identifiers: OrderedDict[str, Any]
    build_context: BuildContext
    index_digests: dict[str, str]

    _order: Any
    """Order that was built, with the arrays of its index."""

    _served: Order
    """Order of the samples: that order, or one over it."""

    _is_whole = False
    """True once the order is known to be that which the option `order` requests of the split."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # torch's DataLoader prefers __getitems__: without this it would bypass a subclass's own __getitem__.
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            cls.__getitems__ = lambda self, idxs: [self[idx] for idx in idxs]  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in UNPICKLED}

    @cached_property
    def unique_description(self) -> str:
        """JSON text of the identifiers."""
        return describe(self.unique_identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        """md5 of that text, in hex."""
        return digest(self.unique_description)

    @property
    def order(self) -> Order:
        """Order of the samples: the tokens of each, as a value."""
        self.check_whole()
        return self._served

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values.

        Equal for copies of the data in other places, and for numbers of samples that share one order.
        """
        return self.order.identity

    @property
    def index_arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the index, by name; a small index is built at the first use."""
        return {name: getattr(self._order, name) for name in self._order.array_names}

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield where the tokens of samples are stored.

        Args:
            samples: numbers of samples, shape (B,).

        Yields:
            Of each source with some of them: its reader; the ranges of bytes, shape (n, 2); and the place of each
            range's sample in `samples`, shape (n,).
        """
        spans, bounds = self.order.spans(samples)
        places = np.repeat(np.arange(len(samples)), np.diff(bounds))
        for source in np.unique(spans[:, 0]).tolist():
            rows, stored = np.flatnonzero(spans[:, 0] == source), self.order.sources[source].dataset
            if stored.is_stored:
                yield stored.bin_reader, stored.locate_all(np.ascontiguousarray(spans[rows, 1:])), places[rows]

    @property
    @abstractmethod
    def parts(self) -> Sequence[MegatronDataset]:
        """The dataset of each source."""

    def __len__(self) -> int:
        return len(self._served)

    def apply_order_option(self, *, is_whole: bool) -> None:
        """Serve the order over this one that the config's option `order` requests, if it requests one.

        Args:
            is_whole: whether the dataset is that of a split; else one source of a blend.

        Raises:
            ConfigError: methods of the user make the samples, which take no order.
        """
        option = get_order_option(self.config)
        for dataset in (self, *self.parts) if is_whole else ():
            dataset._is_whole = True
        if option is None:
            return
        order = option.wrap(self._served, self.config.storage_options, is_whole=is_whole)
        if order is self._served:
            return
        if len(order.sources) > 1 and not isinstance(order, ComposedOrder):
            raise ConfigError(f"order: {type(order).__name__} of {len(order.sources)} sources is no ComposedOrder")
        if any(part.reads_by_itself or part.counts_by_itself for part in self.parts):
            kind = type(self.parts[0]).__name__
            raise ConfigError(f"order: {kind} reads or counts samples by itself, which takes no order")
        vars(self).pop("_samples", None)
        self._served = order

    def check_whole(self) -> None:
        """Raise ConfigError for a dataset without a builder whose samples the option `order` would change or leave out.

        A constructor does not know whether its dataset is one source of a blend, so it cannot apply the option itself.
        """
        if self._is_whole:
            return
        option, served = get_order_option(self.config), self._served
        if option is not None:
            option.check_sources({source.name for source in served.sources}, self.config.storage_options)
            if option.wrap(served, self.config.storage_options, is_whole=True) is not served:
                way = "is made directly, which takes none; use BlendedMegatronDatasetBuilder or load_dataset"
                raise ConfigError(f"order: found {type(option).__name__}, but the {type(self).__name__} {way}")
        for part in [part for part in self.parts if get_order_option(part.config) != option]:
            part.check_whole()
        for dataset in (self, *self.parts):
            dataset._is_whole = True


SEVERAL = (slice, list, np.ndarray)
"""Types of an index of several samples."""


def number_samples(idx: Any, size: int) -> Sequence[int]:
    """Return the numbers of the samples that a slice, or a list or array of numbers, means.

    Args:
        idx: one of SEVERAL; negative numbers count from the end.
        size: number of samples.
    """
    if isinstance(idx, slice):
        return range(size)[idx]
    if any(isinstance(number, bool | np.bool_) for number in idx):
        raise TypeError("samples: found truth values, needs numbers; numpy.flatnonzero makes them of a mask")
    return [range(size)[number] for number in idx]


UNPICKLED = ("_samples", "_assemble", "build_context")
"""Attributes that are made again, or belong to this process."""


def get_order_option(config: BlendedMegatronDatasetConfig) -> OrderOption | None:
    """Return the option `order` of a config; None if it is not set, or the kind of dataset has no such option."""
    return config.order if isinstance(config, GPTDatasetConfig) else None
