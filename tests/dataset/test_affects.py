"""What follows from the fields of configs: names of caches and plans, files of runs, code, comparisons of ranks.

The values are those before each field said what it affects. They are persisted, or compared between ranks: a new option
adds to them, and changes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers.gpt_data import assert_same_sample

import binidx
from binidx.compat.megatron import fim_dataset, gpt_dataset, t5_dataset
from binidx.dataset import rank_comparison
from binidx.dataset.affects import affects, described_fields, words_of
from binidx.dataset.config import BlendedMegatronDatasetConfig, GPTDatasetConfig, Split, WrittenPaths
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.stored import baked as stored_options
from binidx.dataset.stored import planned
from binidx.run import run_file

TOKENIZER = SimpleNamespace(
    unique_identifiers={"class": "T"}, eod=0, pad=1, cls=2, sep=3, mask=4, bos=5, eos=6,
    inv_vocab={number: f"p{number}" for number in range(20)}, additional_special_tokens_ids=[18, 19], vocab_size=20,
)  # fmt: skip
FIM: dict[str, Any] = {
    "fim_rate": 0.5,
    "fim_spm_rate": 0.5,
    "fim_extra_tokens": dict.fromkeys(("prefix", "middle", "suffix", "pad", "eod"), "t"),
}
MASKED: dict[str, Any] = {
    "masking_probability": 0.15, "short_sequence_probability": 0.1, "masking_max_ngram": 3,
    "masking_do_full_word": True, "masking_do_permutation": False, "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}  # fmt: skip
FLAGS: dict[str, Any] = {"reset_position_ids": False, "reset_attention_mask": True, "eod_mask_loss": False}
SUBCLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPTFIMDatasetConfig": (binidx.megatron.GPTFIMDatasetConfig, FIM),
    "SFTDatasetConfig": (binidx.megatron.SFTDatasetConfig, {"shuffle": True}),
    "MultimodalDatasetConfig": (binidx.megatron.MultimodalDatasetConfig, {"image_h": 1, "image_w": 2}),
    "MaskedWordPieceDatasetConfig": (binidx.megatron.MaskedWordPieceDatasetConfig, MASKED),
    "BERTMaskedWordPieceDatasetConfig": (
        binidx.megatron.BERTMaskedWordPieceDatasetConfig,
        {**MASKED, "classification_head": True},
    ),
    "T5MaskedWordPieceDatasetConfig": (
        binidx.megatron.T5MaskedWordPieceDatasetConfig,
        {**MASKED, "sequence_length_decoder": 9},
    ),
    "compat.GPTDatasetConfig": (gpt_dataset.GPTDatasetConfig, FLAGS),
    "compat.GPTFIMDatasetConfig": (fim_dataset.GPTFIMDatasetConfig, {**FLAGS, **FIM}),
    "compat.T5MaskedWordPieceDatasetConfig": (
        t5_dataset.T5MaskedWordPieceDatasetConfig,
        {**MASKED, "sequence_length_decoder": 9},
    ),
}


@dataclass(repr=False)
class PlainConfig(GPTDatasetConfig):
    """A user's config: one more field, and other defaults of binidx's."""

    dial: int = 3
    path_to_cache: str | None = "/plans"
    create_attention_mask: bool = True


@dataclass(repr=False)
class OfMegatron(PlainConfig):
    """A config of a package of Megatron's, whose own fields are compared."""

    num_workers: ClassVar[int] = 8
    path_to_cache: str | None = "/plans"


OfMegatron.__module__ = "megatron.bridge.training.config"


def make(kind: Any = GPTDatasetConfig, **options: Any) -> Any:
    given = {"blend": (["/data/en", "/data/de"], [0.5, 0.5]), "split": "8,1,1", "path_to_cache": "/plans"}
    given |= {"tokenizer": TOKENIZER, "megatron_samples": "0.16.1"}
    return kind(1234, 64, **{**given, **options})


def subclasses(kind: type) -> Iterator[type]:
    for inner in kind.__subclasses__():
        yield from (inner, *subclasses(inner))


# Words

