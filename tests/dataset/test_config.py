"""The options of a Megatron script are taken: none that it has is unknown here, and none is passed over in silence."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
from helpers.gpt_data import TOKENIZER, Tokenizer
from helpers.oracle import megatron

import binidx

GIVEN: dict[str, Any] = {
    "random_seed": 1, "sequence_length": 8, "blend": (["a"], None), "split": "1,0,0", "tokenizer": TOKENIZER,
    "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
}  # fmt: skip


def test_every_field_of_megatron_is_here_with_its_default() -> None:
    ours = {each.name: each for each in fields(binidx.GPTDatasetConfig)}
    for theirs in fields(megatron.gpt.GPTDatasetConfig):
        assert ours[theirs.name].init == theirs.init, theirs.name
        changed = ("create_attention_mask", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        if theirs.default is not MISSING and theirs.name not in changed:  # those are off, as in Megatron-LM's arguments
            assert ours[theirs.name].default == theirs.default, theirs.name


def test_a_script_of_megatron_makes_its_config_here() -> None:
    # The arguments of pretrain_gpt.py, core_gpt_dataset_config_from_args, August 2026.
    config = binidx.GPTDatasetConfig(
        **GIVEN, blend_per_split=None, multiple_validation_sets=False, full_validation=False,
        num_dataset_builder_threads=2, path_to_cache="/cache", mmap_bin_files=True, create_attention_mask=False,
        object_storage_cache_path="/idx", mid_level_dataset_surplus=0.01, allow_ambiguous_pad_tokens=False,
        fast_cache_load=False, sequences_per_dataset=None, defer_npy_index_mmap=False, context_parallel_size=2,
        data_parallel_size=4, sequence_parallel_size=0, hybrid_context_parallel=False, inter_document_masking=False,
        sft_mock_dataset_config_json=None, varlen_mock_dataset_config_json=None, varlen_sbhd_validation=False,
    )  # fmt: skip
    assert config.padding_multiple == 4


@pytest.mark.parametrize("vocabulary", [None, 100, 65_536, 65_537])
def test_the_dtype_that_megatron_guesses_is_told(vocabulary: int | None) -> None:
    given = {**GIVEN, "tokenizer": Tokenizer(vocab_size=vocabulary)}  # type: ignore[arg-type]
    ours, theirs = (kind(**given) for kind in (binidx.GPTDatasetConfig, megatron.gpt.GPTDatasetConfig))
    assert ours.token_dtype_code == theirs.token_dtype_code
    assert (ours.mock, ours.split_matrix) == (theirs.mock, theirs.split_matrix)
