"""Pages of the documentation: their blocks of Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def read_page(name: str) -> str:
    """The text of a page: `how-to/shuffle`."""
    return (DOCS / f"{name}.md").read_text()


def python_blocks(page: str) -> list[str]:
    """Blocks of Python in their order."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def run_blocks(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run all blocks of a page, one after the other, with these names; return the names they leave."""
    blocks = python_blocks(read_page(name))
    assert blocks, name
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names
