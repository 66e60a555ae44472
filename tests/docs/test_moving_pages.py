"""What docs/moving says of the peers: our halves run; `tests/corpus/test_formats.py` brings data over.

The halves in ```py are the peers' own; `tests/bench/peers.txt` has the versions that they were checked with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pages import python_blocks, read_page

import binidx

STREAMING = python_blocks(read_page("moving/streaming"))
LITDATA = python_blocks(read_page("moving/litdata"))
OLMO_CORE = python_blocks(read_page("moving/olmo-core"))
EOD = 0
LENGTHS = np.random.default_rng(0).integers(1, 60, 100)
DOCUMENTS = [np.append(np.arange(1, length, dtype=np.uint16), np.uint16(EOD)) for length in LENGTHS]


@pytest.mark.parametrize("ours", [STREAMING[0], LITDATA[0], OLMO_CORE[0]], ids=["streaming", "litdata", "olmo-core"])
def test_our_half_runs(ours: str, tmp_path: Path) -> None:
    for name in ("en", "code"):
        with binidx.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.uint16) as builder:
            for each in DOCUMENTS:
                builder.add_document(each, [len(each)])
            builder.finalize(str(tmp_path / f"{name}.idx"))
    example = ours.replace("s3://corpus", str(tmp_path)).replace("2048", "64").replace("1_000_000", "100")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["labels"].shape == (8, 64)
    assert names["loader"].state_dict()["consumed_samples"] > 0
