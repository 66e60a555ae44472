"""The C core's own tests under ASan and UBSan, and that they fail when the code is wrong."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def check(folder: Path, inputs: int = 300) -> subprocess.CompletedProcess[str]:
    command = [folder / "check.sh", str(inputs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


def test_the_c_core_holds() -> None:
    result = check(NATIVE)
    assert result.returncode == 0, result.stderr


FAULTS = [
    ("blend_index.c", "behind > most", "behind >= most", "checks failed"),
    ("sample_rows.h", "c->away < 0 && c->row < c->stop", "c->away < 0", "heap-buffer-overflow"),
    ("sample_index.c", "stop < end ? stop : end", "stop > end ? stop : end", "heap-buffer-overflow"),
    ("locate.c", "count > length - first", "count > length", "checks failed"),
    ("gather.c", "piece_tokens(g, last) == 1 &&", "piece_tokens(g, last) == 0 &&", "checks failed"),
    ("unaligned.h", "(const char *)base + 4 * i", "(const char *)base + 5 * i", ""),
    ("shuffle_targets.c", "made + GROUP <= room", "made < room", "AddressSanitizer"),
    ("shuffle_targets.c", "low = i - GROUP + 1;", "low = i - GROUP + 3;", "not the plain rule"),
    ("copy_pieces.c", "stop - start > room - done", "stop - start > room", "checks failed"),
    ("find_patterns.c", "i < p->stride", "i < p->stride - 1", "not the plain rule"),
    ("scan_tokens.c", "start + length > s->held", "start + length >= s->held", "not the plain rule"),
    ("scan_tokens.c", "blank & kind >> 2", "blank & kind >> 3", "not the plain rule"),
    ("fold_text.c", "code < 0xe000", "code < 0xd900", "not the plain rule"),
    ("masked_mapping.c", "(i - k + 1)", "(i - k + 2)", "not the plain rule"),
    ("first_fit.c", "group[way] < length", "group[way] <= length", "checks failed"),
    ("first_fit.c", "node = node * WAYS + way", "node = node * WAYS + way % 8", "not the plain rule"),
    ("mt19937.c", "rng->key[0] = seed", "rng->key[0] = (uint32_t)(1 << (seed | 32))", "shift exponent"),
]
"""File, what is right there, what is wrong, and what the tests say of it."""


@pytest.mark.slow
@pytest.mark.parametrize(("file", "right", "wrong", "message"), FAULTS)
def test_a_fault_in_the_c_core_fails_its_tests(tmp_path: Path, file: str, right: str, wrong: str, message: str) -> None:
    shutil.copytree(NATIVE, tmp_path, dirs_exist_ok=True)
    source = (tmp_path / file).read_text()
    assert source.count(right) == 1
    (tmp_path / file).write_text(source.replace(right, wrong))
    result = check(tmp_path)
    assert result.returncode != 0
    assert message in result.stderr
