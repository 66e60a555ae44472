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
from importlib.util import resolve_name
from pathlib import Path
from statistics import median

from waits import LOCK, all_waits

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "binidx"
LARGEST_FOLDER, LARGEST_MODULE = 14, 500
EXEMPT_FOLDERS = ("compat/megatron",)
SPAN_PACKAGES = ("native", "index", "order", "dataset", "compat")
"""Packages whose modules may call `Order.spans`; others ask `order/reads.py` which tokens a sample reads."""
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

Trees = dict[str, ast.Module]
"""Syntax tree of each module, by its dotted name."""
CIRCLES = set[frozenset[str]]()
"""Modules that may import each other, as sets. It only becomes smaller: remove a set whose circle is gone."""
DEPTHS = {"compat": 5, "dataset": 4, "storage": 5, "format": 3, "jobs": 2, "native": 2, "run": 2, "testing": 2}
DEPTHS |= dict.fromkeys(("corpus", "errors", "explore", "loader", "order", "packed", "prepare", "tokenizers"), 3)
"""Most own classes in a chain of bases, by package; 1 in others. They only fall: lower one whose chain is shorter."""
TYPE_CHECKS = 0
"""Most checks for dataset classes outside `dataset/`. It only falls: lower it with each check that goes."""
RINGS = {
    "corpus": ("prepare", "corpus"),
    "runs": ("run", "search", "explore", "packed"),
    "commands": ("tools", "__main__"),
}
"""Packages around the core, which is all others: what a training step needs, or what two rings share."""
LINES = {"core": (24_248, 20_500), "around it": (15_845, 14_400)}
"""Most code lines of the core and of the rings: now, which only falls, and the budget that what-belongs.md states."""
SEAM = 90
"""Most names in `core.pyi`, the list of names of the core on which the rings may build."""
BESIDE = 116
"""Most names of the core that the rings import and the list lacks. It only falls."""
TOUCHES = 3
"""Most modules of a ring that another ring imports; the commands may import all. It only falls."""
CONSTANTS = 19
"""Most names of constants that several modules give different values. It only falls."""
PATCHES = 116
"""Most monkeypatches of our own names in tests. It only falls: a size or a time that tests change is an argument."""
LOCKS = (14, 8)
"""Most locks within a process in `src/binidx`: now, which only falls, and what the issue of machines demands."""

MACHINES = (
    "binidx.jobs.job_folder",
    "binidx.jobs.runner",
    "binidx.jobs.stages",
    "binidx.jobs.task_queue",
    "binidx.dataset.rank_agreement",
    "binidx.index.cache.lease",
    "binidx.loader.incidents",
    "binidx.loader.prediction",
    "binidx.loader.readahead_window",
    "binidx.storage.cache.chunk_fetch",
    "binidx.storage.cache.eviction",
    "binidx.storage.cache.fill_plan",
    "binidx.storage.requests.rate_limiter",
    "binidx.storage.requests.request_rate",
    "binidx.storage.requests.request_schedule",
    "binidx.storage.requests.retries",
    "binidx.storage.task_schedule",
)
SHELLS = (
    "binidx.corpus.copies.convert_owner",
    "binidx.index.cache.build_lock",
    "binidx.jobs.parts",
    "binidx.loader.losses",
    "binidx.loader.monitoring",
    "binidx.loader.readahead",
    "binidx.storage.cache.cached_object",
    "binidx.storage.cache.fill_progress",
    "binidx.storage.cache.filling",
    "binidx.storage.cache.node_lock",
    "binidx.storage.cache.object_files",
    "binidx.storage.cache.quota_files",
    "binidx.storage.effects",
    "binidx.storage.steps",
    "binidx.storage.requests.node_rates",
    "binidx.storage.requests.scheduler",
    "binidx.storage.threads",
)
IMPURE = {"asyncio", "fcntl", "logging", "mmap", "os", "random", "socket", "threading", "time"}
"""Modules that decide, as functions of events and a given time, or that yield effects; those that carry them out, so
far with clocks and files of their own; and modules that the former must not import:
docs/contributing/decisions/simulation.md."""


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


