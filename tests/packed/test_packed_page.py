"""What docs/moving/lit-gpt.md shows runs, and its tables name what there is."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from helpers.pages import python_blocks, read_page

import binidx
from binidx.packed.packed_run import FORKS, PackedDescription

PAGE = read_page("moving/lit-gpt")
DESCRIBED = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])


def test_the_examples_run(tmp_path: Path) -> None:
    for each in DESCRIBED["sets"]:
        builder = binidx.packed.PackedDatasetBuilder(str(tmp_path), each["name"], 45, 0, np.uint16)
        builder.add_array(np.random.default_rng(0).integers(1, 999, 20 * 45))
        builder.write_reminder()
        each["files"] = builder.filenames
    described = {**DESCRIBED, "block_size": 9, "num_ranks": 2, "micro_batch_size": 2}
    (tmp_path / "packed.json").write_text(json.dumps(described))
    names: dict[str, Any] = {"folder": str(tmp_path)}
    for example in python_blocks(PAGE):
        exec(example, names)
    assert names["tokens"].shape == names["labels"].shape == (2, 8)
    assert names["tokens"][0].tolist() == names["dataset"][98][:-1].tolist()
    assert {"file", "block"} < set(names["table"].column_names)


def test_its_tables_name_every_field_and_every_fork() -> None:
    named = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]*)`", row)}
    known = {each.name for each in fields(PackedDescription)}
    assert {*known, *FORKS} <= named
    assert DESCRIBED.keys() <= known
