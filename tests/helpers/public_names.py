"""The public names of all modules that have some."""

from __future__ import annotations

from typing import Any

import binidx

MODULES = (binidx, binidx.megatron, binidx.packed)

PUBLIC: dict[str, Any] = {name: getattr(module, name) for module in MODULES for name in module.__all__}
