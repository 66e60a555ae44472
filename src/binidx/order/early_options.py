"""Adapter of options that were written for version 0.1: they override other methods than `OrderOption.request`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from binidx.order.gpt_order import GPTParameters
from binidx.order.opener import IndexOptions, Opener
from binidx.order.order_protocols import Order, Source
from binidx.order.requests import OverRequest, Request, SourceRequest, SourceRule
from binidx.order.source_order import SourceOrder


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
