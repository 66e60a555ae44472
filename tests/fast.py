"""The inner loop: lint of the changed files, and the tests nearest to them: `python tests/fast.py [BASE]`.

Changed are the files that differ from BASE, committed or not. BASE is the commit at which this branch left `main`; on
`main` itself it is HEAD.

    src/binidx/prepare/text/read.py     tests/prepare/text/test_read*.py, the tests that import the module,
                                        themselves or by helpers, those that import its users, and so on: a dozen
    tools/convert.py                    the same, and tests/tools/test_commands.py
    examples/demo/train.py              the tests that import it
    tests/**/test_*.py                  the file itself
    docs/**/*.md                        tests/docs/test_site.py, and tests in tests/docs that name the page

The nearest tests come first. Those that are marked slow are left out, and those that have not begun after `SECONDS`: a
last line says so. `make check` runs all tests, and checks types, layers of imports and the site.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from os.path import commonpath
from pathlib import Path

import binidx

ROOT = Path(__file__).parents[1]
PUBLIC = (binidx, binidx.megatron, binidx.packed)
HOMES = {name: module.HOMES[name] for module in PUBLIC for name in module.__all__}
TESTS, EXAMPLES = ROOT / "tests", ROOT / "examples"
SECONDS = 40.0
"""Time for tests: with lint and `tests/structure.py` a minute on two cores."""
MOST_TESTS = 12
"""Test modules of one changed file: those begin within `SECONDS`."""
LEAST_SHARE = 1e-4
"""Least share of a file in another one that is passed on."""
OWN_TESTS = 8.0
"""Share of a test that has the name of a file, as tests/tools/test_cache.py of tools/cache.py, to that of another."""
IMPORT = re.compile(
    r"^\s*from (\S+) import (\([^)]*\)|.*)|^\s*import (\S+)|\b(binidx\.(?:(?:megatron|packed)\.)?\w+)"
    r'|"((?:binidx|demo|helpers|servers)\.[\w.]+)',
    re.MULTILINE,
)
"""Imports, public names of binidx, and modules that a string names, as those of processes and of registries."""


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def base() -> str:
    """Return the commit at which this branch left `main`; HEAD if there is no such branch."""
    known = git("branch", "--all", "--format", "%(refname:short)")
    main = next((name for name in ("origin/main", "main") if name in known), "HEAD")
    return git("merge-base", "HEAD", main)[0]


def changed_files(since: str) -> list[Path]:
    """Return the files that differ from a commit and still exist."""
    names = {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}
    return [path for name in sorted(names) if (path := ROOT / name).is_file()]


def mentions(folder: Path, words: Sequence[str]) -> list[Path]:
    """Return the test modules in a folder that contain one of the words, the shortest first."""
    texts = {path: path.read_text() for path in folder.glob("test_*.py")}
    return sorted(
        (path for path in texts if any(word in texts[path] for word in words)), key=lambda path: len(texts[path])
    )


def module_name(path: Path) -> str:
    """Return the name by which tests import a file."""
    inside = path.relative_to(next(top for top in (TESTS, EXAMPLES, ROOT) if path.is_relative_to(top))).with_suffix("")
    return ("binidx." if inside.parts[0] == "tools" else "") + ".".join(inside.parts).removeprefix("src.")


def references(path: Path) -> Iterator[str]:
    """Yield names of modules that a file may import, and of commands that a test may call."""
    text = path.read_text()
    for module, names, *others in IMPORT.findall(text):
        base = module_name(path).rpartition(".")[0] + module if module.startswith(".") else module
        for name in (base, *(f"{base}.{each}" for each in re.findall(r"\w+", names)), *others):
            yield HOMES.get(re.sub(r"^binidx\.(megatron\.|packed\.)?", "", name), name)
    if '"-m", "binidx"' in text:
        yield "binidx.__main__"
    if "from binidx.tools import main" in text:
        yield from (f"binidx.tools.{word.replace('-', '_')}" for word in re.findall(r'"([a-z-]+)"', text))


@cache
def users() -> dict[str, set[Path]]:
    """Return the name of each module -> the files that refer to it."""
    found = defaultdict[str, set[Path]](set)
    for path in (file for top in ("src", "tools", "tests", "examples") for file in (ROOT / top).rglob("*.py")):
        for name in references(path) if path.name not in ("conftest.py", "__init__.py") else ():
            found[name].add(path)
    return found


@cache
def referring(path: Path) -> dict[Path, float]:
    """Return the other files that refer to one -> what each gets of its share: tests of its name more than others."""
    others = users()[module_name(path)] - {path}
    weights = {user: OWN_TESTS if user.name.startswith(f"test_{path.stem}") else 1.0 for user in others}
    return {user: weight / sum(weights.values()) for user, weight in weights.items()}


def shares(path: Path) -> dict[Path, float]:
    """Return the test modules that import a file, themselves or by others -> how much of their work is likely its.

    A file shares 1 among the files that refer to it, these what they get, and so on: what few use is near to their
    tests, what all use to none. A module passes on half of its share, a helper of tests all.
    """
    tests, held = defaultdict[Path, float](float), {path: 1.0}
    while held:
        given = defaultdict[Path, float](float)
        for file, share in held.items():
            for user, part in referring(file).items():
                given[user] += share * part
        held = {}
        for user, share in given.items():
            if user.name.startswith("test_"):
                tests[user] += share
            elif share > LEAST_SHARE:
                held[user] = share if user.is_relative_to(TESTS) else share / 2
    return tests


def importing_tests(path: Path, folder: Path = TESTS) -> Iterator[Path]:
    """Yield the test modules that import a file, themselves or by others, the nearest first.

    Near is what gets a large share of it, twice as near for each folder in common, and for each word of its name.
    """
    words = {*path.stem.split("_")}

    def nearness(test: Path) -> float:
        folders = len(Path(commonpath((test, folder))).parts)
        return found[test] * 2.0 ** (folders + len(words & {*test.stem.split("_")}))

    found = shares(path)
    yield from sorted(found, key=lambda test: (-nearness(test), test.stat().st_size, test))


def nearest_tests(path: Path) -> Iterator[Path]:
    """Yield the test modules, or the folder of tests, that are nearest to a file."""
    inside = path.relative_to(ROOT)
    if path.name.startswith("test_") and path.suffix == ".py":
        yield path
    elif inside.parts[0] in ("src", "tools") and path.suffix == ".py":
        mirrored = TESTS / (inside.relative_to("src/binidx") if inside.parts[0] == "src" else inside)
        folder = next(each for each in (mirrored.with_suffix(""), *mirrored.parents) if each.is_dir())
        named = sorted(folder.glob(f"test_{path.stem}*.py"))
        others = islice(importing_tests(path, folder), MOST_TESTS)
        yield from [*dict.fromkeys([*named, *others])][:MOST_TESTS] or [folder]
        if inside.parts[0] == "tools":
            yield TESTS / "tools/test_commands.py"
    elif (path.is_relative_to(EXAMPLES) or path.is_relative_to(TESTS)) and path.suffix == ".py":
        yield from islice(importing_tests(path), MOST_TESTS)
    elif inside.parts[0] == "native":
        yield TESTS / "native"
    elif path.suffix == ".md":
        page = inside.relative_to("docs").with_suffix("") if inside.parts[0] == "docs" else inside
        yield TESTS / "docs/test_site.py"
        yield from mentions(TESTS / "docs", (f'"{page}"',))


def main() -> int:
    """Lint and test what has changed; the exit status is that of the first step that fails."""
    changed = changed_files(sys.argv[1] if sys.argv[1:] else base())
    code = [str(path.relative_to(ROOT)) for path in changed if path.suffix == ".py"]
    tests = [*dict.fromkeys(each for path in changed for each in nearest_tests(path))]
    chosen = [str(each.relative_to(ROOT)) for each in tests if not {*each.parents} & {*tests}]
    steps = [["ruff", "check", *code], ["ruff", "format", "--check", *code]] if code else []
    for name, *arguments in [*steps, ["python", "tests/structure.py"]]:
        print(name, *arguments, flush=True)
        if status := subprocess.run([Path(sys.executable).parent / name, *arguments], cwd=ROOT).returncode:
            return status
    if changed and not chosen:
        print("No test is near what changed; `make test` runs all.")
    return run_tests(chosen) if chosen else 0


def pytest_command(tests: Sequence[str]) -> list[str]:
    """Return the command that runs tests until one fails."""
    options = ["-x", "-m", "not slow", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    return [sys.executable, "-m", "pytest", *options, *tests]


def run_tests(chosen: Sequence[str]) -> int:
    """Run tests until one fails, or for `SECONDS`; return the exit status."""
    print("pytest", *chosen, flush=True)
    with subprocess.Popen(pytest_command(chosen), cwd=ROOT) as running:
        try:
            return running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait()
    print(f"No test failed in {SECONDS:.0f} s; `make test` runs those that are left.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
