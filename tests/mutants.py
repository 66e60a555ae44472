"""Draw mutants of code lines, and run the tests nearest to each: `python tests/mutants.py --seed 1 --count 25`.

A mutant is a copy of a module with one change: another comparison, `and` for `or`, a negated condition, a number one
larger, swapped arguments, a statement less, None returned. Each is put into one scratch copy of the tree, and meets the
tests that `make fast` would choose for a change of that module, for as long. It is killed if a test fails that passes
without it; a test that fails in both cases is left out.

Not every survivor is a gap: some changes change nothing that can be seen. `docs/contributing/tests.md` says more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fast import ROOT, SECONDS, nearest_tests, pytest_command

COMPARISONS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE))
OPPOSITES = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or))
ARITHMETIC = ((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Mod, ast.FloorDiv), (ast.Div, ast.Mult))
"""Operators of which each may stand in the place of the other."""
UNMUTATED = ("annotation", "returns", "decorator_list")
"""Fields of a node that hold types and decorators."""
NOT_COPIED = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "bench-results")
MEMORY = 8 << 30
"""Most bytes of a process: a mutant may allocate without end."""

Change = tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]
"""A node, and what stands in its place."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change: the changed lines, and the whole text after the change."""

    path: Path
    line: int
    before: str
    after: str
    text: str


def others(operator: ast.AST) -> list[Any]:
    """Return the operators that may stand in the place of one."""
    pairs = (pair for pair in (*COMPARISONS, *OPPOSITES, *ARITHMETIC) if type(operator) in pair)
    return [second() if type(operator) is first else first() for first, second in pairs]


