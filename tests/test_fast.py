"""`make fast` finds the tests that a change of a module concerns."""

from __future__ import annotations

import pytest
from fast import MOST_TESTS, ROOT, TESTS, nearest_tests

MODULES = [path for path in sorted((ROOT / "src" / "binidx").rglob("*.py")) if path.name != "__init__.py"]


def names(path: str) -> list[str]:
    """Return the nearest tests of a file below the root, as paths below `tests`."""
    return [str(test.relative_to(TESTS)) for test in nearest_tests(ROOT / path)]


def test_every_module_has_a_near_test() -> None:
    near = {path: [*nearest_tests(path)] for path in MODULES}
    assert len(near) > 200
    assert {path for path, tests in near.items() if not all(test.is_file() for test in tests) or not tests} == set()
    assert max(map(len, near.values())) <= MOST_TESTS
    of_order = [test for path, tests in near.items() if path.parent.name == "order" for test in tests]
    assert TESTS / "order" / "test_orders.py" in of_order


@pytest.mark.parametrize(
    ("changed", "nearest"),
    [
        ("src/binidx/storage/stores/s3.py", "storage/stores/test_s3.py"),
        ("src/binidx/run/plan/inventory.py", "run/plan/test_inventory.py"),
        ("src/binidx/order/view.py", "order/test_orders.py"),
        ("src/binidx/run/plan/node_check.py", "tools/test_doctor_run.py"),  # by its command
        ("tools/grep.py", "tools/test_grep.py"),
        ("src/binidx/native/mappings.py", "index/test_masked_samples.py"),  # not the small tests of all datasets
        ("tests/order/test_orders.py", "order/test_orders.py"),
    ],
)
def test_the_nearest_test_is_the_one_of_that_name_or_use(changed: str, nearest: str) -> None:
    assert nearest in names(changed)[:2]


def test_a_test_is_near_to_a_module_that_its_helper_imports() -> None:
    changed = ROOT / "src/binidx/dataset/assemble/sentences.py"
    texts = [test.read_text() for test in nearest_tests(changed)]
    assert any("helpers.masked_datasets" in text and "assemble.sentences" not in text for text in texts)


@pytest.mark.parametrize(
    ("changed", "near"),
    [
        ("src/binidx/storage/cache/maintenance.py", "tools/test_cache.py"),  # one of 17 tests that call its command
        ("src/binidx/corpus/copies/copy_job.py", "tools/test_convert.py"),  # of another folder
    ],
)
def test_tests_of_the_name_of_a_user_are_near(changed: str, near: str) -> None:
    assert near in names(changed)
