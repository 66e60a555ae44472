"""The notebooks of the documentation have the outputs that running them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.notebooks import execute
from helpers.pages import DOCS


def outputs(notebook: dict[str, Any]) -> list[Any]:
    """Outputs of a notebook; of figures, which differ between versions of matplotlib, that they are there."""
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [output.get("text") or {kind: "svg" in kind or text for kind, text in output["data"].items()}
            for output in found]  # fmt: skip


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_give(path: Path, tmp_path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert outputs(notebook)
    assert outputs(execute(notebook, tmp_path)) == outputs(notebook)