REMEDY = "give it metadata=affects(...), with the words of binidx.dataset.affects that say what it affects"


def test_each_field_of_a_config_says_what_it_affects() -> None:
    """Those of `compat` need not: names of plans and comparisons of ranks have had them as fields of a user."""
    for kind in (BlendedMegatronDatasetConfig, *subclasses(BlendedMegatronDatasetConfig)):
        if kind.__module__.startswith("binidx.dataset."):
            described = described_fields(kind)
            for option in fields(kind):
                assert words_of(described.get(option.name, NOTHING)), f"{kind.__name__}.{option.name}: {REMEDY}"
                assert described[option.name].metadata["scoped"].keys() <= SCOPES, option.name


SCOPES = {"valid", "lists", "chats", "masked", "fim", "padded"}
NOTHING: Any = SimpleNamespace(metadata=affects())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    prefix = f"{tmp_path_factory.mktemp('affects')}/en"
    builder = binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for length in rng.integers(1, 60, 40).tolist():
        builder.add_document(rng.integers(0, 10, length), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def build(prefix: str, **options: Any) -> list[Any]:
    given = {"blend": ([prefix], None), "split": "5,5,0", "path_to_cache": f"{prefix}.cache", **options}
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [30, 10, 0], lambda: True, make(**given)).build()


OPTIONS = {name: option for name, option in described_fields(GPTDatasetConfig).items() if option.init}
HARMLESS = [name for name, option in OPTIONS.items() if "order" not in words_of(option, "train")]
"""Options that say that they move no token of GPT samples in train."""


@pytest.mark.parametrize("name", HARMLESS)
def test_an_option_changes_no_more_of_gpt_samples_than_its_words(name: str, prefix: str) -> None:
    values = {**EVERY, "sequences_per_dataset": {prefix: [40, 41]}, "path_to_cache": None, "storage_options": {}}
    values |= {
        "written_paths": WrittenPaths(opened={prefix: "en"}),
        "tokenizer": binidx.SpecialTokens(eod=7, pad=8),
    }
    values |= {"megatron_samples": "main", "fast_cache_load": False}  # True excludes blend
    values |= dict.fromkeys(("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json"))
    pairs = zip(("train", "valid"), build(prefix), build(prefix, **{name: values[name]}), strict=False)
    for split, before, after in pairs:
        words = words_of(OPTIONS[name], split, *(["lists"] if isinstance(after, list) else []))
        if "order" not in words:
            every = range(len(before))
            assert np.array_equal(before.read_tokens(every), after.read_tokens(every))
            for number in every if "samples" not in words else ():
                assert_same_sample(after[number], before[number])


# Names of caches

MEGATRON = ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]
MASKING = [*MEGATRON, *MASKED]
HASHED = {
    "GPTDataset": MEGATRON, "MockGPTDataset": MEGATRON, "GPTFIMDataset": MEGATRON, "VarlenGPTDataset": MEGATRON,
    "BestFitGPTDataset": MEGATRON, "MultimodalDataset": MEGATRON, "MockMultimodalDataset": MEGATRON,
    "SFTDataset": MEGATRON, "VarlenDataset": MEGATRON, "MegatronDataset": MEGATRON,
    "MaskedWordPieceDataset": MASKING,
    "BERTMaskedWordPieceDataset": [*MASKING, "classification_head"],
    "T5MaskedWordPieceDataset": [*MASKING, "sequence_length_decoder"],
}  # fmt: skip
"""Class, also of `compat` -> names of the fields in the names of its caches, in the order that is hashed."""


def test_the_fields_in_the_names_of_caches() -> None:
    for module in ("fim", "gpt", "masked", "bert", "t5", "multimodal", "sft"):
        import_module(f"binidx.compat.megatron.{module}_dataset")
    import_module("binidx.dataset.megatron.multimodal")
    kinds = [kind for kind in subclasses(MegatronDataset) if kind.__module__.startswith("binidx.")]
    assert {kind.__name__ for kind in kinds} == HASHED.keys()
    for kind in kinds:
        assert kind._key_config_attributes() == HASHED[kind.__name__], kind  # type: ignore[attr-defined]


