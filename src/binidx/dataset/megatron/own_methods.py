"""Methods that a class of a user defines itself, in the place of this library's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


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
