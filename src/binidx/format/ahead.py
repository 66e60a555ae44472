"""What goes on while a large `.idx` comes down, and what vouches for it: the layers above know of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class Ahead(Protocol):
    """Of one dataset that is opened."""

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Its `.idx` is the object of this identity, and is read now. Returns at once."""

    def vouches(self, identity: Mapping[str, Any]) -> bool:
        """Whether the very object of this identity was checked in full before, so that its rules need no pass."""


@contextlib.contextmanager
def going_ahead(ahead: Ahead | None) -> Iterator[None]:
    """The dataset opened in the block is the one of `ahead`."""
    token = _ahead.set(ahead)
    try:
        yield
    finally:
        _ahead.reset(token)


def current_ahead() -> Ahead | None:
    return _ahead.get()


_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)