# Comparison of ranks

NOT_COMPARED = {
    "blend", "blend_per_split", "split", "split_matrix", "mid_level_dataset_surplus", "sequences_per_dataset",
    "num_dataset_builder_threads", "path_to_cache", "object_storage_cache_path", "mmap_bin_files", "storage_options",
    "trust_cache", "cache_small_indices", "read_plan", "written_paths", "fast_cache_load", "defer_npy_index_mmap",
    "token_dtype_code",
}  # fmt: skip
COMPARED = {
    "random_seed": 1234, "sequence_length": 64, "multiple_validation_sets": None, "full_validation": None,
    "mock": False,
    "tokenizer": {
        "unique_identifiers": {"class": "T"}, "eod": 0, "pad": 1, "eos": 6, "bos": 5, "cls": 2, "sep": 3, "mask": 4,
        "vocab_size": 20,
    },
    "allow_ambiguous_pad_tokens": False, "megatron_samples": "0.16.1",
}  # fmt: skip
GPT_COMPARED = {
    "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, "create_attention_mask": False,
    "drop_last_partial_validation_sequence": True, "add_extra_token_to_sequence": True, "inter_document_masking": False,
    "data_parallel_size": 1, "sequence_parallel_size": 0, "hybrid_context_parallel": False,
    "context_parallel_size": None, "sft_mock_dataset_config_json": None, "varlen_mock_dataset_config_json": None,
    "varlen_sbhd_validation": False, "order": None,
}  # fmt: skip


def test_the_options_that_ranks_compare() -> None:
    assert {option.name for option in fields(GPTDatasetConfig)} == {*COMPARED, *GPT_COMPARED} | NOT_COMPARED
    text = json.dumps({**GPT_COMPARED, **COMPARED})  # the fields of the derived class come first
    assert json.dumps(rank_comparison._list_options(make())) == text
    text = text.replace('"create_attention_mask": false', '"create_attention_mask": true')
    assert json.dumps(rank_comparison._list_options(make(PlainConfig))) == text
    assert json.dumps(rank_comparison._list_options(make(OfMegatron))) == f'{{"num_workers": 8, {text[1:]}'


@pytest.mark.parametrize("name", SUBCLASSES)
def test_the_options_of_other_kinds_that_ranks_compare(name: str) -> None:
    kind, options = SUBCLASSES[name]
    gpt = {} if "Masked" in name else GPT_COMPARED
    own = {option.name for option in fields(kind)} - {*COMPARED, *GPT_COMPARED} - NOT_COMPARED
    assert rank_comparison._list_options(make(kind, **options)).keys() == {*COMPARED, *gpt, *own}
    assert own == OWN[name]


FIM_OPTIONS = {
    "fim_rate", "fim_spm_rate", "fim_extra_tokens", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix",
}  # fmt: skip
OLD_AND_NEW_NAMES = {"s3_cache_path", "dynamic_context_parallel"}
T5 = {*MASKED, "sequence_length_encoder", "sequence_length_decoder"}
OWN = {
    "GPTFIMDatasetConfig": FIM_OPTIONS,
    "SFTDatasetConfig": {"shuffle"},
    "MultimodalDatasetConfig": {"image_h", "image_w", "preprocess_func"},
    "MaskedWordPieceDatasetConfig": {*MASKED},
    "BERTMaskedWordPieceDatasetConfig": {*MASKED, "classification_head"},
    "T5MaskedWordPieceDatasetConfig": T5,
    "compat.GPTDatasetConfig": OLD_AND_NEW_NAMES,
    "compat.GPTFIMDatasetConfig": FIM_OPTIONS | OLD_AND_NEW_NAMES,
    "compat.T5MaskedWordPieceDatasetConfig": T5,
}
"""Fields of a config besides those of its base, all of which are compared."""


# Names of plans

