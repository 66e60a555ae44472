"""What docs/moving says of the peers: our halves run, and bring over data as the peers write it.

The data is made by hand here, and `streaming` is a list of samples, so that no peer need be installed. The halves in
```py are the peers' own; `tests/bench/peers.txt` has the versions that they were checked with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
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
STREAM = np.concatenate(DOCUMENTS)


def assert_brought_over(prefix: str, documents: list[Any]) -> None:
    found = binidx.IndexedDataset(prefix)
    assert len(found.document_indices) - 1 == len(found) == len(documents)
    assert all(np.array_equal(each, needed) for each, needed in zip(found[:], documents, strict=True))


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


@pytest.mark.parametrize("packed", [False, True])
def test_shards_are_brought_over(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = np.split(STREAM, range(64, len(STREAM), 64)) if packed else DOCUMENTS
    module = ModuleType("streaming")
    module.StreamingDataset = lambda **options: [{"tokens": each} for each in pieces]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "streaming", module)
    exec(STREAMING[1], {"folder": "", "prefix": str(tmp_path / "en"), "packed": packed})
    assert_brought_over(str(tmp_path / "en"), DOCUMENTS)


@pytest.mark.parametrize("dtype", ["<u2", "<i8"])
def test_chunks_are_brought_over(dtype: str, tmp_path: Path) -> None:
    chunks = []
    for number, items in enumerate((DOCUMENTS[:70], DOCUMENTS[70:])):
        data = [each.astype(dtype).tobytes() for each in items]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, data)])
        head = np.array([len(items), *offsets], "<u4").tobytes()
        (tmp_path / f"chunk-0-{number}.bin").write_bytes(head + b"".join(data))
        chunks.append({"filename": f"chunk-0-{number}.bin", "dim": sum(map(len, items)), "chunk_size": len(items)})
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": {"compression": None}}))
    exec(LITDATA[1], {"folder": str(tmp_path), "prefix": str(tmp_path / "en")})
    assert_brought_over(str(tmp_path / "en"), DOCUMENTS)


def test_flat_arrays_are_brought_over(tmp_path: Path) -> None:
    paths = [tmp_path / "part-00.npy", tmp_path / "part-01.npy"]
    STREAM.astype(np.uint32).tofile(paths[0])
    STREAM[:-1].astype(np.uint32).tofile(paths[1])  # the last document has no end
    names = {"prefix": str(tmp_path / "en"), "paths": paths, "dtype": np.int32, "stored_dtype": np.uint32}
    exec(OLMO_CORE[1], {**names, "eos_token_id": EOD})
    last = [DOCUMENTS[-1][:-1]] if len(DOCUMENTS[-1]) > 1 else []
    assert_brought_over(str(tmp_path / "en"), [*DOCUMENTS, *DOCUMENTS[:-1], *last])
