"""Samples of each release of Megatron: `megatron_samples` of ours against that release, in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import Speaker, random_rows, write_rows
from helpers.gpt_data import random_lengths, write_with_megatron
from helpers.letters import EXTRA, WithLetters
from helpers.masked_datasets import OPTIONS, random_options, write_sentences
from helpers.public_names import PUBLIC
from helpers.release_oracle import INSTALLED, TREE, Case, Release, name_release

import binidx
from binidx.dataset.megatron_releases import MAIN, NEWEST

SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("0.17.1", "0.18.2", TREE)]
RELEASES = [INSTALLED, "0.19.2", *SLOW]
WITH_TRAINING = RELEASES[1:]
"""Releases whose package has `megatron.training`, the home of chats and of fill in the middle."""

BEFORE_MASKING = (INSTALLED, "0.17.1", "0.18.2")

GPT: dict[str, Any] = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
Draw = Callable[[np.random.Generator, Path, str], dict[str, Any]]


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with contextlib.closing(Release(request.param, tmp_path_factory.mktemp("release"))) as started:
        yield started


def compare(release: Release, kind: str, draw: Draw, folder: Path, count: int, **options: Any) -> int:
    """Samples of `count` random configs and blends are the release's, bit for bit; how many were equal."""
    rng, cases = np.random.default_rng(sum(map(ord, kind))), []
    for number in range(count):
        (home := folder / str(number)).mkdir()
        given = draw(rng, home, release.version)
        prefixes = given.pop("prefixes")
        weights = rng.dirichlet(np.ones(len(prefixes))).tolist() if rng.integers(2) else None
        sizes: list[int | None] = [int(rng.integers(1, 60)), int(rng.integers(1, 20)), 1]
        if not kind.startswith("GPT"):  # of other kinds Megatron has no epoch: None is a TypeError
            weights = None if len(prefixes) == 1 else weights or [0.3, 0.7]
        elif weights is None:
            sizes[2] = None
        cases.append(Case(kind, (prefixes, weights), sizes, given | options, str(home / "cache"), number))
    return sum(map(compare_case, [release.version] * count, cases, release.make_samples(cases, folder)))


def compare_case(version: str, case: Case, needed: Any) -> int:
    cls = PUBLIC[case.kind]
    config = PUBLIC.get(f"{case.kind}Config", binidx.GPTDatasetConfig)
    configured = config(blend=case.blend, **case.options, megatron_samples=name_release(version))
    ours = binidx.BlendedMegatronDatasetBuilder(cls, list(case.sizes), lambda: True, configured).build()
    compared = 0
    for dataset, found in zip(ours, needed, strict=True):
        assert (dataset is None) == (found is None), case
        if found is None:
            continue
        assert len(dataset) == found.num_samples, case
        for number, theirs in zip(case.choose(len(dataset)), found.samples, strict=True):
            sample = {name: np.asarray(value) for name, value in dataset[number].items()}
            assert sorted(sample) == sorted(theirs), case
            for name, value in theirs.items():
                assert (sample[name].dtype, sample[name].shape) == (value.dtype, value.shape), (name, case)
                np.testing.assert_array_equal(sample[name], value, err_msg=f"{name} of {number} of {case}")
            compared += 1
    return compared


def draw_gpt(rng: np.random.Generator, home: Path, version: str) -> dict[str, Any]:
    lengths = [np.append(random_lengths(rng, 60), 40).astype(np.int32) for _ in range(rng.integers(1, 4))]
    is_full = bool(np.concatenate(lengths).all())
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask",
             "add_extra_token_to_sequence")  # fmt: skip
    options = {
        "prefixes": [write_with_megatron(home / str(n), each, rng) for n, each in enumerate(lengths)],
        "random_seed": int(rng.integers(2**32)),
        "sequence_length": int(rng.choice([2, 3, 8, 17])),
        "split": str(rng.choice(["1,1,1", "5,4,1", "6,3,1"])),
        **{flag: bool(rng.integers(2)) for flag in flags},
        # An empty last document trips Megatron's own assertion.
        "drop_last_partial_validation_sequence": not is_full or bool(rng.integers(2)),
        "tokenizer": WithLetters(),
    }
    # Bounds of empty parts of samples need not fit into Megatron's S + 1.
    fits = is_full and (options["add_extra_token_to_sequence"] or options["sequence_length"] == 17)
    if fits and version not in BEFORE_MASKING and rng.integers(2):
        options["inter_document_masking"] = True
    return options


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_gpt_samples_are_those_of_the_release_with_and_without_masking_between_documents(
    release: Release, tmp_path: Path
) -> None:
    assert compare(release, "GPTDataset", draw_gpt, tmp_path, 30) > 300


