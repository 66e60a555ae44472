"""The inner loop: lint of the changed files, and the tests nearest to them: `python tests/fast.py [BASE]`.

Changed are the files that differ from BASE, committed or not. BASE is the commit at which this branch left `main`; on
`main` itself it is HEAD.

    src/binidx/prepare/text/read.py     tests/prepare/text/test_read*.py, and the tests in that folder that import the
                                        module; if there is neither, the whole folder
    tools/convert.py                    tests in tests/tools of that name, or which call the command
    tests/**/test_*.py                  the file itself
    docs/**/*.md                        tests/docs/test_site.py, and tests in tests/docs that name the page

The nearest tests come first. Those that are marked slow are left out, and those that have not begun after `SECONDS`: a
last line says so. `make check` runs all tests, and checks types, layers of imports and the site.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SECONDS = 40.0
"""Time for tests: with lint and `tests/structure.py` a minute on two cores."""


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


def nearest_tests(path: Path) -> Iterator[Path]:
    """Yield the test modules, or the folder of tests, that are nearest to a file."""
    inside = path.relative_to(ROOT)
    if path.name.startswith("test_") and path.suffix == ".py":
        yield path
    elif inside.parts[:2] == ("src", "binidx") and path.suffix == ".py":
        module, mirrored = ".".join(inside.with_suffix("").parts[1:]), TESTS / inside.relative_to("src/binidx")
        folder = next(each for each in (mirrored.with_suffix(""), *mirrored.parents) if each.is_dir())
        named = [*sorted(folder.glob(f"test_{path.stem}*.py")), *mentions(folder, (f"{module} ", f"{module}\n"))]
        yield from named or [folder]
    elif inside.parts[0] == "tools" and path.suffix == ".py":
        yield from sorted((TESTS / "tools").glob(f"test_{path.stem}*.py"))
        yield from mentions(TESTS / "tools", (f'main(["{path.stem.partition("_")[0]}"', f"tools.{path.stem} "))
        yield TESTS / "tools/test_commands.py"
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
    return run_tests(chosen) if chosen else 0


def run_tests(chosen: Sequence[str]) -> int:
    """Run tests until one fails, or for `SECONDS`; return the exit status."""
    options = ["-x", "-m", "not slow", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    print("pytest", *chosen, flush=True)
    with subprocess.Popen([sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT) as running:
        try:
            return running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait()
    print(f"No test failed in {SECONDS:.0f} s; `make test` runs those that are left.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
