"""The C core lets go of the GIL: what two threads build at once is what one builds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from binidx.index.blend import build_blend_index, build_exhaustive_blend_index
from binidx.index.document_sample import build_document_index, build_sample_index
from binidx.index.gpt_indices import build_shuffle_index
from binidx.native.permutations import RandomState, torch_randperm

LENGTHS = np.random.default_rng(0).integers(0, 2000, 50_000).astype(np.int32)


def build(seed: int) -> bytes:
    """Every index once."""
    rng = RandomState(seed)
    documents = build_document_index(np.arange(len(LENGTHS), dtype=np.int32), 2, rng, True)
    samples = build_sample_index(LENGTHS, documents, 512, 2 * int(LENGTHS.sum()))
    shuffle = build_shuffle_index(len(samples) // 2, len(samples) - 1, rng)
    blends = build_blend_index([0.5, 0.3, 0.2], 20_000 + seed), build_exhaustive_blend_index([seed, 10_000, 7])
    arrays = [documents, samples, shuffle, *blends[0], *blends[1], torch_randperm(30_000, seed)]
    return b"".join(array.tobytes() for array in arrays)


def test_two_threads_at_once_build_the_same_bytes() -> None:
    needed = [build(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert list(pool.map(build, range(4))) == needed
