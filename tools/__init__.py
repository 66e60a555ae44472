"""The commands of `binidx`: one module each, thin."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from ._old_names import renamed

GROUPS = {
    "bring data in": {
        "preprocess": ("preprocess", "text to tokens: jsonl, parquet, csv, WET; one machine or many"),
        "estimate": ("estimate", "tokens of text and the cost to make them, from a sample"),
        "import": ("import_tokens", "tokens of MDS, LitData, lit-gpt, OLMo, Arrow, llm.c, ..."),
        "export": ("export_tokens", "a dataset as files of another library"),
        "merge": ("merge", "several datasets into one; the store moves tokens where it can"),
        "cut": ("cut", "the head of a dataset, a sample of it, or a split into several"),
        "shuffle": ("shuffle", "documents or lines in random order, in a bounded memory"),
    },
    "check": {
        "inspect": ("inspect_dataset", "counts, lengths and first tokens of a dataset"),
        "verify": ("verify", "check a dataset: structure, checksums, token ids"),
        "diff": ("diff", "two datasets by their documents: added, removed, reordered"),
        "doctor": ("doctor", "packages and URIs that can be reached; this node, for a run"),
    },
    "prepare a run": {
        "plan": ("plan_run", "epochs, indices, requests and cost of a run, before it starts"),
        "prepare": ("prepare", "the indices, a read plan or the tokens of a run, ahead of it"),
    },
    "train": {
        "demo": ("demo", "text, tokens, a bucket, training, exact resume; on this machine"),
        "order": ("order", "the global order of a run as parquet files"),
    },
    "ask a run": {
        "trace": ("trace_step", "samples, documents and text of a step"),
        "where": ("where", "every step, rank and slot that read a document"),
        "account": ("account", "tokens and epochs of each source of a run: table, card, figure"),
        "spikes": ("spikes", "steps with too high a loss, and the documents in them"),
        "grep": ("grep", "documents with an exact text, or items of an evaluation"),
        "explore": ("explore", "a run or a dataset in a browser: steps, documents, text"),
    },
    "move": {
        "convert": ("convert", "copy a dataset between any two places, checked and resumable"),
        "cache": ("cache", "fill, list and prune the disk cache of remote data"),
    },
}
"""Group of commands, by the activity of a person -> commands: each with its module here, and its purpose."""

COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items()}

OTHER_NAMES = {
    "compress": "convert --compress", "copy": "convert", "decompress": "convert --plain", "head": "cut head",
    "help": "--help", "sample": "cut sample", "split": "cut split", "tokenize": "preprocess",
    "unpack": "import litpkds", "version": "--version", "-V": "--version", "-v": "--version",
}  # fmt: skip
"""Name that a user may try -> the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 the data is bad, 2 the call is wrong."""
    with closed_pipe_is_no_error():
        words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
        return next(filter(None, (_run(*call) for call in renamed(*words))), 0)
    return 0


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """End the block quietly if a reader such as `| head` has closed the pipe of the output, which is flushed here.

    A full disk below the output is one line and exit status 1.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - `>&-` in a shell
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not (full := error.errno == errno.ENOSPC) and error.errno != errno.EPIPE:
            raise
        ends = select.poll()
        ends.register(sys.stdout.fileno(), 0)
        if not full and not ends.poll(0):  # another pipe, such as that of a worker
            raise
        # Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if full:
            sys.exit(f"binidx: stdout: {error.strerror}")


def _run(name: str, *arguments: str) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        import binidx

        print(f"binidx {binidx.__version__}")
        return 0
    if name not in {*COMMANDS, "--completion"}:
        names = difflib.get_close_matches(name, [*COMMANDS, *OTHER_NAMES], 1)
        near = "".join(f", did you mean {OTHER_NAMES.get(match, match)!r}?" for match in names)
        print(f"binidx: {name!r} is not a command{near}; binidx --help lists them", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks is shown by its code
            stream.reconfigure(errors="backslashreplace")
    try:
        module = COMMANDS[name][0] if name in COMMANDS else "_completion"
        return int(import_module(f"binidx.tools.{module}").main(arguments))
    except KeyboardInterrupt:  # before the command began; later its `main` handles it
        print(f"\nbinidx {name}: interrupted", file=sys.stderr)
        return 130


def usage() -> str:
    """Return the list of commands, by what a person does."""
    lines = ["binidx: train from .bin/.idx token data in any store", "", "usage: binidx COMMAND ...", ""]
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<10}  {purpose}" for name, (_, purpose) in commands.items()), ""]
    return "\n".join([*lines, "binidx COMMAND --help", "binidx --version", "binidx --completion bash|zsh|fish"])