def calls_of_spans() -> Iterator[str]:
    """Calls of `Order.spans` outside the packages that may cut spans."""
    for path in modules():
        inside = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())) if inside.parts[0] not in SPAN_PACKAGES else ():
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith(".spans") and called != "super().spans":
                yield f"{inside}:{node.lineno}"


def own_patches() -> Iterator[str]:
    """Calls of `setattr` of a MonkeyPatch in tests, of what belongs to binidx or stands in a variable."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = dict(imported_names(tree := ast.parse(path.read_text())))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                first = ast.unparse(node.args[0]).partition(".")[0].strip("'")
                named = isinstance(node.args[0], ast.Constant)
                if (first if named else names.get(first, "binidx")).startswith("binidx"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:90]}"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with a word that the style forbids, and docstrings that begin with a clause."""
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if found := WORST.search(line):
            yield number, f"{found[0]!r}: {line.strip()[:90]}"
    if path.suffix == ".py":
        for number, text in docstrings(path):
            if OPENING.match(text):
                yield number, f"begins with a clause: {text.splitlines()[0][:90]}"


def syntax_trees(*folders: Path) -> Trees:
    """Syntax trees of the modules below folders, with absolute imports; a package is its `__init__`."""
    trees: Trees = {}
    for path, top in [(path, folder.parent) for folder in folders for path in sorted(folder.rglob("*.py"))]:
        parts = path.relative_to(top).with_suffix("").parts
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = ".".join(parts[:-1])
                node.module, node.level = resolve_name("." * node.level + (node.module or ""), package), 0
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    return trees


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local and full name of each import of a module: at the top, in functions, and for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((alias.asname or alias.name, base + alias.name) for alias in node.names)


def impure_machines(trees: Trees) -> list[str]:
    """Return the machines that import a module of time, threads, files or chance, and its name."""
    imports = ((machine, name.partition(".")[0]) for machine in MACHINES for _, name in imported_names(trees[machine]))
    return [f"{machine}: {name}" for machine, name in imports if name in IMPURE]


def circles(trees: Trees) -> set[frozenset[str]]:
    """Largest sets of modules of which each imports all others, by itself or by other modules."""
    reached = dict[str, set[str]]()
    for module, tree in trees.items():
        targets = {name if name in trees else name.rpartition(".")[0] for _, name in imported_names(tree)}
        reached[module] = (targets & trees.keys()) - {module}
    for middle in trees:  # Warshall's algorithm
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    mutual = {module: frozenset(name for name in reached[module] if module in reached[name]) for module in trees}
    return {*filter(None, mutual.values())}