def negated(test: ast.expr) -> Iterator[Change]:
    """Yield a condition that does not hold where this one does; of comparisons and `not`, `changes` has it already."""
    if not isinstance(test, ast.Compare | ast.UnaryOp):
        yield test, ast.UnaryOp(ast.Not(), test)


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of a node, without those inside it."""
    match node:
        case ast.Compare(left, ops, comparators):
            for place, old in enumerate(ops):
                for new in others(old):
                    yield node, ast.Compare(left, [*ops[:place], new, *ops[place + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield from ((node, ast.BoolOp(new, values)) for new in others(op))
        case ast.BinOp(left, op, right):
            yield from ((node, ast.BinOp(left, new, right)) for new in others(op)[:1])
        case ast.UnaryOp(ast.Not(), operand):
            yield node, operand
        case ast.Constant(bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from ((node, ast.Constant(value + step)) for step in (1, -1))
        case ast.Call(ast.Name("min" | "max" as name), arguments, keywords):
            yield node, ast.Call(ast.Name("max" if name == "min" else "min"), arguments, keywords)
        case ast.Call(function, arguments, keywords):
            for place, (first, second) in enumerate(pairwise(arguments)):
                yield node, ast.Call(function, [*arguments[:place], second, first, *arguments[place + 2 :]], keywords)
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield node, ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call() | ast.Await()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
        case ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield node, ast.Pass()
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield from negated(test)
        case ast.comprehension(ifs=conditions):
            yield from (change for condition in conditions for change in negated(condition))


def all_changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of a node and of what is in it; f-strings are messages, and have no places in Python 3.11."""
    if isinstance(node, ast.JoinedStr | ast.Assert) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ):
        return
    yield from changes(node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in UNMUTATED:
                yield from all_changes(child)


def mutant(path: Path, change: Change) -> Mutant:
    """Return the module with a change at its place: all other lines keep their text and number."""
    old, new = change
    lines = path.read_bytes().splitlines(keepends=True)
    last = old.end_lineno or old.lineno
    atom = isinstance(new, ast.stmt | ast.Constant | ast.Call | ast.Name | ast.Attribute)
    written = ast.unparse(new) if atom else f"({ast.unparse(new)})"
    after = lines[old.lineno - 1][: old.col_offset] + written.encode() + lines[last - 1][old.end_col_offset :]
    text = b"".join([*lines[: old.lineno - 1], after, *lines[last:]]).decode()
    ast.parse(text)
    shown = (" ".join(part.decode().split()) for part in (b"".join(lines[old.lineno - 1 : last]), after))
    return Mutant(path, old.lineno, *shown, text)


def files_of(root: Path, module: str) -> list[Path]:
    """Return the files of a module or of a package, such as `binidx.order`."""
    path = root.joinpath("src", *module.split("."))
    if not path.is_dir():
        return [path.with_suffix(".py")]
    folders = [
        path,
        *(link for link in path.iterdir() if link.is_symlink()),
    ]  # rglob does not follow that of the commands
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def draw(files: Sequence[Path], seed: int, count: int) -> list[Mutant]:
    """Return mutants of as many lines, drawn from all lines that have one, in the order of the files."""
    lines = defaultdict[tuple[Path, int], list[Change]](list)
    for path in files:
        for change in all_changes(ast.parse(path.read_text())):
            lines[path, change[0].lineno].append(change)
    chance = random.Random(seed)
    chosen = sorted(chance.sample([*lines], min(count, len(lines))))
    return [mutant(place[0], chance.choice(lines[place])) for place in chosen]


class Outcome(NamedTuple):
    """What became of a mutant: "killed", "survived" or "out of time", the test that failed, and the time it took."""

    word: str
    killer: str
    seconds: float


class Scratch:
    """A copy of the tree in which mutants are tested, one at a time."""

    def __init__(self, root: Path, folder: Path, seconds: float) -> None:
        self._root, self._tree, self._home, self._seconds = root, folder / "tree", folder / "home", seconds
        self._broken, self._sound = set[str](), set[str]()
        self._home.mkdir()
        shutil.copytree(root, self._tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if (root / ".venv").exists():
            (self._tree / ".venv").symlink_to((root / ".venv").resolve())

    def test(self, mutant: Mutant, tests: Sequence[str]) -> Outcome:
        """Return the outcome of a mutant under tests; those that fail without it are left out from then on."""
        place = mutant.path.relative_to(self._root)
        while True:
            self._write(place, mutant.text)
            outcome = self._run(tests)
            self._write(place, mutant.path.read_text())
            failed = [outcome.killer] if outcome.killer else [*tests, "--collect-only"]
            is_known = outcome.word != "killed" or self._sound >= {*failed}
            if is_known or self._run(failed, "--numprocesses=0").word != "killed":
                self._sound |= {outcome.killer} - {""}
                return outcome
            if {*failed} & {*tests, *self._broken}:
                raise SystemExit(f"{failed}: fails without a mutant, too")
            self._broken |= {*failed}

    def _write(self, place: Path, text: str) -> None:
        """Write a module, and remove its bytecode: Python compares size and second only."""
        (self._tree / place).write_text(text)
        Path(cache_from_source(str(self._tree / place))).unlink(missing_ok=True)

    def _run(self, tests: Sequence[str], *options: str) -> Outcome:
        """Run tests until one fails, or the time is over."""
        started = time.monotonic()
        environment = {**os.environ, "HOME": str(self._home), "TMPDIR": str(self._home)}
        environment["PYTHONPATH"] = os.pathsep.join([str(self._tree / "src"), os.environ.get("PYTHONPATH", "")])
        left_out = [f"--deselect={test}" for test in self._broken]
        command = [*pytest_command(tests), "--hypothesis-seed=0", "--tb=no", "-rfE", *left_out, *options]
        shutil.rmtree(self._tree / ".hypothesis", ignore_errors=True)  # examples that killed an earlier mutant
        output = self._home / "output"
        with (
            output.open("w") as file,
            subprocess.Popen(
                command,
                cwd=self._tree,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            ) as running,
        ):
            try:
                status = running.wait(self._seconds)
            except subprocess.TimeoutExpired:
                return Outcome("out of time", "", self._seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)  # workers, servers, and what a mutant stops for ever
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output.read_text(), re.MULTILINE)
        word = "survived" if status in (0, 5) else "killed"  # 5: no test is left
        return Outcome(word, failed[1] if failed else "", time.monotonic() - started)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Draw mutants, test each, and print what became of it."""
    parser = argparse.ArgumentParser(description="Draw mutants, and run the tests nearest to each.")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other mutants")
    parser.add_argument("--count", type=int, default=25, help="mutants to draw")
    parser.add_argument("--modules", nargs="+", default=["binidx"], help="modules or packages to change: binidx.order")
    parser.add_argument("--tests", nargs="+", help="tests to run for each mutant, instead of the nearest")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for the tests of a mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants, and test none")
    options = parser.parse_args(arguments)
    files = [path for module in options.modules for path in files_of(root, module)]
    counts = Counter[str]()
    with TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Scratch(root, Path(folder), options.seconds)
        for each in draw(files, options.seed, options.count):
            print(f"{each.path.relative_to(root)}:{each.line}\n  - {each.before}\n  + {each.after}", flush=True)
            if options.list:
                continue
            tests = options.tests or [str(test.relative_to(root)) for test in nearest_tests(each.path)]
            outcome = scratch.test(each, tests)
            counts[outcome.word] += 1
            print(f"  {outcome.word} after {outcome.seconds:.0f} s {outcome.killer}", flush=True)
    print(f"{counts.total()} mutants: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