NOT_IN_PLAN = {
    "blend", "blend_per_split", "split", "num_dataset_builder_threads", "path_to_cache", "tokenizer", "mmap_bin_files",
    "fast_cache_load", "defer_npy_index_mmap", "storage_options", "trust_cache", "written_paths",
    "cache_small_indices", "object_storage_cache_path", "read_plan", "order",
}  # fmt: skip
MOVES_NO_TOKEN = {
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask", "inter_document_masking",
    "data_parallel_size", "context_parallel_size", "sequence_parallel_size", "hybrid_context_parallel",
    "sequences_per_dataset", "megatron_samples", "allow_ambiguous_pad_tokens", "multiple_validation_sets",
    "full_validation", "sft_mock_dataset_config_json", "varlen_mock_dataset_config_json", "varlen_sbhd_validation",
}  # fmt: skip
EVERY = {
    "multiple_validation_sets": True, "full_validation": True, "num_dataset_builder_threads": 3,
    "mmap_bin_files": False, "mid_level_dataset_surplus": 0.01, "allow_ambiguous_pad_tokens": True,
    "defer_npy_index_mmap": True, "storage_options": {"key": "k"}, "trust_cache": "megatron",
    "cache_small_indices": True, "read_plan": True, "written_paths": WrittenPaths("/data", {"/data/en": "en"}),
    "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "create_attention_mask": True,
    "drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False,
    "inter_document_masking": True, "object_storage_cache_path": "/o", "data_parallel_size": 2,
    "sequence_parallel_size": 2, "hybrid_context_parallel": True, "sequences_per_dataset": {"/data/en": [1, 2]},
    "context_parallel_size": 2, "varlen_sbhd_validation": True, "order": "best_fit",
}  # fmt: skip
"""Another value of each field than the default."""
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "defaults": (GPTDatasetConfig, {}),
    "every option": (GPTDatasetConfig, EVERY),
    "one validation set": (GPTDatasetConfig, {**EVERY, "multiple_validation_sets": False}),
    "per split": (
        GPTDatasetConfig,
        {"blend": None, "split": None, "blend_per_split": [["/a"], ["/b"], None], "full_validation": True},
    ),
    "FIM": SUBCLASSES["GPTFIMDatasetConfig"],
    "SFT": SUBCLASSES["SFTDatasetConfig"],
    "compat": SUBCLASSES["compat.GPTDatasetConfig"],
    "plain": (PlainConfig, {"dial": 4}),
}
PLAN_NAMES: dict[str, list[list[str]]] = {
    "defaults": [
        ["7fff7d87aea05cf2e2b32ab4be43bd5e", "eb62b9875772882c90c150538745a04e"],
        ["0c9d87d6ffaacca0edaf6410895b95e5", "066e0f48268530ef11d19e8a6049b631"],
        ["7ec9d18617f8c9d94434815904f3b66e", "40aba90a6c488c986cc1672b13c08bd3"],
    ],
    "every option": [
        ["efa015e16d7fcaaf023d3494e80362af", "e28df6391c26906efaf4e94f10cec8b3"],
        [],
        ["4ae5931670125167c641c72e2f388d38", "97907e6f0e17d47310b399d660b1ad5e"],
    ],
    "one validation set": [
        ["efa015e16d7fcaaf023d3494e80362af", "f40176990a3af14992a6b49323c5a0d2"],
        ["beb4238dab2b0d750f875aacc310b2a2", "4d7675083a1d1ed9a41242fb311c4938"],
        ["4ae5931670125167c641c72e2f388d38", "99707e3da3a09bc598f4e7e26b8ba0bc"],
    ],
    "per split": [
        ["82a69d263643568af0be4a5cd58fb371", "8f750d36d7bf53752be9a976c23336b5"],
        ["3fdfab09f73b56e6374da732367e62fa", "de7b1e65f1836a986268093579ec20be"],
        [],
    ],
    "FIM": [
        ["45e091d0ea84733dc27e5dec1ea0bd5e", "ab1f645edb644b0fa6878ed8b5440a31"],
        ["91e9152ad2aab1abf15bd61ff83f8af9", "c06a5a61d40b15574f6378523f25a8b7"],
        ["a2837839ff394332f9928d39055eebc5", "1111e834af11e7075625335cfa175908"],
    ],
    "SFT": [
        ["764231253844685aef1fe0f65308b4fe", "8a5bcd05809267f3dca14c1a4bb3d8a1"],
        ["4246f2dca21a25aa2cb0d93ee74c6d47", "182d86137219688a2432906e6d753157"],
        ["a38ade2afff29359589cb6a15c537078", "26ad72bca7e1493e4c38e51bddc173a7"],
    ],
    "compat": [
        ["7f34836447cccb210d16bfacfd986ced", "d782b98b65127c4aef0612ed7922fc1e"],
        ["cc2d38365b80b5eb1aa66f1334cdeac4", "1fd728680f25cf9a83d947e72a664bfe"],
        ["9ad9c6be1ccb33b5f92b4c7650218383", "fa5668bfa0a5e55ddc662dec9963a6b1"],
    ],
    "plain": [
        ["e2a0c48fd095370f5adbbe1b7951163e", "109ba9d3f568b8ce2874ffba1980a01f"],
        ["8ba19ce3aa449ef4465afd6dcb691afe", "d473f210c55eb5a09273d4f3376c49c5"],
        ["3fb3a57648a8d2ab0f15227a67fe2414", "b50532ed08015ded2c8377cb5a72acf6"],
    ],
}


