"""Names of the core upon which packages around it build: those of binidx itself, and anyone's.

The core reads and writes token data and serves its samples. `binidx.corpus`, `prepare`, `run`, `search`, `packed`,
`explore` and the commands stand around it. Its names for all of them are listed in `core.pyi`, level by level.
"""

from __future__ import annotations

from binidx.lazy_names import lazy_names, read_stub

HOMES = read_stub(__file__)
"""Module of each name."""

__all__ = sorted(HOMES)
__getattr__, __dir__ = lazy_names(__name__, HOMES)
