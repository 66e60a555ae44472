"""`python tests/mutants.py` draws the same mutants for a seed, and reports those that survive."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fast import ROOT
from mutants import all_changes, draw, files_of, main, mutant

LIMITS = """
def is_full(size: int, limit: int) -> bool:
    return size >= limit


def is_long(size: int, limit: int) -> bool:
    return size >= limit
"""
TESTS = """
from toy.limits import is_full

def test_is_full() -> None:
    assert [is_full(size, 5) for size in (4, 5, 6)] == [False, True, True]

def test_fails_with_and_without_a_mutant() -> None:
    raise AssertionError
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Return the root of a package `toy` with a tested and an untested function."""
    for name, text in {"src/toy/limits.py": LIMITS, "tests/test_limits.py": TESTS}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "root"


def test_survivors_are_reported_and_the_tree_stays(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modules", "toy", "--tests", "tests", "--seconds", "600"], toy) == 0
    first, second = capsys.readouterr().out.split("src/toy/limits.py:")[1:]
    assert first.startswith("3\n  - return size >= limit\n  + return ")
    assert "killed after" in first
    assert first.endswith("s tests/test_limits.py::test_is_full\n")
    assert second.startswith("7\n")
    assert "survived after" in second
    assert second.endswith("2 mutants: {'killed': 1, 'survived': 1}\n")
    assert (toy / "src/toy/limits.py").read_text() == LIMITS


def test_a_seed_draws_the_same_mutants_and_another_one_others() -> None:
    files = files_of(ROOT, "binidx.order")
    assert draw(files, 1, 20) == draw(files, 1, 20)
    assert {each.line for each in draw(files, 1, 20)} != {each.line for each in draw(files, 2, 20)}
    assert files_of(ROOT, "binidx.order.view") == [ROOT / "src/binidx/order/view.py"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b <= 'ä'", ["(a <= b <= 'ä')", "(a >= b <= 'ä')", "(a < b < 'ä')", "(a < b > 'ä')"]),
        ("a and b", ["(a or b)"]),
        ("x = 'ä', not a", ["x = 'ä', a"]),
        ("x = 2", ["x = 3", "x = 1"]),
        ("x = f(a, b, c=d)", ["x = f(b, a, c=d)"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = a if f() else b", ["x = a if (not f()) else b"]),
        ("[a for a in b if c]", ["[a for a in b if (not c)]"]),
        ("f(\n    a)", ["pass"]),
        ("self.a = b", ["pass"]),
        ("x: Literal[1] = f'{a + 1}'", []),
        ("def f():\n    return a", ["def f():\n    return None"]),
        (
            "while True:\n    break",
            ["while True:\n    pass", "while (not True):\n    break", "while False:\n    break"],
        ),
    ],
)
def test_each_change_is_of_one_place(tmp_path: Path, before: str, after: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(before)
    assert sorted(mutant(path, change).text for change in all_changes(ast.parse(before))) == sorted(after)
