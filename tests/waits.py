"""Locks, threads, finalizers, fork hooks and constants of seconds of `src/binidx`: `python tests/waits.py [COMMIT]`.

Prints how many there are at a commit (2e6bc1de if none is given) and now, as a table; with `--list` each of now, with
its place. A call counts once, however often it runs; a constant counts by its names.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/binidx", "tools")
FIRST_COMMIT = "2e6bc1de"

LOCK, EVENT, THREAD = "locks within a process", "events", "starts of threads and pools"
FINALIZER, HOOK, HANDLER = "finalizers and exit hooks", "fork hooks", "signal handlers"
ACROSS, CONSTANT = "locks across processes", "constants of seconds"
KINDS = (LOCK, EVENT, THREAD, FINALIZER, HOOK, HANDLER, ACROSS, CONSTANT)
CALLS = {
    **{f"{module}.{name}": LOCK for module in ("threading", "asyncio") for name in ("Lock", "Condition", "Semaphore")},
    **{f"threading.{name}": LOCK for name in ("RLock", "BoundedSemaphore", "Barrier")},
    **dict.fromkeys(("threading.Event", "asyncio.Event"), EVENT),
    **dict.fromkeys(("threading.Thread", "threading.Timer", "concurrent.futures.ThreadPoolExecutor"), THREAD),
    **dict.fromkeys(("weakref.finalize", "atexit.register", "threading._register_atexit"), FINALIZER),
    "os.register_at_fork": HOOK,
    "signal.signal": HANDLER,
    **dict.fromkeys(("fcntl.flock", "fcntl.lockf", "binidx.storage.cache.block_files.try_lock"), ACROSS),
}
SECONDS = re.compile(r"^Seconds\b|\bin seconds\b")
"""Beginning or part of the docstring of constants of seconds whose names do not end in SECONDS."""


class Wait(NamedTuple):
    """Something that waits, is waited for, or runs at a moment of its own."""

    kind: str
    line: int
    text: str


def find_waits(text: str) -> Iterator[Wait]:
    """Yield all waits of a module, those too whose function is an argument, as in `field(default_factory=Lock)`."""
    tree = ast.parse(text)
    names = {
        alias.asname or alias.name: (f"{node.module}." if isinstance(node, ast.ImportFrom) else "") + alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield Wait(FINALIZER, node.lineno, "__del__")
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            if _full_name(decorator, names) in CALLS:
                yield Wait(CALLS[_full_name(decorator, names)], node.lineno, f"@{ast.unparse(decorator)} {node.name}")
        if isinstance(node, ast.Call):
            name, arguments = _full_name(node.func, names), ast.unparse(node).partition("(")[2]
            is_callback = name == "weakref.ref" and len(node.args) == 2
            kind = FINALIZER if is_callback else CALLS.get(name)
            if kind is not None and (kind != ACROSS or "LOCK_UN" not in arguments):
                yield Wait(kind, node.lineno, ast.unparse(node)[:90])
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.Name | ast.Attribute) and _full_name(argument, names) in CALLS:
                    yield Wait(CALLS[_full_name(argument, names)], node.lineno, ast.unparse(node)[:90])
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
            constants = [text for text in map(ast.unparse, targets) if text.isupper()]
            named = [constant for constant in constants if constant.endswith("SECONDS")]
            about = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            for constant in named or (constants if SECONDS.search(str(about)) else ()):
                yield Wait(CONSTANT, node.lineno, constant)


def _full_name(function: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of a called function, such as threading.Lock, however it was imported."""
    first, dot, rest = ast.unparse(function).partition(".")
    return names.get(first, first) + dot + rest


def sources(commit: str | None = None) -> dict[str, str]:
    """Return the text of each module, by its path, now or at a commit."""
    if commit is None:
        paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
        return {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    command = ["git", "-C", str(ROOT), "archive", commit, *FOLDERS]
    with tarfile.open(fileobj=io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def all_waits(commit: str | None = None) -> list[tuple[str, Wait]]:
    """Return each wait with the path of its module."""
    return [(path, wait) for path, text in sources(commit).items() for wait in find_waits(text)]


def main() -> None:
    """Print the table."""
    commit = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), FIRST_COMMIT)
    now = all_waits()
    counts = [Counter(wait.kind for _, wait in waits) for waits in (all_waits(commit), now)]
    print(f"| | {commit} | now |\n|---|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {counts[0][kind]} | {counts[1][kind]} |")
    if "--list" in sys.argv:
        for path, wait in sorted(now, key=lambda found: (KINDS.index(found[1].kind), found[0])):
            print(f"{wait.kind}: {path}:{wait.line} {wait.text}")


if __name__ == "__main__":
    main()
