"""Completion of commands, options and paths in a shell: shtab writes its script from the parsers of the commands."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from . import COMMANDS
from ._command import add_output, subcommands


def print_completion(shell: str = "bash") -> int:
    """Print the script of a shell that shtab knows; return the exit status."""
    try:
        import shtab
    except ModuleNotFoundError:
        print("binidx: --print-completion needs shtab; pip install 'binidx[completion]'", file=sys.stderr)
        return 2
    if shell not in shtab.SUPPORTED_SHELLS:
        print(f"binidx: --print-completion: found {shell}, needs {', '.join(shtab.SUPPORTED_SHELLS)}", file=sys.stderr)
        return 2
    root = argparse.ArgumentParser("binidx")
    root.add_argument("--version", action="store_true")
    commands = root.add_subparsers()
    for name, (module, purpose) in COMMANDS.items():
        options = commands.add_parser(name, help=purpose)
        import_module(f"binidx.tools.{module}").add_options(options)
        add_output(options)
        for each in subcommands(options).values() or [options]:
            _complete_paths(each, shtab.FILE)
    print(shtab.complete(root, shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser, paths: Any) -> None:
    """Let each value that is not one of some choices be a path."""
    for action in parser._actions:
        if action.choices is None and action.nargs != 0:
            action.complete = paths  # type: ignore[attr-defined]
