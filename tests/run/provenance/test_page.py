"""The page on orders: its examples run, one after the other, as in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import Tokenizer

import binidx
from binidx.run.provenance.run_order import RunOrder
from binidx.run.run_file import SavedTokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "find-documents.md").read_text()


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for number in range(80):
            builder.add_document([number] * 30, [30])
        builder.finalize(f"{tmp_path}/en.idx")
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=24, blend=([f"{tmp_path}/en"], None), split="1,0,0",
        tokenizer=SavedTokenizer.of(Tokenizer(pad=-5, eod=-6)), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )  # fmt: skip
    binidx.Run(config, [None, None, None], 2, 2, global_batch_size=8).save(f"{tmp_path}/run.json")
    found: dict[str, Any] = {"folder": str(tmp_path)}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example, found)
    assert found["table"].num_rows == 4
    assert "document " in capsys.readouterr().out
    order: RunOrder = found["order"]
    readings, _ = order.where(0, [7], order.num_steps() or 0)
    assert set(found["seen"]) >= set(zip(*(each.tolist() for each in readings[:3]), strict=True))


def test_every_column_has_its_row() -> None:
    places = ["step", "rank", "slot", "sample", "source", "epoch"]
    for name in [*places, "docs", "start", "stop", "spans", "input_ids"]:
        assert re.search(rf"^\| .*`{name}`", PAGE, re.MULTILINE), name
