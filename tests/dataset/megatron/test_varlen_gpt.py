"""GPT samples as documents and lengths: the tokens of `GPTDataset`, each padded for the ranks that share it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, random_lengths, write_with_megatron

import binidx
from binidx.dataset.megatron.gpt_variants import VarlenGPTDataset
from binidx.errors import ConfigError
from binidx.loader.collate import collate
from binidx.loader.torch_loader import build_pretraining_data_loader


def build(cls: Any, prefixes: list[str], **changes: Any) -> Any:
    given: dict[str, Any] = {
        "random_seed": 3, "sequence_length": 32, "blend": (prefixes, [1.0] * len(prefixes)), "split": "1,0,0",
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": True,
        "inter_document_masking": True,
    }  # fmt: skip
    config = binidx.GPTDatasetConfig(**{**given, **changes})
    return binidx.BlendedMegatronDatasetBuilder(cls, [60, 0, 0], lambda: True, config).build()[0]


def without_pads(sample: Any, name: str) -> Any:
    """What is not a pad, by the lengths of documents."""
    original, padded = (np.asarray(sample[name]) for name in ("original_seq_len", "padded_seq_len"))
    parts = zip(np.cumsum(padded) - padded, original, strict=True)
    return np.concatenate([np.asarray(sample[name])[start : start + count] for start, count in parts])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_without_their_pads_samples_are_those_of_gpt(seed: int, ranks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, 60)
    lengths[0] += 1
    prefix = write_with_megatron(tmp_path / "en", lengths, rng)
    options = {"context_parallel_size": ranks, "add_extra_token_to_sequence": bool(seed % 2)}
    ours, gpt = (build(cls, [prefix], **options) for cls in (VarlenGPTDataset, binidx.GPTDataset))
    for idx in range(0, 60, 7):
        sample, needed = ours[idx], gpt[idx]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(without_pads(sample, name), needed[name])
            assert sample[name].dtype == needed[name].dtype
        original, padded = (np.asarray(sample[name]) for name in ("original_seq_len", "padded_seq_len"))
        assert original.tolist() == np.diff(np.unique(np.asarray(needed["cu_seqlens"]))).tolist()
        assert not (padded % (2 * ranks if ranks > 1 else 1)).any()
        assert ((padded - original >= 0) & (padded - original < 2 * ranks)).all()
        assert len(sample["tokens"]) == padded.sum()
        lost = Counter(np.asarray(sample["loss_mask"]).tolist())[0.0] - Counter(needed["loss_mask"].tolist())[0.0]
        assert lost == (padded - original).sum()
        starts = np.cumsum(padded) - padded
        assert sample["position_ids"][starts.tolist()].tolist() == [0] * len(starts)


def test_batches_of_a_blend_in_a_store_are_one_row_of_all_documents(s3: Bucket, tmp_path: Path) -> None:
    rng, prefixes = np.random.default_rng(0), []
    for name in ("en", "code"):
        prefixes.append(f"{s3.fresh()}/{name}")
        with binidx.IndexedDatasetBuilder(f"{prefixes[-1]}.bin", dtype=np.uint16) as builder:
            for length in rng.integers(1, 30, 100):
                builder.add_document(rng.integers(1, 900, length), [length])
            builder.finalize(f"{prefixes[-1]}.idx")
    blend = build(VarlenGPTDataset, prefixes, context_parallel_size=2)
    loader = build_pretraining_data_loader(blend, 0, 4, look_ahead=3)
    assert loader is not None
    for step, batch in zip(range(6), loader, strict=False):
        samples = [blend[idx] for idx in range(4 * step, 4 * step + 4)]
        assert_same_sample(batch, collate(samples))
        assert_same_sample(blend.__getitems__([4 * step + 3])[0], samples[3])
        np.testing.assert_array_equal(
            batch["tokens"][0], np.concatenate([np.asarray(sample["tokens"]) for sample in samples])
        )
        lengths = np.concatenate([np.asarray(sample["padded_seq_len"]) for sample in samples])
        assert np.diff(np.asarray(batch["cu_seqlens_padded"][0])).tolist() == lengths.tolist()
        assert batch["cu_seqlens"].shape == batch["cu_seqlens_padded"].shape == (1, len(lengths) + 1)
        assert batch["dataset_id"].shape == (4,)


def test_samples_without_bounds_of_documents_are_refused(tmp_path: Path) -> None:
    prefix = write_with_megatron(tmp_path / "en", np.full(9, 9, np.int32), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="inter_document_masking: found False, samples of documents need True"):
        build(VarlenGPTDataset, [prefix], inter_document_masking=False)
