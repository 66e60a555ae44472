"""What may run inside any allocation, under any lock, takes no lock, logs nothing and does no I/O.

A walk over the syntax tree finds all finalizers (`weakref.finalize`, `__del__`, callbacks of `weakref.ref`, destructors
of `ffi.gc`), hooks of `os.register_at_fork` and handlers of `signal.signal`, and follows their calls into our
functions. What it cannot follow must be in a list of harmless calls, so nothing escapes it. Functions of `atexit` are
not among them: they may wait.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_ranks import ForkedRanks, forked_ranks

from binidx.storage.threads import Background

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/binidx", "tools")

HARMLESS = {
    *("len", "list", "dict", "set", "deque", "range", "int", "bool", "sum", "OrderedDict", "WeakSet", "count"),
    "SimpleQueue",  # whose `put` is reentrant: a token for a thread
    *("Lock", "RLock"),  # a new one, which nobody holds
    "getpid",
    "close",  # of a descriptor, by os.close, and of a mapping: one system call. A later close would drop the record
    # locks of a newer descriptor of the same file.
    "suppress",
    "set_threshold",  # of the collector: three ints
    "binidx_give_slot",  # one atomic store in C
}
"""Functions and classes, of others or of C, that a finalizer may call."""

CONTAINERS = ("list", "dict", "set", "deque", "OrderedDict", "WeakValueDictionary", "WeakSet")
METHODS = {
    **{name: {"append", "pop", "clear", "discard", "values", "items", "popleft"} for name in CONTAINERS},
    "SimpleQueue": {"put"},
    "mmap": {"close"},
}
"""Class -> methods that a finalizer may call."""

HANDLERS = {"SIG_IGN", "SIG_DFL", "default_int_handler"}
"""Handlers of `signal` itself: the last one raises KeyboardInterrupt, and does nothing else."""


Assignment = ast.Assign | ast.AnnAssign | ast.For | ast.comprehension


@dataclass
class Scope:
    """A function, a class or a module, with the names that it defines."""

    node: ast.AST
    module: Path
    outer: Scope | None = None
    functions: dict[str, Scope] = field(default_factory=dict)
    classes: dict[str, Scope] = field(default_factory=dict)
    types: dict[str, set[str]] = field(default_factory=dict)
    """Variable or attribute -> classes that it may have, by their last names."""

    def chain(self) -> Iterator[Scope]:
        """This scope, and those around it."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.outer


Place = tuple[Path, int, str]
"""Module, line, and problem."""


