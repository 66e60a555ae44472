"""Base of datasets and blends: an order that is served, its identity, and the arrays of its index.

builder ─ building(context) ─► constructor, build_low_level_dataset ─► current_build(), kept and passed on

Megatron's constructors have no argument for the options of a build. The variable is read where datasets are made; below
this package, options are arguments.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig
from binidx.dataset.token_dataset import locate_stored
from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext
from binidx.index.cache.index_files import describe, digest, recorded_name
from binidx.order.opener import Opener
from binidx.order.order_protocols import Numbers, Order
from binidx.order.requests import Request
from binidx.storage.interfaces import RangeReader

_BUILD = ContextVar("binidx_build", default=DEFAULT_CONTEXT)


def current_build() -> BuildContext:
    """Return the options of the build that calls this function or constructor; the default outside of a build."""
    return _BUILD.get()


@contextlib.contextmanager
def building(context: BuildContext) -> Iterator[None]:
    """Make `context` the current build of this thread within the block.

    Args:
        context: returned by `current_build` to the functions and constructors of datasets that the block calls. They
            keep it, and pass it on as an argument.
    """
    token = _BUILD.set(context)
    try:
        yield
    finally:
        _BUILD.reset(token)


def index_array(name: str) -> Any:
    """Return a property of a dataset: an array of its order, which can be assigned."""

    def assign(dataset: OrderedDataset, array: Any) -> None:
        dataset._order.set_arrays({name: array})
        dataset.index_digests.pop(name, None)

    return property(lambda dataset: getattr(dataset._order, name), assign)


class OrderedDataset(ABC):
    """Samples of an order: base class of datasets and of blends of datasets.

    Attributes:
        config: options of the run.
        unique_identifiers: class, data and options, in the order that Megatron hashes.
        build_context: options of the build of the index.
        index_digests: XXH3 of each array of the index, by name.
        request: request of the order that the config asks for, if the dataset is a split of its own.
    """

    config: Any
    unique_identifiers: OrderedDict[str, Any]
    build_context: BuildContext = DEFAULT_CONTEXT
    index_digests: dict[str, str]
    request: Any

    _opened_order: Order | None = None
    """Order of the request, once it is opened."""

    _order: Any
    """Order with the arrays of the index, which `order` may serve through a view."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # torch's DataLoader prefers __getitems__: without this it would bypass a subclass's own __getitem__.
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            cls.__getitems__ = lambda self, idxs: [self[idx] for idx in idxs]  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in UNPICKLED}

    @property
    def order(self) -> Any:
        """Order of the request: the spans of the tokens of each sample."""
        return self._opened_order

    @cached_property
    def unique_description(self) -> str:
        """JSON text of the identifiers."""
        return describe(self.unique_identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        """md5 of that text, in hex."""
        return digest(self.unique_description)

    @property
    def index_name(self) -> str:
        """Name of the index in a cache: `{hash}-{class}-{split}`."""
        return f"{self.unique_description_hash}-{recorded_name(type(self))}-{self.parts[0].index_split.name}"

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values.

        Equal for copies of the data in other places, and for numbers of samples that share one order.
        """
        return self.order.identity

    @property
    def index_order(self) -> Any:
        """Order with the arrays of the index, which a blend draws from, and a view leaves samples out of."""
        return self._order

    @property
    def index_arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the index, by name; a small index is built at the first use."""
        return {name: getattr(self._order, name) for name in self._order.array_names}

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield where the tokens of samples are stored; see `locate_stored`."""
        return locate_stored(self.order, [source.dataset for source in self.order.sources], samples)

    @property
    @abstractmethod
    def parts(self) -> Sequence[Any]:
        """The dataset of each source."""

    def __len__(self) -> int:
        return len(self.order)

    @property
    def opener(self) -> Opener:
        """Options with which the dataset opens its order."""
        return make_opener(self.config, context=self.build_context, digests=self.index_digests)

    def request_order(self, inner: Request) -> Request:
        """Return the request of a split with the order that the config asks for, if it asks for one.

        Args:
            inner: the request of Megatron's order of the split.

        Raises:
            ConfigError: methods of the user make the samples, which take no order.
        """
        request = request_order(self.config, inner, self.build_context.run_prefixes)
        if request is not inner:
            self.check_takes_order()
        return request

    def check_takes_order(self) -> None:
        """Raise ConfigError if methods of the user make the samples, which take no order."""
        if any(part.reads_by_itself or part.counts_by_itself for part in self.parts):
            kind = type(self.parts[0]).__name__
            raise ConfigError(f"order: {kind} reads or counts samples by itself, which takes no order")


def request_order(config: BlendedMegatronDatasetConfig, inner: Request, prefixes: Collection[str] = ()) -> Request:
    """Return the request of a split with the option `order` of a config.

    Args:
        config: options of the run.
        inner: the request of Megatron's order of the split.
        prefixes: other prefixes of the run, which lists of documents may name.
    """
    if (option := config.order_option) is None:
        return inner
    check_listed_sources(config, prefixes, {source.name for source in inner.sources})
    return option.request(inner)


def check_listed_sources(
    config: BlendedMegatronDatasetConfig, prefixes: Collection[str], names: Collection[str] = ()
) -> None:
    """Raise ConfigError if the option `order` names no source of a run.

    Args:
        config: options of the run, with the prefixes of all splits.
        prefixes: other prefixes of the run.
        names: prefixes of further sources, as the user wrote them.
    """
    if (option := config.order_option) is not None:
        opened = config.prefixes | {*prefixes}
        option.check_sources({*names, *(str(config.as_written(prefix)) for prefix in opened)}, config.storage_options)


def make_opener(config: BlendedMegatronDatasetConfig, **options: Any) -> Opener:
    """Return an opener with the options of a config for caches and builds.

    Args:
        config: options of the run.
        options: further arguments of `Opener`.
    """
    return Opener(
        cache_small=config.cache_small_indices,
        trust=config.trust_cache is not None,
        threads=config.num_dataset_builder_threads,
        mmap=config.mmap_bin_files,
        **options,
    )


SEVERAL = (slice, list, np.ndarray, str, float)
"""Types of an index of several samples, and of indices that users take for one."""


def number_samples(idx: Any, size: int) -> Sequence[int]:
    """Return the numbers of the samples that a slice, or a list or array of numbers, means.

    Args:
        idx: one of SEVERAL; negative numbers count from the end.
        size: number of samples.
    """
    if isinstance(idx, slice):
        return range(size)[idx]
    if isinstance(idx, float | str):
        way = f"; dataset[0][{idx!r}] is that of a sample" if isinstance(idx, str) else ""
        raise TypeError(f"samples: found {idx!r}, needs a whole number{way}")
    if odd := [each for each in idx if isinstance(each, bool | np.bool_ | float | str | None)]:
        raise TypeError(f"samples: found {odd[0]!r} among them, needs numbers; numpy.flatnonzero makes them of a mask")
    return [range(size)[number] for number in idx]


UNPICKLED = ("_samples", "_assemble", "build_context", "request", "_opening_threads")
"""Attributes that are made again, or belong to this process."""


@lru_cache
def own_methods(kind: type, *names: str) -> tuple[str, ...]:
    """Return those of some methods of a class that a user wrote: none if the class has this library's alone.

    A method is this library's if a module of it defines the function, whatever `__module__` says: `functools.wraps`
    around one of ours is the user's. So is each callable without such a module, as the builtin `len`, or a function
    that `exec` defined.

    Args:
        kind: class of a dataset, or of its low-level dataset.
        names: of methods; one that the class lacks is not the user's.
    """
    methods = ((name, getattr(kind, name)) for name in names if name in dir(kind))
    return tuple(name for name, method in methods if not _is_ours(method))


def _is_ours(method: Any) -> bool:
    try:
        names: dict[str, Any] = method.__globals__
    except AttributeError:
        return False
    return str(names.get("__name__")).partition(".")[0] == "binidx"
