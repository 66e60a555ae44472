"""What docs/how-to/use-the-loader.md shows runs, and does what it says."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from helpers.gpt_samples import config
from helpers.traceable_runs import write_source

import binidx

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "use-the-loader.md").read_text()


def test_the_examples_run(tmp_path: Path) -> None:
    sources = {name: write_source(tmp_path / name, random.Random(name), False) for name in ("en", "code", "math")}

    def train_of(**options: Any) -> Any:
        made = config(([sources["en"]], None), split="1,0,0", **options)
        return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [300, 0, 0], lambda: True, made).build()[0]

    names: dict[str, Any] = {"binidx": binidx, "config": config(), "train_of": train_of, "train": train_of(), **sources}
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(examples) == 5
    exec(examples.pop(0), names)
    code = re.search(r"^    config = .*?\n\n", PAGE, re.S | re.M)
    assert code is not None
    shown = re.sub(r"s3://corpus", str(tmp_path), code[0].strip().replace("\n    ", "\n"))
    assert names["short"].as_code() == shown
    assert names["batch"]["tokens"].shape == (8, 64)
    exec(examples[0], names)
    assert names["state"]["consumed_samples"] == 8
    assert (names["second"]["tokens"] == names["again"]["tokens"]).all()
    assert not (names["first"]["tokens"] == names["again"]["tokens"]).all()
    exec(examples[1], names)
    assert (next(iter(names["loader"]))["tokens"] == names["first"]["tokens"]).all()
    exec(examples[2], names)
    lines = names["train"].proof.splitlines()
    shown = re.findall(r"^    (.*)$", PAGE[PAGE.index("print(train.proof)") :], re.M)
    shape = [re.sub(r"\S*/(\w+)  from its sample (\d+) of .*", r"\1 from \2", line) for line in lines]
    assert shape == [re.sub(r"\S*/(\w+)  from its sample (\d+) of .*", r"\1 from \2", line) for line in shown]
    exec(examples[3], names)
    assert [len(names["train"][number]["tokens"]) for number in (0, 159, 160)] == [16, 16, 64]
