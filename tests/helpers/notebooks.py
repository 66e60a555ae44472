"""Notebooks of the documentation, run as by Jupyter: `python -m helpers.notebooks docs/NAME.ipynb` renews one."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

RICH = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
"""Kind of an output -> the method that returns it."""


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A notebook with the outputs of its cells of code: what they print, and the value of their last expression.

    The folder is called /folder there.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        cells = [
            {**cell, "outputs": _run("".join(cell["source"]), names)} if cell["cell_type"] == "code" else cell
            for cell in notebook["cells"]
        ]
    return dict(json.loads(json.dumps({**notebook, "cells": cells}).replace(str(folder), "/folder")))


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    *body, last = ast.parse(source).body
    printed, value, outputs = io.StringIO(), None, list[dict[str, Any]]()
    with contextlib.redirect_stdout(printed):
        if not isinstance(last, ast.Expr):
            body, last = [*body, last], None
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {kind: getattr(value, method)() for kind, method in RICH.items() if hasattr(value, method)}
        shown["text/plain"] = repr(value)
        data = {kind: text.splitlines(keepends=True) for kind, text in shown.items() if text}
        result = {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        outputs.append(result)
    return outputs


def main() -> None:
    """Run the notebooks, and write their outputs into them."""
    for path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(json.loads(path.read_text()), Path(folder))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + os.linesep)


if __name__ == "__main__":
    main()
