"""Searches that cut small datasets and texts into many pieces."""

from __future__ import annotations

import pytest

from binidx.corpus import token_parts
from binidx.native import token_search


def cut_small(patch: pytest.MonkeyPatch, text_bytes: int, *, parts: bool) -> None:
    """Search so many bytes of text at once; with `parts` in many parts, whose documents are read in many pieces."""
    patch.setattr(token_search, "TEXT_BYTES", text_bytes)
    if parts:
        for name in ("LEAST_BYTES", "ALIGN_BYTES"):
            patch.setattr(token_parts, name, 1 << 14)
        for name, size in (("MAX_REQUEST", 64), ("ROUND_BYTES", 192)):
            patch.setattr(f"binidx.storage.open.{name}", size)
