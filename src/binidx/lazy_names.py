"""Names of a package that are loaded when they are first used, each from the module that its stub names."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def read_stub(file: str) -> dict[str, str]:
    """Return the module of each name that the stub beside a module exports.

    Args:
        file: the module, `.py`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {imported.name: str(node.module) for node in imports for imported in node.names}


def lazy_names(module: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names are loaded when they are first used.

    Args:
        module: name of the module.
        homes: module of each name, as `read_stub` returns it; the module itself for one inside it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        is_module = homes[name] == module
        value = import_module(f"{module}.{name}") if is_module else getattr(import_module(homes[name]), name)
        vars(sys.modules[module])[name] = value
        return value

    return load, lambda: sorted(homes)


def export_stub(module: str, file: str) -> tuple[Any, ...]:
    """Return the module of each name of a stub; `__all__`, `__getattr__` and `__dir__` of the module beside it.

    Args:
        module, file: its name and path.
    """
    homes = read_stub(file)
    return homes, sorted(homes), *lazy_names(module, homes)


def load_moved(old: str, name: str, new: str) -> Any:
    """Return a name of the module `new` that the module `old` had, with a DeprecationWarning at the caller's caller."""
    import warnings

    warnings.warn(f"{old}.{name} is {new}.{name} now", DeprecationWarning, stacklevel=3)
    return getattr(import_module(new), name)
