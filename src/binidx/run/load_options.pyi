"""Options of `load_dataset` for type checkers: the fields of `GPTDatasetConfig` that it does not name itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from binidx.dataset.blend_arguments import Blend
from binidx.dataset.config import WrittenPaths

class LoadOptions(TypedDict, total=False):
    """See `GPTDatasetConfig`."""

    blend_per_split: Sequence[Blend | None] | None
    multiple_validation_sets: bool | None
    full_validation: bool | None
    num_dataset_builder_threads: int
    path_to_cache: str | None
    mmap_bin_files: bool
    mid_level_dataset_surplus: float
    allow_ambiguous_pad_tokens: bool | None
    fast_cache_load: bool
    defer_npy_index_mmap: bool
    storage_options: Mapping[str, Any] | None
    trust_cache: Literal["megatron"] | None
    cache_small_indices: bool
    megatron_samples: str
    read_plan: bool
    written_paths: WrittenPaths
    reset_position_ids: bool | None
    reset_attention_mask: bool | None
    eod_mask_loss: bool | None
    create_attention_mask: bool
    drop_last_partial_validation_sequence: bool
    add_extra_token_to_sequence: bool
    inter_document_masking: bool
    object_storage_cache_path: str | None
    data_parallel_size: int
    sequence_parallel_size: int
    hybrid_context_parallel: bool
    sequences_per_dataset: Mapping[str, Sequence[int]] | None
    context_parallel_size: int | None
    sft_mock_dataset_config_json: str | None
    varlen_mock_dataset_config_json: str | None
    varlen_sbhd_validation: bool
    order: Any
