"""Names of the core upon which packages around it build: those of binidx itself, and anyone's.

The core reads and writes token data and serves its samples. `binidx.corpus`, `prepare`, `run`, `search`, `packed`,
`explore` and the commands stand around it. Its names for all of them are listed in `core.pyi`, level by level.
"""

from __future__ import annotations

from binidx.lazy_names import export_stub

HOMES, __all__, __getattr__, __dir__ = export_stub(__name__, __file__)
"""Module of each name, and the hooks by which they are loaded."""