def test_the_fields_in_the_names_of_plans() -> None:
    names = {option.name for option in fields(GPTDatasetConfig) if option.init}
    for split in Split:
        early, lacking = stored_options.hashed_fields(make(), split)
        assert {*early} == names - NOT_IN_PLAN
        valid = set() if split is Split.valid else {"drop_last_partial_validation_sequence"}
        assert lacking & {*early} == MOVES_NO_TOKEN | valid


@pytest.mark.parametrize("name", PLANS)
def test_the_names_of_plans(name: str) -> None:
    """Today's, then the early one; of train, valid and test."""
    kind, options = PLANS[name]
    config = make(kind, **options)
    places = [planned.PlannedDataset.locate("GPTDataset", config, split, 100) for split in Split]
    names = [[place.uri.removeprefix("/plans/").partition("-")[0] for place in both] for both in places]
    assert names == PLAN_NAMES[name]


# Files of runs

UNSAVED = {"storage_options", "written_paths", "read_plan", "megatron_samples"}
WITHOUT_EFFECT = {
    "num_dataset_builder_threads", "mmap_bin_files", "fast_cache_load", "defer_npy_index_mmap", "cache_small_indices",
    "object_storage_cache_path", "path_to_cache",
}  # fmt: skip


def test_the_fields_in_the_file_of_a_run() -> None:
    config = make(tokenizer=binidx.SpecialTokens(eod=0), **{name: EVERY[name] for name in UNSAVED & EVERY.keys()})
    run = binidx.Run(config, [10, 0, 0], 1, directory=None, other_fields={"note": "kept"})
    saved = json.loads(run_file.format_run(run))
    names = [option.name for option in fields(GPTDatasetConfig) if option.init and option.name not in UNSAVED]
    assert [*saved["config"]] == [name for name in names if name != "order"]
    assert saved["note"] == "kept"
    assert "other_fields" not in saved
    known = {option.name for option in fields(GPTDatasetConfig) if option.init} - UNSAVED
    assert {name for name in known if run_file.tolerates_in_run("$.config", name)} == WITHOUT_EFFECT


# Code

SHOWN = [
    *("random_seed", "sequence_length", "blend", "split", "tokenizer"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
]


def test_the_fields_in_code(tmp_path: Path) -> None:
    builder = binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin")
    builder.add_document([*range(100)], [100])
    builder.finalize(f"{tmp_path}/en.idx")
    code = binidx.load_dataset(f"{tmp_path}/en", 8).as_code()
    assert re.findall(r"^    (\w+)=", code, re.M) == SHOWN
    code = binidx.load_dataset(f"{tmp_path}/en", 8, mmap_bin_files=False).as_code()
    assert re.findall(r"^    (\w+)=", code, re.M) == [*SHOWN[:4], "mmap_bin_files", *SHOWN[4:]]
