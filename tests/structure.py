"""Figures of the code's structure, and the bounds that `make lint` holds: `python tests/structure.py`.

Code lines are lines that hold a token of code: no docstring, no comment, no blank.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "binidx"
LARGEST_FOLDER, LARGEST_MODULE = 14, 500
EXEMPT_FOLDERS = ("compat/megatron",)
OPENING = re.compile(r"(what|who|whoever|whose|how|where|whether|when|why|which|that|as)\b(?! if\b)", re.IGNORECASE)
WORST = re.compile(
    r"\b(nobody|somebody|whoever|himself|in vain|of now|is told|are told|told by|tells of|says of|smells?|litter|"
    r"unkept|what (was|is) (read|told|left|asked|fetched)|who (reads|builds|comes|waits|writes|asks)|the house)\b|"
    r"^(<{7}|>{7}) ",  # left by a merge
    re.IGNORECASE,
)
PROVIDERS = re.compile(
    r"\b(s3fs|gcsfs|adlfs|aiobotocore|botocore|boto3|S3FileSystem|GCSFileSystem|HTTPFileSystem|AbstractFileSystem)\b"
)


def modules() -> Iterator[Path]:
    """Modules of `src/binidx` without `compat`, `__init__` and the list of public names."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] != "compat" and path.name != "__init__.py" and inside != Path("order.py"):
            yield path


def code_lines(path: Path) -> int:
    """Lines of a file with code on them."""
    text = path.read_text()
    lines = set[int]()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file, and of each string below an assignment."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                value = child.value.value
                if isinstance(value, str):
                    yield child.lineno, value.strip()


def top_names() -> dict[str, set[str]]:
    """Public functions and classes at the top of modules, and the modules that define them."""
    found = defaultdict[str, set[str]](set)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                found[node.name].add(str(path.relative_to(PACKAGE)))
    return found


def tests_without_a_check() -> Iterator[str]:
    """Test functions that neither check anything nor call a function of the tests that does."""
    calls: dict[tuple[Path, str], set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                calls[path, node.name] = {*_called(node)}
    left, before = {*calls}, 0
    while before != len(left):
        before = len(left)
        checks = {"assert", "raises", *(name for path, name in calls if (path, name) not in left)}
        for path, name in [*left]:
            foreign = {each for each in calls[path, name] if (path, each) not in left}
            if not checks.isdisjoint(foreign) or any(each.startswith(("assert_", "check_")) for each in foreign):
                left.remove((path, name))
    yield from sorted(f"{path.relative_to(ROOT)} {name}" for path, name in left if name.startswith("test_"))


def _called(function: ast.AST) -> Iterator[str]:
    """Names of the functions that a function calls; "assert" if it has a check of its own."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            yield "assert"
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2]
            if any(each.arg == "check" and ast.unparse(each.value) == "True" for each in node.keywords):
                yield "assert"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with a word that the style forbids, and docstrings that begin with a clause."""
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if found := WORST.search(line):
            yield number, f"{found[0]!r}: {line.strip()[:90]}"
    if path.suffix == ".py":
        for number, text in docstrings(path):
            if OPENING.match(text):
                yield number, f"begins with a clause: {text.splitlines()[0][:90]}"


def main() -> int:
    """Print the table; the exit status is 1 if a bound is broken."""
    files = list(modules())
    sizes = [path.read_text().count("\n") for path in files]
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in files)
    source = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *(ROOT / "tools").rglob("*.py")]
    repeated = {name: homes for name, homes in top_names().items() if len(homes) > 1}
    leafs = Counter(path.stem for path in files)
    named = [path for path in files if PROVIDERS.search(path.read_text()) and path.parent.name != "stores"]
    asked = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if re.search(r"\bhasattr\(|\bgetattr\([^,()]+,[^,()]+,", line)
    ]
    texts = [*source, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    worst = [f"{path.relative_to(ROOT)}:{number} {text}" for path in texts for number, text in prose(path)]
    print(f"modules: {len(files)}, median {median(sizes):.0f} lines, largest {max(sizes)}")
    print(f"fullest folders: {folders.most_common(3)}")
    print(f"code lines in src and tools: {sum(map(code_lines, source)):,}")
    print(f"names at the top of several modules: {sorted(repeated) or 0}")
    print(f"module names that repeat: {sorted(name for name, count in leafs.items() if count > 1) or 0}")
    print(f"modules outside storage/stores that name a driver: {[str(p.relative_to(PACKAGE)) for p in named] or 0}")
    print(f"hasattr, and getattr with a default: {len(asked)}")
    print(f"docstrings that begin with a clause, and forbidden words: {worst or 0}")
    unchecked = [*tests_without_a_check()]
    print(f"tests without a check: {unchecked or 0}")
    if "--list" in sys.argv:
        print(*asked, *worst, sep="\n")
    full = {folder for folder, count in folders.items() if count > LARGEST_FOLDER}
    large = [str(path) for path, size in zip(files, sizes, strict=True) if size > LARGEST_MODULE]
    broken = [*full, *large, *worst, *unchecked]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
