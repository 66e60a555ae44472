"""Print a script for completion in a shell: Tab completes commands, subcommands, options and paths.

The script needs neither Python nor shtab, which makes it. After an update make it again.

example:
  binidx --completion bash > ~/.local/share/bash-completion/completions/binidx
"""

from __future__ import annotations

import argparse
from importlib import import_module

from binidx.errors import MissingDriverError

from ._command import Command, Parser, subcommands
from ._options import Names


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the argument of the command."""
    options.add_argument("shell", choices=["bash", "zsh", "fish"])


def print_script(arguments: argparse.Namespace) -> None:
    """Print the script of all commands."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingDriverError("--completion: needs shtab; pip install 'binidx[completion]'") from error
    root = Parser(prog="binidx")
    parsers = root.add_subparsers(metavar="COMMAND")
    for name, (module, purpose) in import_module("binidx.tools").COMMANDS.items():
        options = import_module(f"binidx.tools.{module}").main.fill(parsers.add_parser(name, help=purpose))
        for action in (action for each in (options, *subcommands(options).values()) for action in each._actions):
            if isinstance(action.type, Names):
                action.choices = [*action.type]
            elif action.nargs != 0 and action.type not in (int, float) and action.choices is None:
                vars(action)["complete"] = shtab.FILE
    print(shtab.complete(root, arguments.shell))


main = Command("--completion", __doc__, add_options, print_script)
