"""Properties that are computed once, for values whose computation reads a store.

functools.cached_property holds a lock in Python 3.11 that all instances of a class share: a thousand datasets that open
their files at the same time would open them one after the other. As from Python 3.12 on, two threads may compute the
value of one instance twice.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

Value = TypeVar("Value")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property[Value]):  # noqa: N801 - as in functools
        """Property that is computed once for an instance, without a lock."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values[self.attrname] = self.func(instance)
            return values[self.attrname]
