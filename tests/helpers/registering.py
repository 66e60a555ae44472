"""Names of stores, codecs and orders that a test registers, and that are forgotten when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import binidx
from binidx.order.order_options import ORDERS, OrderOption
from binidx.registries import Registry
from binidx.storage.open import CODECS, Codec
from binidx.storage.stores.registry import STORES


def unregister(registry: Registry[Any], name: str) -> None:
    """Forget a name that this process registered."""
    del registry[name]
    registry.registered.remove(name)
    registry.known.remove(name)


@contextlib.contextmanager
def registered_store(scheme: str, store: Any) -> Iterator[None]:
    """Register a class of stores within the block."""
    binidx.register_store(scheme, store)
    try:
        yield
    finally:
        unregister(STORES, scheme)


@contextlib.contextmanager
def registered_codec(suffix: str, codec: Codec) -> Iterator[None]:
    """Register a codec within the block."""
    binidx.register_codec(suffix, codec)
    try:
        yield
    finally:
        unregister(CODECS, suffix)


@contextlib.contextmanager
def registered_order(name: str, order: type[OrderOption]) -> Iterator[None]:
    """Register a class of orders within the block."""
    binidx.register_order(name, order)
    try:
        yield
    finally:
        unregister(ORDERS, name)
