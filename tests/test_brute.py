"""Answers of the commands against a search, by brute force, in the tokens that loaders have served."""

from __future__ import annotations

from pathlib import Path

import brute
import pytest


@pytest.mark.parametrize("name", [*brute.KINDS, *brute.HISTORIES])
def test_passages_are_counted_by_the_tokens_that_loaders_served(name: str, tmp_path: Path) -> None:
    counts = brute.check_exposures(tmp_path, name, 240, 1)
    assert counts.total() >= 240
    assert counts["whole"]
    assert counts["part"]


@pytest.mark.slow
def test_a_hundred_thousand_passages_are_counted_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert brute.main(["exposures", "--passages", "100000", "--seed", "4"]) == 0
    assert "passages are as they were served" in capsys.readouterr().out
