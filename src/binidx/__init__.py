"""Train language models straight from `.bin`/`.idx` token data, wherever it lies, in Megatron Core's exact order.

Names are loaded when they are first used, so `import binidx` is quick and brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from binidx.lazy_names import lazy_names, load_moved, read_stub

HOMES = read_stub(__file__)
"""Module of each public name, as the stub has it."""

PACKAGES = ("megatron", "packed")
"""Modules with further public names, which were here in version 0.1."""

__all__ = sorted({*HOMES} - {*PACKAGES})

_load, _ = lazy_names(__name__, HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # slow to import

        installed = next(metadata.distributions(name="binidx"), None)
        globals()[name] = installed.version if installed else "0+unknown"  # from its source
        return globals()[name]  # looked up once: 4 ms
    if name in HOMES:
        return _load(name)
    for package in PACKAGES if name[:1] != "_" else ():
        if name in import_module(f"binidx.{package}").HOMES:
            return load_moved("binidx", name, f"binidx.{package}")
    raise AttributeError(f"module 'binidx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*HOMES, "__version__", "errors"])
