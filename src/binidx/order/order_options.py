"""Names of orders besides Megatron's, and the option `order` of a config and of a run file.

    {"kind": "first_fit"}                                           whole documents, packed
    {"kind": "view", "documents": "s3://corpus/drop.txt"}           without some documents

An option is a frozen dataclass that extends `OrderOption`; a row here or a call of `register_order` gives it a name.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, cast

from binidx.errors import ConfigError
from binidx.order.gpt_order import GPTParameters
from binidx.order.opener import IndexOptions, Opener
from binidx.order.order_protocols import Order, Source
from binidx.order.requests import OverRequest, Request, SourceRequest, SourceRule
from binidx.order.source_order import SourceOrder
from binidx.registries import Registry


class OrderOption:
    """Order that a config asks for. Its fields are JSON values; each method has a default that changes nothing.

    A subclass is a frozen dataclass and overrides `request`.

    Example:
        >>> @dataclass(frozen=True)
        ... class EveryOther(binidx.OrderOption):
        ...     def request(self, inner):
        ...         return EveryOtherRequest(inner)
        >>> @dataclass(frozen=True)
        ... class EveryOtherRequest(OverRequest):
        ...     def serve(self, order):
        ...         return ViewOrder(order, np.arange(0, len(order), 2), {"class": "EveryOther"})

    Source: ours.
    """

    @property
    def kind_name(self) -> str:
        """Name under which its class is registered; without one, that of the class."""
        return find_kind(self) or type(self).__name__

    def to_json(self) -> dict[str, Any]:
        """Return the option as a run file has it; raise ConfigError if its class has no name."""
        if (kind := find_kind(self)) is None or not is_dataclass(self):
            found = f"{type(self).__name__} is not registered, as a frozen dataclass"
            raise ConfigError(f"order: {found}; binidx.register_order gives it a name")
        return {"kind": kind, **asdict(self)}

    def request(self, inner: Request) -> Request:
        """Return the request of a split with this order.

        Args:
            inner: the request of Megatron's order of the split: a source, or a blend of several.

        Returns:
            A request over it; or itself with other sources (`map_sources`), such as a request over each of them.

        Raises:
            ConfigError: the order is not possible for these datasets.
        """
        return request_early(self, inner)

    @property
    def uncounted(self) -> str:
        """Part of its index that `binidx plan` does not count, of an option that chooses documents: `DocumentRule`."""
        return "documents, tokens and epochs are counted before it chooses documents"

    @property
    def paths(self) -> Sequence[str]:
        """The URIs of all objects that the option reads."""
        return []

    def with_paths(self, names: Mapping[str, str]) -> OrderOption:
        """Return the option with other URIs: `names` has the new one of each old one."""
        return self

    def check_sources(self, names: Collection[str], options: Mapping[str, Any] | None) -> None:
        """Raise ConfigError if the option names a source that a run does not have.

        Args:
            names: prefixes of all sources of the run, as the user wrote them.
            options: storage options.
        """

    def pinned(self, options: Mapping[str, Any] | None) -> OrderOption:
        """Return the option as a run file keeps it: with a digest of each object that it reads.

        Args:
            options: storage options.
        """
        return self


ORDERS: Registry[type[OrderOption]] = Registry(
    "binidx.order.order_options:ORDERS",
    "order",
    "binidx.orders",
    "[a-z][a-z0-9_]*",
    {
        "best_fit": "binidx.order.document_packing:BestFit",
        "first_fit": "binidx.order.document_packing:FirstFit",
        "view": "binidx.order.view:View",
    },
)


def register_order(name: str, order: type[OrderOption]) -> None:
    """Let `order={"kind": name, ...}` of a config mean a class, in this process and the workers that it starts.

    A package that is installed registers its class by an entry point instead: `mine = "package.module:MyOrder"` in the
    group `binidx.orders`. Commands such as `binidx trace` find an order only in this way.

    Args:
        name: kind of the order; not a built-in one. It matches `[a-z][a-z0-9_]*`.
        order: frozen dataclass that extends `OrderOption`.

    Raises:
        ConfigError: the name is built in, not valid, or stands for another class; or the class is no dataclass.

    Example:
        binidx.register_order("mine", MyOrder)

    Source: ours.
    """
    if not is_dataclass(order):
        raise ConfigError(f"order {name!r}: {order.__name__} is no dataclass; write @dataclass(frozen=True) above it")
    ORDERS.register(name, order)


def parse_order(value: Any) -> OrderOption | None:
    """Return the option `order` of a config: None, an `OrderOption`, a kind, or {"kind": kind, field: value}.

    Raises:
        ConfigError: an unknown kind, or fields that it does not have.
    """
    if value is None or isinstance(value, OrderOption):
        return value
    if not isinstance(value, str | Mapping):
        raise ConfigError(
            f"order: found {value!r}, needs a kind ({', '.join(ORDERS.names())}), a dict or an OrderOption"
        )
    given: dict[str, Any] = {"kind": value} if isinstance(value, str) else dict(value)
    kind = str(given.pop("kind", None))
    try:
        option = ORDERS[kind]
    except KeyError:
        found = f"found kind {kind!r}, needs one of {', '.join(ORDERS.names())}"
        raise ConfigError(
            f"order: {found}, or an installed package with it (entry point group {ORDERS.group})"
        ) from None
    try:
        return option(**given)
    except TypeError as error:
        raise ConfigError(f"order: {kind}: {'; '.join(_list_wrong_fields(option, given)) or error}") from error


def _list_wrong_fields(option: type[OrderOption], given: Mapping[str, Any]) -> list[str]:
    if not is_dataclass(option):
        return []
    own: dict[str, Field[Any]] = {each.name: each for each in fields(option) if each.init}
    required = [name for name, each in own.items() if each.default is each.default_factory is MISSING]
    missing = [f"field {name!r} is missing" for name in required if name not in given]
    return missing + [f"no field {name!r} (has {', '.join(own) or 'none'})" for name in given if name not in own]


def find_kind(order: OrderOption | None) -> str | None:
    """Return the name under which the class of an order is registered; None without one."""
    return next((name for name in ORDERS.names() if ORDERS[name] is type(order)), None)


@dataclass(frozen=True)
class EarlyRequest(OverRequest):
    """Order that `wrap` of an option returns over another one."""

    option: Any
    is_whole: bool

    def open(self, opener: Opener) -> Order:
        return self.serve(replace(opener, access="whole").open(self.inner))

    def serve(self, order: Order) -> Order:
        return cast(Order, self.option.wrap(order, self.sources[0].storage_options, is_whole=self.is_whole))


@dataclass(frozen=True)
class EarlyRule:
    """Order of a source that `open_source` of an option returns; that of another rule if it returns None."""

    option: Any
    rule: SourceRule
    parameters: GPTParameters
    fields: Mapping[str, Any]
    uncounted: ClassVar[str] = "samples are those of Megatron's order"

    def open(self, source: Source, options: IndexOptions) -> SourceOrder:
        order: SourceOrder | None = self.option.open_source(self.parameters, source, options)
        return self.rule.open(source, options) if order is None else order


def request_early(option: Any, inner: Request) -> Request:
    """Return the request of an option that overrides `wrap`, or methods for an index of its own, or none of them."""

    def replace_rule(source: SourceRequest) -> SourceRequest:
        fields = option.index_fields(source.storage_options) if "index_fields" in hooks else {}
        return replace(source, rule=EarlyRule(option, cast(SourceRule, source.rule), source.parameters, fields))

    kinds = {name for kind in type(option).__mro__ for name in vars(kind)}
    if hooks := kinds & {"wrap", "open_source", "index_fields", "choose_sequences"}:
        warnings.warn(f"{type(option).__name__}: override `request`, not {sorted(hooks)}", DeprecationWarning, 4)
    inner = inner.map_sources(lambda source: source.with_documents(option)) if "choose_sequences" in hooks else inner
    inner = inner.map_sources(replace_rule) if "open_source" in hooks else inner
    if "wrap" not in hooks:
        return inner
    return EarlyRequest(inner.map_sources(lambda source: EarlyRequest(source, option, False)), option, True)
