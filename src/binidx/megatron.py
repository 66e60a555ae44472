"""Megatron Core's other kinds of datasets, their base classes and configs, and the samplers of its trainer."""

from __future__ import annotations

from binidx.lazy_names import lazy_names, read_stub

HOMES = read_stub(__file__)
"""Module of each public name."""

__all__ = sorted(HOMES)
__getattr__, __dir__ = lazy_names(__name__, HOMES)
