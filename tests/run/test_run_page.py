"""The file of a run is made as docs/how-to/plan-a-run.md shows it, and the tools take it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import trained_tokenizers

import binidx
from binidx.tools import main

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "plan-a-run.md").read_text()


def test_the_file_that_the_example_saves_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_tokenizers.save("gpt2", tmp_path)
    for name in ("en", "code"):
        with binidx.IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", np.uint16) as builder:
            for number in range(120):
                builder.add_document([number] * 200, [200])
            builder.finalize(f"{tmp_path}/{name}.idx")
    names: dict[str, Any] = {"folder": str(tmp_path)}
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, names)
    assert [len(names[split]) for split in ("train", "valid", "test")] == [1000, 40, 10]
    assert main(["plan", f"{tmp_path}/run.json"]) == 0
    assert "15 steps of 64 samples on 4 ranks, 2 at a time" in capsys.readouterr().out
