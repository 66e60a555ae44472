"""Shell completion: a script of commands, subcommands and options, which `binidx --completion SHELL` prints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from binidx.errors import ConfigError, MissingDriverError

from ._command import Names, Parser, subcommands


def completion_script(shell: str, commands: Mapping[str, tuple[str, str]]) -> str:
    """Return the script for a shell.

    Args:
        shell: bash, zsh or fish.
        commands: module and purpose of each command.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingDriverError("--completion: needs shtab; pip install 'binidx[completion]'") from error
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(f"--completion: found {shell or 'no shell'}, needs bash, zsh or fish")
    root = Parser(prog="binidx")
    parsers = root.add_subparsers(metavar="COMMAND")
    for name, (module, purpose) in commands.items():
        options = import_module(f"binidx.tools.{module}").main.fill(parsers.add_parser(name, help=purpose))
        for action in (action for each in (options, *subcommands(options).values()) for action in each._actions):
            if isinstance(action.type, Names):
                action.choices = [*action.type]
            elif action.nargs != 0 and action.type not in (int, float) and action.choices is None:
                vars(action)["complete"] = shtab.FILE
    return str(shtab.complete(root, shell))