class Walk:
    """All modules of some folders, and what is reachable from their finalizers, hooks and handlers."""

    def __init__(self, files: list[Path]) -> None:
        self.classes: dict[str, Scope] = {}
        self.registered: list[tuple[str, ast.expr | Scope, Scope]] = []
        self.problems: list[Place] = []
        self.assignments: list[tuple[Scope, Assignment]] = []
        self.seen: set[ast.AST] = set()
        modules = [Scope(ast.parse(path.read_text("utf-8")), path) for path in files]
        self.functions: dict[str, list[Scope]] = {}
        for module in modules:
            self.define(module, module.node)
        for _ in range(2):  # what is assigned below may name what is above
            for scope, node in self.assignments:
                self.note_types(scope, node)
        for module in modules:
            self.find(module)
        for kind, callback, scope in self.registered:
            self.follow(callback, scope, kind)

    # What is defined where

    def define(self, scope: Scope, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = scope.functions[child.name] = Scope(child, scope.module, scope)
                self.functions.setdefault(child.name, []).append(inner)
                for argument in [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]:
                    if argument.annotation is not None:
                        inner.types[argument.arg] = names_in(argument.annotation)
                self.define(inner, child)
            elif isinstance(child, ast.ClassDef):
                inner = scope.classes[child.name] = self.classes[child.name] = Scope(child, scope.module, scope)
                self.define(inner, child)
            else:
                if isinstance(child, Assignment):
                    self.assignments.append((scope, child))
                self.define(scope, child)

    def note_types(self, scope: Scope, node: Assignment) -> None:
        """Note the classes that an assignment, or a loop, names for its variables; of `self.x` for the class."""
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [node.target]
        value: Any = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
        pairs = [(target, value) for target in targets]
        for target, own in [*pairs]:
            if isinstance(target, ast.Tuple) and isinstance(own, ast.Tuple):
                pairs += [*zip(target.elts, own.elts, strict=False)]
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        for target, own in pairs:
            is_field = isinstance(target, ast.Attribute) and dotted(target.value) == "self"
            holder, name = (scope.outer if is_field else scope), dotted(target).rpartition(".")[2]
            if holder is not None and name:
                found = self.classes_of(own, scope) if annotation is None else names_in(annotation)
                holder.types.setdefault(name, set()).update(found)

    def classes_of(self, node: ast.AST | None, scope: Scope) -> set[str]:
        """The classes that an expression may have."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "reversed"):
            return self.classes_of(node.args[0], scope) if node.args else {"list"}
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("values", "items")
        ):
            return self.classes_of(node.func.value, scope)
        if isinstance(node, ast.Call):
            return {last_name(node.func)}
        if isinstance(node, ast.Name) and node.id == "self":
            return {each.node.name for each in scope.chain() if isinstance(each.node, ast.ClassDef)}
        if isinstance(node, ast.Name):
            return next((each.types[node.id] for each in scope.chain() if node.id in each.types), set())
        if isinstance(node, ast.Attribute):
            owners = [self.classes[name] for name in self.classes_of(node.value, scope) if name in self.classes]
            return set().union(*(owner.types.get(node.attr, set()) for owner in owners))
        if isinstance(node, ast.Subscript):
            return self.classes_of(node.value, scope)
        if isinstance(node, ast.List | ast.ListComp):
            return {"list"}
        return {"dict"} if isinstance(node, ast.Dict) else set[str]()

    # What is registered

    def find(self, scope: Scope) -> None:
        for inner in [*scope.functions.values(), *scope.classes.values()]:
            self.find(inner)
        if isinstance(scope.node, ast.ClassDef) and "__del__" in scope.functions:
            self.registered.append(("__del__", scope.functions["__del__"], scope))
        for call in own_calls(scope.node):
            name = dotted(call.func)
            if re.fullmatch(r"(weakref\.)?finalize", name):
                self.registered.append(("finalize", call.args[1], scope))
            elif re.fullmatch(r"(weakref\.)?(ref|proxy|WeakMethod)", name) and len(call.args) > 1:
                self.registered.append(("weakref", call.args[1], scope))
            elif re.fullmatch(r"(os\.)?register_at_fork", name):
                self.registered += [("fork", keyword.value, scope) for keyword in call.keywords]
            elif re.fullmatch(r"(ffi\.)?gc", name):
                self.registered.append(("gc", call.args[1], scope))
            elif re.fullmatch(r"(signal\.)?signal", name):
                self.registered.append(("signal", call.args[1], scope))

    # What is reachable

    def follow(self, node: ast.expr | Scope, scope: Scope, kind: str) -> None:
        """Check a function that is called, or registered."""
        if isinstance(node, Scope):
            self.check(node)
        elif isinstance(node, ast.Lambda):
            self.check(Scope(node, scope.module, scope))
        elif kind == "signal" and (last_name(node) in HANDLERS or is_former_handler(node, scope)):
            return
        elif isinstance(node, ast.Name):
            found = next((each for outer in scope.chain() for each in self.named(node.id, outer)), None)
            if found is not None:
                self.check(found)
            elif node.id not in HARMLESS:
                self.fail(scope, node, f"{node.id} is not known to be harmless")
        elif isinstance(node, ast.Attribute):
            self.follow_method(node, scope)
        else:
            self.fail(scope, node, "a callback that cannot be followed")

    def named(self, name: str, scope: Scope) -> Iterator[Scope]:
        if name in scope.functions and not isinstance(scope.node, ast.ClassDef):
            yield scope.functions[name]
        elif name in scope.classes or (scope.outer is None and name in self.classes):
            yield from [made] if (made := self.classes[name].functions.get("__init__")) else []
        elif scope.outer is None and len(self.functions.get(name, [])) == 1 and imports(scope.node, name):
            yield self.functions[name][0]

    def follow_method(self, node: ast.Attribute, scope: Scope) -> None:
        owner = dotted(node.value)
        if owner in ("gc", "os", "threading", "contextlib", "itertools", "collections", "queue", "weakref", "lib"):
            if node.attr not in HARMLESS:
                self.fail(scope, node, f"{owner}.{node.attr} is not known to be harmless")
            return
        classes = self.classes_of(node.value, scope)
        known = [self.classes[name].functions[node.attr] for name in classes
                 if name in self.classes and node.attr in self.classes[name].functions]  # fmt: skip
        for method in known:
            self.check(method)
        if not known and not any(node.attr in METHODS.get(name, ()) for name in classes):
            self.fail(
                scope, node, f".{node.attr} of {sorted(classes) or 'an unknown class'} is not known to be harmless"
            )

    def check(self, scope: Scope) -> None:
        """Check the calls and `with` blocks of a function, once."""
        if scope.node in self.seen:
            return
        self.seen.add(scope.node)
        for call in own_calls(scope.node):
            self.follow(call.func, scope, "call")
        for block in own_nodes(scope.node):
            if isinstance(block, ast.With | ast.AsyncWith):
                for item in block.items:
                    is_suppress = (
                        isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "suppress"
                    )
                    if not is_suppress:
                        self.fail(scope, block, "a with block, which may be of a lock")
            if isinstance(block, ast.Yield | ast.Await | ast.Import | ast.ImportFrom):
                self.fail(scope, block, f"{type(block).__name__.lower()} takes locks")

    def fail(self, scope: Scope, node: ast.AST, problem: str) -> None:
        self.problems.append((scope.module, getattr(node, "lineno", 0), problem))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, class or module without those of functions and classes in it; decorators included."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    body: list[ast.AST] = [*node.body] if is_function else [*ast.iter_child_nodes(node)]  # type: ignore[attr-defined]
    while body:
        child = body.pop()
        yield child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body += child.decorator_list
        elif not isinstance(child, ast.Lambda):
            body += ast.iter_child_nodes(child)


def own_calls(node: ast.AST) -> list[ast.Call]:
    return [child for child in own_nodes(node) if isinstance(child, ast.Call)]


def dotted(node: ast.AST) -> str:
    """`a.b` of an expression; a part that is none is empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return dotted(node).rpartition(".")[2]


def names_in(annotation: ast.AST) -> set[str]:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return set(re.findall(r"\w+", str(text)))


def imports(module: ast.AST, name: str) -> bool:
    found = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return any(alias.name == name for node in found for alias in node.names)


def is_former_handler(node: ast.AST, scope: Scope) -> bool:
    """Whether a handler is restored that `signal.getsignal` or `signal.signal` returned in the same function."""
    return isinstance(node, ast.Name) and "getsignal" in ast.unparse(scope.node)


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


def test_no_finalizer_hook_or_handler_takes_a_lock_logs_or_does_io() -> None:
    walk = Walk(python_files())
    kinds = [kind for kind, _, _ in walk.registered]
    assert {kind: kinds.count(kind) > 0 for kind in ("finalize", "fork", "gc", "signal")} == dict.fromkeys(
        ("finalize", "fork", "gc", "signal"), True
    )
    assert walk.problems == []


PLANTED = """
import logging, os, queue, signal, threading, time, weakref

class Owner:
    def __init__(self) -> None:
        self._lock, self.tokens = threading.Lock(), queue.SimpleQueue()
        self.woken = threading.Event()
        {plant}

    def stop(self) -> None:
        self.note()

    def note(self) -> None:
        {problem}

    {method}

def hook() -> None:
    {problem}
"""
PLANTS = {
    "finalize": "weakref.finalize(self, self.stop).atexit = False",
    "ref": "self.ref = weakref.ref(self, lambda _: hook())",
    "fork": "os.register_at_fork(after_in_child=self.stop)",
    "signal": "signal.signal(signal.SIGTERM, lambda *_: hook())",
    "unknown": "weakref.finalize(self, found_somewhere)",
}
PROBLEMS = ["self.woken.set()", "self._lock.acquire()", "with self._lock: pass", "time.sleep(1)", "open('x')",
            "logging.getLogger('x').info('gone')", "threading.Thread().join()", "self.unknown.put(1)",
            "threading.Condition()", "os.unlink('x')", "import json"]  # fmt: skip


def problems_of(source: str, tmp_path: Path) -> list[str]:
    (tmp_path / "planted.py").write_text(source)
    return [problem for _, _, problem in Walk([tmp_path / "planted.py"]).problems]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_walk_finds_what_is_planted(problem: str, tmp_path: Path) -> None:
    for name, plant in PLANTS.items():
        assert problems_of(PLANTED.format(plant=plant, method="", problem=problem), tmp_path), name
    deleted = PLANTED.format(plant="pass", method="def __del__(self): self.stop()", problem=problem)
    assert problems_of(deleted, tmp_path)
    assert not problems_of(PLANTED.format(plant="pass", method="", problem=problem), tmp_path)


def test_the_walk_accepts_a_token_in_a_queue(tmp_path: Path) -> None:
    plant = "weakref.finalize(self, self.tokens.put, 1).atexit = False"
    assert not problems_of(PLANTED.format(plant=plant, method="", problem="self.woken.set()"), tmp_path)
    plant = PLANTS["finalize"]
    assert not problems_of(PLANTED.format(plant=plant, method="", problem="self.tokens.put(1)"), tmp_path)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as process:
        yield process


@pytest.mark.parametrize("path", ["read_ahead", "filling", "losses", "counters", "builder"])
def test_garbage_may_be_collected_at_any_opcode_of_its_own_path(path: str, ranks: ForkedRanks) -> None:
    (done,) = ranks.run("helpers.collecting", {"path": path}, [{}])
    assert (done["status"], done["log"]) == (0, "")
    assert int(done["out"]) > 100


class Owner:
    """An object for which a task runs."""


ENDING = """
import sys, threading
from binidx.storage import threads

class Owner:
    pass

owners = [Owner() for _ in range(3)]
threads.background().schedule.exit_seconds = 0.1
threads.background().add(owners[0], lambda: 1 / 0)
threads.background().add(owners[1], lambda: print("cleaned up", flush=True))
if sys.argv[1] == "hangs":
    losses = threads.background("binidx-losses", is_early=True)
    losses.schedule.exit_seconds = 0.1
    losses.add(owners[2], threading.Event().wait, 60.0)
"""


@pytest.mark.parametrize("end", ["hangs", "ends"])
def test_a_process_ends_in_time_whatever_a_task_does(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, end], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cleaned up\n")
    assert "binidx-cleanup: ZeroDivisionError: division by zero" in done.stderr
    assert ("binidx-losses: not done within 0 s at exit; the rest is lost" in done.stderr) == (end == "hangs")


def test_tokens_that_never_end_do_not_keep_a_task_from_its_time() -> None:
    background, owner, ran = Background("binidx-test"), Owner(), threading.Event()
    ended = False

    def again() -> None:
        if not ended:
            background.tokens.put(again)

    background.add(owner, ran.set, 0.01)
    again()
    again()
    assert ran.wait(300)
    ended = True


def test_a_task_that_fails_when_its_object_is_gone_runs_again() -> None:
    background, owner, ran = Background("binidx-test"), Owner(), threading.Event()
    failures = [ValueError("the store is away")]

    def task() -> None:
        if owner is None and failures:
            raise failures.pop()
        if owner is None:
            ran.set()

    background.add(owner, task, 0.01)
    owner = None  # type: ignore[assignment]
    assert ran.wait(300)
