"""Opener: makes the order of a request, whole or by ranges of its index.

request    order that a config asks for of one split: a pure tree of frozen values  `order.requests`
opener     options of the process: caches, threads, whole or by ranges              never a sample of the order
order      spans of the tokens of sample i                                          opener.open(request)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import Tokens
from binidx.index.cache.array_writer import build_in_memory
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, Access, Build, BuildContext, IndexCache
from binidx.index.cache.index_files import Arrays, IndexName
from binidx.index.cache.manifest import Fields, get_origin
from binidx.order.order_protocols import ComposedOrder, Order


class Openable(Protocol):
    """Request, as the opener needs it."""

    def open(self, opener: Opener) -> Order:
        """Return the order; requests inside are opened by `opener.open`."""


@dataclass(frozen=True)
class Opener:
    """Options with which a process opens requests; no sample of an order depends on them.

    Args:
        access: "whole" loads or builds each index; "ranges" reads ranges of cached ones when they are needed.
        cache_small: whether a small index is cached, too.
        trust: whether arrays without a manifest, as Megatron writes them, are used.
        threads: number of threads that build.
        mmap: map a local `.bin`.
        context: options of this build.
        digests: gets the XXH3 of each array that is loaded or published, by name.
    """

    access: Access = "whole"
    cache_small: bool = False
    trust: bool = False
    threads: int = 1
    mmap: bool = True
    context: BuildContext = field(default=DEFAULT_CONTEXT, repr=False)
    digests: dict[str, str] = field(default_factory=dict, repr=False)

    def open(self, request: Openable) -> Order:
        """Return the order of a request.

        Raises:
            ConfigError: the request is not possible, or its order has several sources and is no `ComposedOrder`.
            BlendError, IndexBuildError: there are too few samples or tokens.
        """
        order = request.open(self)
        if len(order.sources) > 1 and not isinstance(order, ComposedOrder):
            raise ConfigError(f"order: {type(order).__name__} of {len(order.sources)} sources is no ComposedOrder")
        return order


DEFAULT_OPENER = Opener()


@dataclass(frozen=True)
class IndexOptions:
    """Options of the cache and of the build of one index; they never change its arrays.

    Args:
        find_name: returns the name of the index in the cache; small indices need none.
        opener: options of all indices.
    """

    find_name: Callable[[], IndexName]
    opener: Opener

    @cached_property
    def name(self) -> IndexName:
        """Name of the index in the cache."""
        return self.find_name()

    def cache(self, **options: Any) -> IndexCache:
        """Return the cache of the index.

        Args:
            options: further arguments of `IndexCache`.
        """
        opener = self.opener
        return IndexCache(self.name.files, **{"context": opener.context, "digests": opener.digests, **options})

    def load_or_build(
        self, dataset: Tokens, fields: Fields, names: Sequence[str], build: Build, *, is_small: bool, is_ranged: bool
    ) -> Arrays:
        """Load the arrays of an index from the cache, or build them; of computed tokens, or a small one, in memory.

        Args:
            dataset: the tokens of which it is built.
            fields: options that determine the arrays.
            names, build: as in `IndexCache.load_or_build`.
            is_small: whether the index is built faster than fetched.
            is_ranged: whether cached arrays are read by ranges.
        """
        if not isinstance(dataset, IndexedDataset) or (is_small and not self.opener.cache_small):
            return build_in_memory(build)
        cache = self.cache(origin=get_origin(dataset))
        return cache.load_or_build(self.name.description, fields, names, build, "ranges" if is_ranged else "whole")
