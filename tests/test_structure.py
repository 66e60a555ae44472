"""`python tests/structure.py` finds circles of modules, chains of bases and checks for dataset classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from structure import (
    CIRCLES,
    DEPTHS,
    TYPE_CHECKS,
    Trees,
    circles,
    constants,
    dataset_classes,
    deepest_classes,
    names_across_seam,
    ring_of,
    rises,
    syntax_trees,
    type_checks,
)
from waits import ACROSS, CONSTANT, EVENT, FINALIZER, HOOK, LOCK, THREAD, find_waits


@pytest.fixture
def trees(tmp_path: Path, request: pytest.FixtureRequest) -> Trees:
    """Return the syntax trees of a package `toy` with the modules of a test's parameter."""
    for name, text in request.param.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return syntax_trees(tmp_path / "toy")


def test_names_across_the_seam_are_those_of_the_core_that_a_ring_imports() -> None:
    texts = {
        "binidx.run.one": "from binidx.order.view import View, ViewOrder\nfrom binidx.run.two import Two",
        "binidx.run.two": "def late():\n    from binidx.order.view import View\nfrom binidx.errors import ConfigError",
        "binidx.loader.three": "from binidx.format.idx import DType",
        "tools.four": "import binidx.native.arguments\nfrom binidx.packed.five import Five",
    }
    names = names_across_seam({module: ast.parse(text) for module, text in texts.items()})
    assert names == {"binidx.order.view.View", "binidx.order.view.ViewOrder", "binidx.native.arguments"}
    assert [*map(ring_of, (*texts, "binidx.explore.app"))] == ["runs", "runs", "core", "commands", "runs"]


def test_constants_with_several_values() -> None:
    texts = ["BLOCK = 1 << 20\nSAME = 7\nlower = 1", "BLOCK = 64\nSAME = 7\nlower = 2\nALONE = 5"]
    found = constants({str(number): ast.parse(text) for number, text in enumerate(texts)})
    assert found == {"BLOCK": {"1 << 20", "64"}}


IN_FUNCTION = "def late():\n    from toy.one import One\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.one\n"
PAIR = {frozenset({"toy.one", "toy.two"})}


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        ({"one.py": "from toy.two import Two", "two.py": "from toy.one import One"}, PAIR),
        ({"one.py": "from toy import two", "two.py": "from . import one"}, PAIR),
        ({"one.py": "from toy.two import Two", "two.py": IN_FUNCTION}, PAIR),
        ({"one.py": "import toy.two as both", "two.py": FOR_TYPES}, PAIR),
        (
            {"one.py": "from toy.two import a\nfrom toy.three import a", "two.py": "import toy.one", "three.py": ""},
            PAIR,
        ),
        (
            {
                "one.py": "import toy.in_it.two",
                "in_it/two.py": "import toy.in_it",
                "in_it/__init__.py": "import toy.one",
            },
            {frozenset({"toy.one", "toy.in_it.two", "toy.in_it"})},
        ),
        ({"one.py": "import toy.two, toy.three", "two.py": "import toy.three", "three.py": "import os"}, set()),
        (
            {"one.py": "import toy.two", "two.py": "from importlib import import_module\nimport_module('toy.one')"},
            set(),
        ),
    ],
    indirect=["trees"],
)
def test_circles_are_modules_that_import_each_other(trees: Trees, expected: set[frozenset[str]]) -> None:
    assert circles(trees) == expected


@pytest.mark.parametrize(
    "trees",
    [
        {
            "low/base.py": "import abc\nclass Base(abc.ABC): ...\nclass Row(NamedTuple): ...",
            "low/child.py": "from toy.low import base\nclass Child(base.Base[int], Foreign): ...",
            "high/grandchild.py": "from toy.low.child import Child as Parent\nclass Child(Parent): ...",
            "alone.py": "class Wrong(ValueError): ...",
        }
    ],
    indirect=True,
)
def test_a_chain_of_bases_has_the_own_classes_only(trees: Trees) -> None:
    assert deepest_classes(trees) == {
        "alone": (1, "toy.alone.Wrong"),
        "high": (3, "toy.high.grandchild.Child"),
        "low": (2, "toy.low.child.Child"),
    }


DATASETS = """
from toy.low import IndexedDataset
class TextDataset: ...
class MixedDataset(TextDataset): ...
class RawDataset(IndexedDataset): ...
class TextDatasetConfig: ...
"""


@pytest.mark.parametrize(
    "trees",
    [
        {
            "low.py": "class IndexedDataset: ...",
            "dataset/text.py": f"{DATASETS}isinstance(data, TextDataset)",
            "one.py": "isinstance(data, TextDataset)",
            "two.py": "from toy.dataset import text\nissubclass(kind, (int, text.MixedDataset))",
            "three.py": "from toy.dataset.text import TextDataset as Text\nisinstance(data, Text | None)",
            "four.py": "match data:\n    case MixedDataset():\n        pass",
            "five.py": "isinstance(data, (RawDataset, TextDatasetConfig))\nisinstance(TextDataset, type)",
        }
    ],
    indirect=True,
)
def test_checks_for_dataset_classes_are_found_outside_their_package(trees: Trees) -> None:
    assert dataset_classes(trees) == {"TextDataset", "MixedDataset"}
    assert sorted(type_checks(trees)) == ["toy.four:2", "toy.one:1", "toy.three:2", "toy.two:2"]


def test_what_is_allowed_may_fall_and_not_rise() -> None:
    chains = {part: (depth, "binidx.Deep") for part, depth in DEPTHS.items()}
    assert [*rises(CIRCLES, chains, ["check"] * TYPE_CHECKS)] == []
    assert [*rises(set(), {}, [])] == []
    assert [*rises({frozenset([*circle][1:]) for circle in CIRCLES}, {}, [])] == []
    larger = {frozenset({"binidx.errors", *circle}) for circle in CIRCLES} | PAIR
    assert len([*rises(larger, {}, [])]) == len(larger)
    for part, (depth, name) in {**chains, "new": (1, "binidx.New")}.items():
        assert [*rises(set(), {part: (depth + 1, name)}, [])] == [(depth + 1, name)]
    assert [*rises(set(), {}, ["check"] * (TYPE_CHECKS + 1))]


def test_waits_are_found_however_their_functions_are_imported() -> None:
    text = """
import fcntl, os, threading, weakref
from atexit import register
from concurrent.futures import ThreadPoolExecutor as Pool
from threading import RLock
from dataclasses import field

WAIT_SECONDS, SIZE = 1.0, 2
PAUSE = 0.5
\"\"\"Longest pause, in seconds.\"\"\"
os.register_at_fork(after_in_child=print)

@register
def end():
    fcntl.flock(0, fcntl.LOCK_UN)

class Cache:
    def __init__(self, owner):
        self.locks = [threading.Lock() for _ in range(8)], RLock()
        self.changed, self.owner = threading.Event(), weakref.ref(owner)
        weakref.finalize(owner, print)
        with Pool(2) as pool:
            pool.submit(fcntl.flock(0, fcntl.LOCK_EX))

    def __del__(self):
        pass

class Queue:
    lock: object = field(default_factory=threading.Lock)

@register
async def end_soon():
    pass
"""
    found = [wait.kind for wait in find_waits(text)]
    assert sorted(found) == sorted(
        [LOCK, LOCK, LOCK, EVENT, THREAD, HOOK, ACROSS, *4 * [FINALIZER], CONSTANT, CONSTANT]
    )
    assert [wait.text for wait in find_waits(text) if wait.kind == CONSTANT] == ["WAIT_SECONDS", "PAUSE"]
