"""Sizes that no machine can hold, such as tokens given as samples: an error with the option, the value and the need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx.errors import ConfigError, IndexBuildError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.run.run_file import format_run
from binidx.tools import main

STAGE: dict[str, Any] = {"blend": None, "num_samples": 10**15, "planned_samples": None}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "2^62 samples": ({"sizes": [2**62, 0, 0]}, r"sizes: found 4,611,686,018,427,387,904 .* 55,340,232,221,128,654,848"),
    "tokens": ({"sizes": [10**15, 0, 0]}, r"sizes: found 1,000,000,000,000,000 .* 12,000,000,000,000,000 bytes"),
    "2^62 tokens": ({"sequence_length": 2**62}, r"sequence_length: found 4,611,686,018,427,387,904, .* bytes of mem"),
    "stage": ({"sizes": [0, 0, 0], "stages": [STAGE]}, r"stage: num_samples.* found 1,000,000,000,000,000 .* bytes"),
}  # fmt: skip
COMMANDS = {
    "plan": [], "trace": ["--steps", "0"], "where": ["--document", "1"], "account": [], "order": ["--to", "out"],
    "prepare bake": ["--to", "out"], "prepare read-plan": ["--to", "out"], "prepare index": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sizes")
    return write_with_megatron(directory / "en", np.full(40, 30, np.int32), np.random.default_rng(8))


def config(prefix: str, **changes: Any) -> binidx.GPTDatasetConfig:
    given = {"random_seed": 1, "sequence_length": 24, "blend": ([prefix], None), "split": "1", "tokenizer": TOKENIZER}
    return binidx.GPTDatasetConfig(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_sizes_beyond_every_machine_name_option_value_and_need(
    case: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, needed = CASES[case]
    described = json.loads(format_run(binidx.Run(config(prefix), [50, 0, 0], 2)))
    for name, value in changes.items():
        (described if name in described else described["config"])[name] = value
    for stage in described["stages"] or ():
        stage["blend"] = described["config"]["blend"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(described))
    for name, rest in COMMANDS.items():
        assert main([*name.split(), str(path), *rest]) == 2
        assert re.search(needed, capsys.readouterr().err)
    with pytest.raises(ConfigError, match=needed):
        binidx.Run.load(str(path))


@pytest.mark.parametrize("cache", [None, "cache"])
def test_an_index_that_does_not_fit_names_the_bytes_and_the_options(
    cache: str | None, prefix: str, tmp_path: Path
) -> None:
    # Each number is allowed; together they need more epochs than an address space holds.
    path = None if cache is None else f"{tmp_path}/{cache}"
    for blend in (([prefix], None), ([prefix], [1.0])):
        given = config(prefix, blend=blend, sequence_length=2**31 - 1, path_to_cache=path)
        builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [2**40, 0, 0], lambda: True, given)
        with pytest.raises(IndexBuildError, match=r"need(s)? [\d,]+.*; request fewer samples \(sizes and num_samples"):
            builder.build()


def test_an_array_that_does_not_fit_in_memory_is_an_error_of_the_index() -> None:
    for size in (2**50, 2**62):  # more than an address space, and than NumPy counts
        needed = rf"does not fit in memory \(needs {8 * size:,} bytes\)"
        with pytest.raises(IndexBuildError, match=f"rows: {needed}"), ArrayWriter().array("rows", (size,), np.int64):
            pass
        with pytest.raises(IndexBuildError, match=needed), ArrayWriter().scratch(size, np.int64):
            pass
