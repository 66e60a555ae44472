"""Packed token files (LITPKDS): files, order, datasets, runs, conversion."""

from __future__ import annotations

from binidx.lazy_names import export_stub

HOMES, __all__, __getattr__, __dir__ = export_stub(__name__, __file__)
"""Module of each name, and the hooks by which they are loaded."""
