"""Shared parts of the commands: their `main`, exit status, one-line errors, common options and argument types.

Options and help need the standard library and `binidx.errors` alone, so that `--help` takes no longer than argparse. A
function that runs a command uses public names as `binidx.NAME`, which loads them, and imports all else itself.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import logging
import re
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from binidx import errors
from binidx.errors import BinidxError, ConfigError

from ._display import Bar, fitted, print_note

CALL_ERRORS = (
    *(errors.ConfigError, errors.MissingDriverError, errors.ObjectExistsError, errors.ObjectNotFoundError),
    *(errors.AccessError, errors.UnreachableError),
)
"""Errors of the call, exit status 2; all other errors are of the data, exit status 1."""

RESUMES = "interrupted; the same command resumes"
"""Message after Ctrl-C, of commands that resume when they are run again."""


Body = Callable[[argparse.Namespace], int | None]
"""Function that runs a command or a subcommand; it returns the exit status, None for 0."""


@dataclass(frozen=True)
class Command:
    """A command: called with its arguments, it runs and returns the exit status.

    A BinidxError or a warning is printed as one line; with --json, an error is one JSON object on stdout, too.

    Args:
        doc: docstring of the command's module, which is its help.
        add_options: adds its options to a parser.
        body: runs it; None: the chosen subcommand does.
        after_interrupt: message after Ctrl-C.
        progress: whether `body` gets a `Bar` as `arguments.watch`; else this is None.
    """

    name: str
    doc: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    body: Body | None
    after_interrupt: str = "interrupted"
    progress: bool = False

    def fill(self, options: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add all options of the command to a parser, and return it."""
        self.add_options(options)
        add_output(options, progress=self.progress)
        return options

    def __call__(self, argv: Sequence[str]) -> int:
        options, subject = self.fill(parser(self.name, self.doc)), f"binidx {self.name}"
        as_json, as_before = "--json" in argv, (warnings.showwarning, logging.lastResort)
        jobs = logging.getLogger("binidx.jobs")
        level = jobs.level
        try:
            check_flags(options, argv)
            arguments = options.parse_args(argv)
            warnings.showwarning = lambda message, *_: print_note(subject, str(message), "warning")
            logging.lastResort = LoggedNotes(subject)
            jobs.setLevel(logging.INFO)  # the estimate of a job
            watch = Bar(self.name, arguments.progress) if self.progress else contextlib.nullcontext()
            with ended_by_signals(), watch as arguments.watch:
                return (self.body or arguments.body)(arguments) or 0
        except UsageError as error:
            print_error(error, error.message, 2, as_json)
            raise
        except BinidxError as error:
            message, status = str(error), 2 if isinstance(error, CALL_ERRORS) else 1
            if isinstance(error, ConfigError):
                message = name_flags(message, flags_of(options, argv))
            print_note(subject, message, "error")
            return print_error(error, message, status, as_json)
        except KeyboardInterrupt as error:
            print(f"\n{subject}: {self.after_interrupt}", file=sys.stderr)
            return print_error(error, self.after_interrupt, 130, as_json)
        finally:
            warnings.showwarning, logging.lastResort = as_before
            jobs.setLevel(level)