def draw_masked(rng: np.random.Generator, home: Path, version: str) -> dict[str, Any]:
    prefixes = [write_sentences(home / str(n), 90, rng, int(rng.choice([8, 30]))) for n in range(rng.integers(1, 3))]
    return {"prefixes": prefixes, **OPTIONS, **random_options(rng), "split": "6,3,1"}


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_bert_samples_are_those_of_the_release(release: Release, tmp_path: Path) -> None:
    kind = "BERTMaskedWordPieceDataset"
    assert compare(release, kind, draw_masked, tmp_path, 12, classification_head=True) > 150


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_t5_samples_are_those_of_the_release(release: Release, tmp_path: Path) -> None:
    assert compare(release, "T5MaskedWordPieceDataset", draw_masked, tmp_path, 8, sequence_length_decoder=600) > 100


def draw_chats(rng: np.random.Generator, home: Path, version: str) -> dict[str, Any]:
    seeds = rng.integers(0, 2**32, rng.integers(1, 3)).tolist()
    return {
        "prefixes": [write_rows(str(home / f"{n}.jsonl"), random_rows(seed, 30)) for n, seed in enumerate(seeds)],
        "random_seed": 1,
        "sequence_length": int(rng.choice([1, 2, 8, 33, 64, 100, 400])),
        "split": "6,3,1",
        "tokenizer": Speaker(ends=bool(rng.integers(2))),
        "create_attention_mask": False,
        "data_parallel_size": int(rng.choice([1, 3])),
        "context_parallel_size": int(rng.choice([1, 2, 4])),
        "sequence_parallel_size": int(rng.choice([0, 1, 4])),
        # With "main", binidx pads for hybrid context parallelism as Megatron does since its pull request 6742.
        "hybrid_context_parallel": name_release(version) != MAIN and bool(rng.integers(2)),
        **GPT,
    }


@pytest.mark.parametrize("release", WITH_TRAINING, indirect=True)
def test_chats_are_those_of_the_release(release: Release, tmp_path: Path) -> None:
    assert compare(release, "SFTDataset", draw_chats, tmp_path, 12) > 150


def draw_cuts(rng: np.random.Generator, home: Path, version: str) -> dict[str, Any]:
    lengths = [rng.integers(1, 60, 80).astype(np.int32) for _ in range(rng.integers(1, 3))]
    split = {"fim_split_sample": "<file>", "fim_fragment_rate": float(rng.choice([0.3, 1.0]))}
    return {
        "prefixes": [write_with_megatron(home / str(n), each, rng, np.int32) for n, each in enumerate(lengths)],
        "random_seed": int(rng.integers(2**32)),
        "sequence_length": int(rng.choice([16, 33, 64])),
        "split": "6,3,1",
        "tokenizer": WithLetters(),
        "create_attention_mask": False,
        "fim_rate": float(rng.choice([0.3, 0.9, 1.0])),
        "fim_spm_rate": float(rng.choice([0.0, 0.5, 1.0])),
        "fim_extra_tokens": EXTRA,
        "fim_no_prefix": [None, "b"][rng.integers(2)],
        **(split if rng.integers(2) else {}),
        **GPT,
    }


@pytest.mark.parametrize("release", WITH_TRAINING, indirect=True)
def test_cuts_in_the_middle_are_those_of_the_release_given_the_same_draws(release: Release, tmp_path: Path) -> None:
    assert compare(release, "GPTFIMDataset", draw_cuts, tmp_path, 12) > 150


@pytest.mark.slow
@pytest.mark.parametrize("release", [TREE], indirect=True)
@pytest.mark.parametrize("rows", [False, True])
def test_chats_of_their_own_length_are_those_of_a_tree_after_pull_request_6742(
    release: Release, rows: bool, tmp_path: Path
) -> None:
    if name_release(TREE) != NEWEST:
        pytest.skip("MEGATRON_TREE has no VarlenDataset")
    options = {"varlen_sbhd_validation": rows, **({"hybrid_context_parallel": False} if rows else {})}
    assert compare(release, "VarlenDataset", draw_chats, tmp_path, 12, **options) > 150
