"""Train language models straight from `.bin`/`.idx` token data, wherever it lies, in Megatron Core's exact order.

Names are loaded when they are first used, so `import binidx` is quick and brings no torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
HOMES = {
    imported.name: str(node.module) for node in STUB.body if isinstance(node, ast.ImportFrom) for imported in node.names
}
"""Module of each public name, as the stub has it."""

__all__ = sorted(HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'binidx' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*HOMES, "__version__", "errors"])