class LoggedNotes(logging.Handler):
    """Handler where no other is configured: each record is a line on stderr, as the command's own."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject

    def emit(self, record: logging.LogRecord) -> None:
        kind = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else ""
        print_note(self.subject, record.getMessage(), kind)


def print_error(error: BaseException, message: str, status: int, as_json: bool) -> int:
    """Print an error as one JSON object if `as_json`; return the exit status.

    Args:
        error: its class is the `kind` in the object.
        message: text with the flags as the user typed them.
        status: exit status.
        as_json: whether to print anything.
    """
    if as_json:
        values = {"kind": type(error).__name__, "message": message, "exit_status": status}
        print(json.dumps({"error": values}), flush=True)
    return status


def add_output(options: argparse.ArgumentParser, *, progress: bool = False) -> None:
    """Add `--json` and, if it shows progress, `--progress` to a command, or to each of its subcommands."""
    for each in subcommands(options).values() or [options]:
        each.add_argument("--json", action="store_true", help="print the result as JSON")
        if progress:
            how = "on stderr, as lines of JSON (a bar, or a line a minute if it is no terminal)"
            each.add_argument("--progress", choices=["json"], help=how)


def add_subcommands(options: argparse.ArgumentParser, *rows: tuple[str, Body, str]) -> list[argparse.ArgumentParser]:
    """Add subcommands to a command without a body of its own, and return their parsers.

    Args:
        rows: name, body and purpose of each.
    """
    commands, parsers = options.add_subparsers(required=True, metavar="COMMAND"), list[argparse.ArgumentParser]()
    for name, body, purpose in rows:
        parsers.append(commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False))
        parsers[-1].set_defaults(body=body)
    return parsers


def subcommands(options: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the subcommands of a command, by name."""
    groups = [action.choices for action in options._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(groups[0]) if groups else {}


def flags_of(options: argparse.ArgumentParser, typed: Sequence[str]) -> dict[str, str]:
    """Return name -> what the user types, for all arguments: `--flag`, or the metavar of a positional one.

    The names are those of the library's parameters.

    Args:
        options: parser of the command.
        typed: arguments of the command line.
    """
    parsers = [options, *(each for name, each in subcommands(options).items() if name in typed)]
    actions = [action for each in parsers for action in each._actions]
    return {action.dest: (action.option_strings or [str(action.metavar)])[0] for action in reversed(actions)}


def check_flags(options: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse an option that does not exist by its name, as argparse would first miss the one that it was meant for.

    Args:
        options: parser of the command.
        argv: arguments of the command line.
    """
    chosen = next((each for name, each in subcommands(options).items() if name in argv[:1]), options)
    if chosen is options and subcommands(options):
        return  # argparse says that the first word is no subcommand
    known = [flag for action in chosen._actions for flag in action.option_strings]
    rest = {flag for action in chosen._actions if action.nargs == argparse.REMAINDER for flag in action.option_strings}
    typed = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word not in {"--", *rest}, argv)]
    flags = () if rest & {*argv} or not any(word.endswith(".py") for word in argv) else rest
    command = "".join(f"; give the whole command after {flag}" for flag in flags)
    for flag in typed:
        if flag.startswith("--") and flag not in known:
            near = command or "".join(f"; did you mean {match}?" for match in find_flags(flag, known)[:1])
            chosen.error(f"unrecognized arguments: {flag}{near}")
    positional = [action for action in chosen._actions if not action.option_strings]
    words = [*itertools.takewhile(lambda word: not word.startswith("-"), argv)][chosen is not options :]
    target = next((action for action in chosen._actions if "--to" in action.option_strings), None)
    if positional and (target is None or not {*target.option_strings} & {*typed}):
        behind = words[1:][-1:] if target and target.required else []
        spare = words[len(positional) :] if all(action.nargs is None for action in positional) else behind
        for word in spare:
            way = f"did you mean --to {word}?" if target else f"needs one {positional[-1].metavar} at a time"
            chosen.error(f"unrecognized arguments: {word}{command or f'; {way}'}")


def find_flags(flag: str, known: Sequence[str]) -> list[str]:
    """Return the options that a misspelt one may mean: one has all words of the other, or they look alike.

    Args:
        known: the options, such as `--before-step`.
    """
    words = {*flag.strip("-").split("-")}
    related = [each for each in known if (own := {*each.strip("-").split("-")}) <= words or words <= own]
    alike = difflib.get_close_matches(flag.strip("-"), [each.strip("-") for each in known], 1, 0.7)
    return related + [f"--{name}" for name in alike]


def name_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return an error with the arguments of its subject as the user typed them: `memory: ...` -> `--memory: ...`.

    Args:
        message: message of a ConfigError.
        flags: name of each argument -> what the user types.
    """
    subject, colon, rest = message.partition(":")
    names = subject.split(", ")
    if not all(name in flags for name in names):
        return message
    return f"{', '.join(flags[name] for name in names)}{colon}{rest}"


class UsageError(SystemExit):
    """Arguments that a parser rejects; the exit status is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """A parser that keeps its message."""

    def error(self, message: str) -> NoReturn:
        number = r"^argument (\S+): invalid (int|float) value: '(.*)'$"
        message = re.sub(number, r"\1: found \3, needs a number", message)
        print_note(self.prog, f"{message}; {self.prog} --help lists all options", "error")
        raise UsageError(message)


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps a docstring."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(wrap_block(block, width) for block in blocks)


def wrap_block(block: str, width: int) -> str:
    """Return a paragraph, or indented lines of `name  text`, in lines of a width; a longer example continues.

    Args:
        block: paragraph of a docstring.
        width: most characters of a line.
    """
    if block.startswith("example:"):
        return re.sub(rf"^(?=.{{{width + 1}}})(.{{,{width - 2}}}) (--)", r"\1 \\\n      \2", block, flags=re.MULTILINE)
    if not block.startswith(" "):
        return textwrap.fill(" ".join(block.split()), width, break_on_hyphens=False)
    lines = re.sub(r"\n {6,}", " ", block).splitlines()
    columns = [re.match(r" *\S.*? {2,}|", line)[0] for line in lines]  # type: ignore[index]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * len(column), break_on_hyphens=False)
        for line, column in zip(lines, columns, strict=True)
    )


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM, which schedulers send, and SIGHUP like Ctrl-C, so that every `finally` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring: its first line, then the options, then the rest."""
    summary, _, rest = (doc or "").strip().partition("\n")
    return Parser(
        prog=f"binidx {name}",
        description=summary,
        epilog=rest.strip("\n"),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def print_rows_json(values: Mapping[str, Any], name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print JSON values and rows below `name` as one object; each row is made when it is printed."""
    sys.stdout.write(json.dumps({**values, name: []})[:-2])
    for number, row in enumerate(rows):
        sys.stdout.write(", " * (number > 0) + json.dumps(row))
    print("]}")


def print_result(values: Any, text: str, arguments: argparse.Namespace) -> None:
    """Print a result, as JSON values with --json, else as text; the bar of the last stage vanishes before it.

    Args:
        values: JSON values, and dataclasses, which are objects of their fields.
        text: the same for people.
    """
    if arguments.watch:
        arguments.watch.end_stage()
    print(json.dumps(values, default=asdict) if arguments.json else fitted(text, sys.stdout))