def own_bases(trees: Trees) -> dict[str, list[str]]:
    """Full name of each class -> those of its bases that are defined in these modules, too."""
    bases = dict[str, list[str]]()
    for module, tree in trees.items():
        names = dict(imported_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                texts = (ast.unparse(base).partition("[")[0] for base in node.bases)
                parts = (text.partition(".") for text in texts)
                bases[f"{module}.{node.name}"] = [
                    names.get(first, first if dot else f"{module}.{first}") + dot + rest for first, dot, rest in parts
                ]
    return {name: [base for base in found if base in bases] for name, found in bases.items()}


def deepest_classes(trees: Trees) -> dict[str, tuple[int, str]]:
    """Sub-package or module at the top -> classes in its longest chain of own bases, and the class at its end.

    A class without a base of its own, as one of a Protocol, has a chain of 1.
    """
    bases = own_bases(trees)

    def depth(name: str) -> int:
        return 1 + max(map(depth, bases[name]), default=0)

    deepest = dict[str, tuple[int, str]]()
    for name in sorted(bases):
        part = name.split(".")[1]
        deepest[part] = max(deepest.get(part, (0, "")), (depth(name), name), key=lambda chain: chain[0])
    return deepest


def dataset_classes(trees: Trees) -> set[str]:
    """Names of the classes of `dataset/` that end in "Dataset", without low-level ones, which are IndexedDatasets."""
    bases = own_bases(trees)

    def is_low_level(name: str) -> bool:
        return name.endswith(".IndexedDataset") or any(map(is_low_level, bases[name]))

    names = [name for name in bases if name.endswith("Dataset") and name.split(".")[1] == "dataset"]
    return {name.rpartition(".")[2] for name in names if not is_low_level(name)}


def type_checks(trees: Trees) -> list[str]:
    """Module and line of each `isinstance`, `issubclass` and class pattern of a dataset class outside `dataset/`."""
    classes, checks = dataset_classes(trees), list[str]()
    for module, tree in trees.items():
        names = dict(imported_names(tree))
        for node in ast.walk(tree) if module.split(".")[1:2] != ["dataset"] else ():
            kinds: list[ast.expr] = [node.cls] if isinstance(node, ast.MatchClass) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                kinds = node.args[1:]
            parts = [part for kind in kinds for part in ast.walk(kind) if isinstance(part, ast.Name | ast.Attribute)]
            texts = [ast.unparse(part) for part in parts]
            if any(names.get(text, text).rpartition(".")[2] in classes for text in texts):
                checks.append(f"{module}:{node.lineno}")
    return checks


def ring_of(module: str) -> str:
    """The ring of a module, such as `binidx.run.plan`; "core" of one of the core."""
    part = module.removeprefix("binidx.").partition(".")[0]
    return next((ring for ring, parts in RINGS.items() if part in parts), "core")


def names_across_seam(trees: Trees) -> set[str]:
    """Full names of the core that modules of the rings import; errors are for all."""
    found = set[str]()
    for module, tree in trees.items():
        imported = {name for _, name in imported_names(tree)} if ring_of(module) != "core" else set()
        found |= {name for name in imported if name.startswith("binidx.") and ring_of(name) == "core"}
    return {name for name in found if not name.startswith("binidx.errors")}


def names_in_seam() -> set[str]:
    """Full names in `core.pyi`."""
    return {name for _, name in imported_names(ast.parse((PACKAGE / "core.pyi").read_text()))}


def touched_modules(trees: Trees) -> set[str]:
    """Modules of a ring that another ring than the commands imports."""
    touched = set[str]()
    for module, tree in trees.items():
        ring = ring_of(module)
        homes = {name if name in trees else name.rpartition(".")[0] for _, name in imported_names(tree)} & trees.keys()
        touched |= {home for home in homes if ring not in ("core", "commands") and ring_of(home) not in ("core", ring)}
    return touched


def constants(trees: Trees) -> dict[str, set[str]]:
    """Names of constants that modules give different values, and these values as text."""
    values = defaultdict[str, set[str]](set)
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                values[node.targets[0].id].add(ast.unparse(node.value))
    return {name: texts for name, texts in values.items() if len(texts) > 1}


def rises(
    mutual: set[frozenset[str]], chains: dict[str, tuple[int, str]], checks: list[str]
) -> Iterator[list[str] | tuple[int, str]]:
    """Circles, chains of bases and checks of types that `CIRCLES`, `DEPTHS` and `TYPE_CHECKS` do not allow."""
    yield from (sorted(circle) for circle in mutual if not any(circle <= allowed for allowed in CIRCLES))
    yield from (chain for part, chain in chains.items() if chain[0] > DEPTHS.get(part, 1))
    if len(checks) > TYPE_CHECKS:
        yield checks


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
    texts = [*source, *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    worst = [f"{path.relative_to(ROOT)}:{number} {text}" for path in texts for number, text in prose(path)]
    print(f"modules: {len(files)}, median {median(sizes):.0f} lines, largest {max(sizes)}")
    print(f"fullest folders: {folders.most_common(3)}")
    lines = {path: code_lines(path) for path in source}
    print(f"code lines in src and tools: {sum(lines.values()):,}")
    rings, packages = Counter[str](), Counter[str]()
    for path, count in lines.items():
        inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
        module = f"binidx.{inside.with_suffix('').as_posix().replace('/', '.')}"
        rings[ring_of(module)] += count
        packages[inside.parts[0]] += count
    print(f"code lines by ring: {dict(rings)}")
    sums = {"core": rings["core"], "around it": rings.total() - rings["core"]}
    bounds_of = {
        name: f"{count:,} (now at most {LINES[name][0]:,}, budget {LINES[name][1]:,})" for name, count in sums.items()
    }
    print(f"code lines of the core and around it: {bounds_of}")
    if "--machines" in sys.argv:
        shells = [PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in (*MACHINES, *SHELLS)]
        print(*(f"{lines[path]:7,} {path.relative_to(PACKAGE)}" for path in shells), sep="\n")
    if "--lines" in sys.argv:
        print(*(f"{count:7,} {name}" for name, count in packages.most_common()), sep="\n")
    print(f"names at the top of several modules: {sorted(repeated) or 0}")
    print(f"module names that repeat: {sorted(name for name, count in leafs.items() if count > 1) or 0}")
    print(f"modules outside storage/stores that name a driver: {[str(p.relative_to(PACKAGE)) for p in named] or 0}")
    print(f"hasattr, and getattr with a default: {len(asked)}")
    print(f"docstrings that begin with a clause, and forbidden words: {worst or 0}")
    unchecked = [*tests_without_a_check()]
    print(f"tests without a check: {unchecked or 0}")
    trees = syntax_trees(PACKAGE, ROOT / "tools")
    mutual, checks = circles(trees), type_checks(trees)
    chains = deepest_classes({module: tree for module, tree in trees.items() if module.startswith("binidx.")})
    print(f"circles of modules: {sorted(map(sorted, mutual)) or 0}")
    print(f"longest chains of own classes: { {part: chain for part, chain in chains.items() if chain[0] > 1} }")
    print(f"checks for dataset classes outside dataset/: {len(checks)}")
    more = [*rises(mutual, chains, checks)]
    across, seam, several, touched = names_across_seam(trees), names_in_seam(), constants(trees), touched_modules(trees)
    beside = across - seam
    print(f"names of the core that the rings import: {len(across)}, {len(beside)} beside the {len(seam)} of core.pyi")
    print(f"modules that another ring imports: {len(touched)} {sorted(touched)}")
    print(f"names of constants with several values: {len(several)}")
    patches = [*own_patches()]
    print(f"monkeypatches of our own names: {len(patches)}")
    locks = [f"{path}:{wait.line}" for path, wait in all_waits() if wait.kind == LOCK and path.startswith("src/")]
    print(f"locks within a process: {len(locks)} (now at most {LOCKS[0]}, budget {LOCKS[1]})")
    bounds = [(seam, SEAM), (beside, BESIDE), (touched, TOUCHES), (several, CONSTANTS), (patches, PATCHES)]
    bounds.append((locks, LOCKS[0]))
    table = ast.get_docstring(trees["binidx.forks"]) or ""  # of the locks
    bounds.append(([place for place in locks if f"\n    {Path(place.partition(':')[0]).stem} " not in table], 0))
    more += [sorted(names) for names, most in bounds if len(names) > most]
    print(f"more circles, longer chains, more checks, names, constants, patches, locks than are allowed: {more or 0}")
    impure = impure_machines(trees)
    print(f"machines that import time, threads, files or chance: {impure or 0}")
    spans = [*calls_of_spans()]
    print(f"calls of Order.spans outside {', '.join(SPAN_PACKAGES)}: {spans or 0}")
    if "--list" in sys.argv:
        print(*asked, *worst, *checks, *patches, sep="\n")
    full = {folder for folder, count in folders.items() if count > LARGEST_FOLDER}
    large = [str(path) for path, size in zip(files, sizes, strict=True) if size > LARGEST_MODULE]
    grown = [name for name, count in sums.items() if count > LINES[name][0]]
    broken = [*full, *large, *worst, *unchecked, *more, *impure, *spans, *grown]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
