"""convert and verify by workers: what one process writes and finds, whoever does which part, also after a break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.random_datasets import Document, build_ours

from binidx.corpus import token_parts
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.jobs.parts import Workers
from binidx.storage.codecs.segments import SEGMENT_BYTES

HERE = Workers(count=2)
WAYS = [StorageFormat(), StorageFormat("raw", checksums=True), StorageFormat("zstd"), StorageFormat("zstd", 1)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_parts, "LEAST_BYTES", SEGMENT_BYTES)


def objects(prefix: Any) -> dict[str, bytes]:
    """Names after the prefix, and contents, of all objects there."""
    fs, path = fsspec.url_to_fs(str(prefix))
    fs.invalidate_cache()
    return {
        name[len(path) :] if name.startswith(path) else name: fs.cat(name)
        for name in fs.find(path.rpartition("/")[0])
        if name.startswith(path)
    }


def build(prefix: Path, num_bytes: int, seed: int = 0) -> str:
    """uint16 with modes; documents of all lengths, some empty, one longer than a part; the last one ends anywhere."""
    rng, left, documents = np.random.default_rng(seed), num_bytes // 2, []
    while left:
        count = min(left, int(rng.choice([0, 1, 700, SEGMENT_BYTES // 2, SEGMENT_BYTES])))
        tokens = np.minimum(rng.geometric(0.01, count), 65535).astype(np.uint16)
        documents.append(Document(tokens, [count], [1]))
        left -= count
    return build_ours(prefix, documents, np.uint16, multimodal=True)


SIZES = [0, 2, SEGMENT_BYTES - 2, SEGMENT_BYTES, SEGMENT_BYTES + 2, 5 * SEGMENT_BYTES, 7 * SEGMENT_BYTES + 4242]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source_form", ["raw", "zstd", "sums", "virtual", "virtual zstd"])
def test_a_copy_by_workers_has_the_bytes_of_a_copy_by_one_process(size: int, source_form: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, size, source_form)
    for number, way in enumerate(WAYS):
        one = convert_dataset(source, tmp_path / f"one{number}" / "en", way=way)
        many = convert_dataset(source, tmp_path / f"many{number}" / "en", way=way, workers=HERE)
        assert objects(tmp_path / f"many{number}" / "en") == objects(tmp_path / f"one{number}" / "en")
        assert (many.num_tokens, many.target_bytes, many.verified) == (one.num_tokens, one.target_bytes, one.verified)
        assert many.parts_missing == 0


def source_of(folder: Path, size: int, form: str) -> str:
    source = build(folder / "en", size)
    if form == "sums":
        convert_dataset(source, source, way=StorageFormat(checksums=True))
    if form.endswith("zstd"):
        convert_dataset(source, source := f"{folder}/packed", way=StorageFormat("zstd"))
    if form.startswith("virtual"):
        merge_virtually([source, source], source := f"{folder}/merged")
    return source
