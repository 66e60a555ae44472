"""What BERT's and T5's datasets share: draws, caches, stores, blends, workers."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from helpers.masked_datasets import (
    BERT,
    OPTIONS,
    OWN,
    T5,
    TOKENIZER,
    assert_same_masked,
    build,
    megatrons,
    process_group,
    random_options,
    write_sentences,
)

import binidx
from binidx.dataset.assemble.masking import CONTINUES, SPECIAL, Masking, Vocabulary, Words, random_state
from binidx.errors import ConfigError, FormatError, IndexBuildError

KINDS = pytest.mark.parametrize("kind", [BERT, T5], ids=["bert", "t5"])


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentences(tmp_path_factory.mktemp("data") / "en", 100, np.random.default_rng(0))


# Masking


@KINDS
def test_a_permutation_is_megatrons_where_its_stray_draw_is_the_samples_own(
    kind: Any, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(seed: int) -> Any:
        state = new_state(seed=seed)
        monkeypatch.setattr(np.random, "choice", state.choice)  # what Megatron draws from everybody's state
        return state

    new_state, rng = np.random.RandomState, np.random.default_rng(8)
    compared = 0
    for case in range(12):
        options = {**random_options(rng), **OWN[kind], "split": "1,0,0", "sequence_length_decoder": 600}
        options |= {"masking_do_permutation": True, "masking_use_geometric_distribution": False}
        if kind is BERT:
            options.pop("sequence_length_decoder")
        ours = build(kind, [prefix], **options)[0]
        (tmp_path / str(case)).mkdir()
        with process_group(tmp_path / str(case)):
            needed = megatrons(kind, prefix, binidx.Split.train, 200, str(tmp_path / f"cache{case}"), **options)
        with monkeypatch.context() as patched:
            patched.setattr(np.random, "RandomState", seeded)
            expected = [needed[idx] for idx in range(20)]
        for idx, sample in enumerate(expected):
            assert_same_masked(ours[idx], sample)
            compared += 1
    assert compared == 240


@KINDS
def test_a_permuted_sample_is_a_function_of_seed_and_number_and_megatrons_is_not(
    kind: Any, prefix: str, tmp_path: Path
) -> None:
    options = {**OPTIONS, **OWN[kind], "masking_do_permutation": True, "masking_probability": 0.3}
    first, second = (build(kind, [prefix], **options)[0] for _ in range(2))
    with process_group(tmp_path):
        needed = megatrons(kind, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **options)
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    for idx in (3, 9, 1, 3):
        assert_same_masked(first[idx], second[idx])
    assert np.random.get_state()[1].tolist() == before
    text = "text" if kind is BERT else "text_enc"
    assert len({needed[3][text].tobytes() for _ in range(20)}) > 1
    other = build(kind, [prefix], **{**options, "random_seed": 5})[0]
    assert any(first[idx][text].tobytes() != other[idx][text].tobytes() for idx in range(5))


def test_the_parts_of_predictions_are_megatrons_and_so_is_the_state_after_them(prefix: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    options = {**OPTIONS, **OWN[BERT]}
    ours = build(BERT, [prefix], **options)[0]
    with process_group(tmp_path):
        needed = megatrons(BERT, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **options)
    for case in range(200):
        tokens = rng.integers(2, 306, rng.integers(0, 60)).tolist()
        states = np.random.RandomState(case), np.random.RandomState(case)
        found = ours._create_masked_lm_predictions(tokens, 50, states[0])
        assert [list(part) for part in found] == [
            list(part) for part in needed._create_masked_lm_predictions(tokens, 50, states[1])
        ]
        assert states[0].random_sample() == states[1].random_sample()


@pytest.mark.parametrize("whole", [True, False])
def test_words_are_what_megatrons_picture_says(whole: bool) -> None:
    vocabulary = Vocabulary(TOKENIZER)
    begins = next(each for each in vocabulary.ids if each % 3 and each < 300)
    kinds = vocabulary.kinds(np.array([300, begins, 3, 3, begins, 3, 301, begins, 3, 301]))
    words = Words.split(kinds, whole)
    spans = [words.positions[first:end] for first, end in zip(words.bounds, words.bounds[1:], strict=False)]
    assert spans == ([[1, 2, 3], [4, 5], [7, 8]] if whole else [[1], [2], [3], [4], [5], [7], [8]])
    assert kinds.tolist().count(SPECIAL) == 3
    assert kinds.tolist().count(CONTINUES) == 4
    assert len(Words.split(kinds[:0], whole)) == 0


def test_the_draw_of_an_ngram_is_numpys_choice() -> None:
    for longer in (False, True):
        for most in range(1, 12):
            masking = Masking(0.15, most, True, False, longer, False)
            chances = 1.0 / np.arange(1, most + 1)
            chances = (chances / chances.sum())[:: -1 if longer else 1]
            state, other = np.random.RandomState(most), np.random.RandomState(most)
            draw = masking._draw(state)
            assert [draw() for _ in range(500)] == [
                other.choice(np.arange(1, most + 1), p=chances / chances.sum()) for _ in range(500)
            ]


def test_about_as_many_tokens_are_masked_as_requested_and_no_more(prefix: str) -> None:
    for probability in (0.05, 0.15, 0.5):
        dataset = build(BERT, [prefix], masking_probability=probability, short_sequence_probability=0.0)[0]
        hidden = [int(dataset[idx]["loss_mask"].sum()) for idx in range(100)]
        assert max(hidden) <= max(1, probability * 61)
        assert np.mean(hidden) > 0.5 * probability * 40


def test_a_random_state_is_as_new_and_each_thread_has_its_own() -> None:
    random_state(5).normal()
    assert random_state(5).random_sample() == np.random.RandomState(5).random_sample()
    assert random_state(7).normal() == np.random.RandomState(7).normal()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(random_state, 5).result() is not random_state(5)


def test_a_token_that_the_tokenizer_does_not_know_is_an_error(prefix: str) -> None:
    vocabulary = Vocabulary(TOKENIZER)
    for token in (1, 306, -1):
        with pytest.raises(FormatError, match=rf"token {token}: not in the tokenizer's inv_vocab"):
            vocabulary.kinds(np.array([5, token]))


def test_a_subclass_chooses_the_replacement_of_a_masked_token(prefix: str) -> None:
    class Zeroed(binidx.megatron.BERTMaskedWordPieceDataset):
        def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
            return 2

    config = binidx.megatron.BERTMaskedWordPieceDatasetConfig(blend=([prefix], None), **OPTIONS, **OWN[BERT])
    dataset = binidx.BlendedMegatronDatasetBuilder(Zeroed, [100, 0, 0], lambda: True, config).build()[0]
    assert dataset is not None
    sample: Any = dataset[0]
    assert set(sample["text"][sample["loss_mask"] == 1].tolist()) == {2}


# Index


@KINDS
def test_megatron_reads_the_index_that_we_built_and_we_trust_its_own(kind: Any, prefix: str, tmp_path: Path) -> None:
    options = {**OPTIONS, **OWN[kind], "path_to_cache": str(tmp_path / "ours"), "cache_small_indices": True}
    ours = build(kind, [prefix], **options)[0]
    name = f"{ours.unique_description_hash}-{kind[0].__name__}"
    assert {path.name for path in (tmp_path / "ours").iterdir()} >= {
        f"{name}-description.txt", f"{name}-sample_index.npy", f"{name}-binidx.json"
    }  # fmt: skip
    shared = {**OPTIONS, **OWN[kind]}
    needed = megatrons(kind, prefix, binidx.Split.train, 200, str(tmp_path / "ours"), **shared)  # without a group
    np.testing.assert_array_equal(needed.sample_index, ours.sample_index)
    with process_group(tmp_path):
        megatrons(kind, prefix, binidx.Split.train, 200, str(tmp_path / "theirs"), **shared)
    trusted = {"path_to_cache": str(tmp_path / "theirs"), "trust_cache": "megatron"}
    np.testing.assert_array_equal(build(kind, [prefix], **trusted)[0].sample_index, ours.sample_index)
    path = next((tmp_path / "theirs").glob("*.npy"))
    np.save(path, np.load(path) + 1000)
    with pytest.raises(FormatError, match="trust_cache finds sample_index"):
        build(kind, [prefix], **trusted)


def test_new_documents_under_the_same_name_are_not_cut_by_the_old_index(tmp_path: Path) -> None:
    cache = {"path_to_cache": str(tmp_path / "cache"), "cache_small_indices": True}
    for seed in (1, 2):
        prefix = write_sentences(tmp_path / "en", 100, np.random.default_rng(seed))
        cached, fresh = build(BERT, [prefix], **cache)[0], build(BERT, [prefix])[0]
        np.testing.assert_array_equal(cached.sample_index, fresh.sample_index)


def test_a_small_index_leaves_nothing_behind(prefix: str, tmp_path: Path) -> None:
    build(BERT, [prefix], (2**15, 20, 20), path_to_cache=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_large_one_is_cached(prefix: str, tmp_path: Path) -> None:
    sizes, cache = (2**15 + 1, 20, 20), str(tmp_path / "cache")
    first, second = (build(BERT, [prefix], sizes, path_to_cache=cache)[0] for _ in range(2))
    np.testing.assert_array_equal(first.sample_index, second.sample_index)
    assert [*(tmp_path / "cache").glob("*-BERTMaskedWordPieceDataset-sample_index.npy")]


@KINDS
def test_splits_divide_documents_and_no_sample_crosses_two(kind: Any, prefix: str) -> None:
    splits = build(kind, [prefix], (300, 50, 50), split="6,3,1")
    bounds = splits[0].dataset.document_indices
    for dataset, (begin, end) in zip(splits, ((0, 60), (60, 90), (90, 100)), strict=True):
        first, last, _ = dataset.sample_index.T.astype(np.int64)
        document = np.searchsorted(bounds, first, side="right") - 1
        assert (last <= bounds[document + 1]).all()
        assert document.min() >= begin
        assert document.max() < end


def test_without_a_number_of_samples_there_is_one_epoch_unlike_megatron(prefix: str, tmp_path: Path) -> None:
    dataset = build(BERT, [prefix], (None, None, None))[0]
    assert len(np.unique(dataset.sample_index[:, 0])) == len(dataset)
    with process_group(tmp_path), pytest.raises(TypeError):
        megatrons(BERT, prefix, binidx.Split.train, None, str(tmp_path / "cache"), **OPTIONS, **OWN[BERT])  # type: ignore[arg-type]


def test_samples_of_a_split_without_documents_are_an_error_that_names_it(prefix: str) -> None:
    with pytest.raises(IndexBuildError, match=r"en, test split: found 0 samples in 0 documents, need 20"):
        build(BERT, [prefix], split="999,0,1")
    assert len(build(BERT, [prefix], (10, 0, 0), split="999,0,1")[2]) == 0


def test_bert_has_another_order_for_the_samples_of_each_version_of_megatron_and_t5_has_one(prefix: str) -> None:
    for kind, num_orders in ((BERT, 2), (T5, 1)):
        built = [build(kind, [prefix], megatron_samples=version)[0] for version in ("main", "0.16.1")]
        assert len({json.dumps(each.order_identity) for each in built}) == num_orders
        assert len({each.unique_description for each in built}) == 1
    with pytest.raises(ConfigError, match=r"megatron_samples: found 'dev', need main, 0\.16, 0\.17"):
        build(BERT, [prefix], megatron_samples="dev")


def test_documents_with_gaps_are_refused(prefix: str) -> None:
    config = binidx.megatron.BERTMaskedWordPieceDatasetConfig(blend=([prefix], None), **OPTIONS, **OWN[BERT])
    documents = np.array([1, 2, 5], np.int32)
    with pytest.raises(IndexBuildError, match="a split of documents with gaps"):
        BERT[0](binidx.IndexedDataset(prefix), prefix, documents, 5, binidx.Split.train, config)


# Samples, wherever the tokens lie


def test_samples_count_from_the_end_too_and_there_are_no_others(prefix: str) -> None:
    dataset = build(BERT, [prefix])[0]
    assert_same_masked(dataset[-1], dataset[len(dataset) - 1])
    assert_same_masked(dataset[np.int64(2)], dataset[2])
    for idx in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=rf"sample {idx}, it has {len(dataset)}"):
            dataset[idx]


@KINDS
def test_a_dataset_that_was_read_pickles_and_its_vocabulary_stays(kind: Any, prefix: str) -> None:
    dataset = build(kind, [prefix])[0]
    before = dataset[3]
    sent = pickle.dumps(dataset)
    assert_same_masked(pickle.loads(sent)[3], before)
    assert "vocabulary" not in vars(pickle.loads(sent).config)


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_blends_from_s3_are_the_local_ones_in_workers_too(kind: Any, workers: int, tmp_path: Path, s3: Any) -> None:
    base = s3.fresh()
    names = ("en", "code")
    for seed, name in enumerate(names):
        write_sentences(tmp_path / name, 60, np.random.default_rng(seed))
        for end in ("bin", "idx"):
            with fsspec.open(f"{base}/{name}.{end}", "wb") as out:
                out.write((tmp_path / f"{name}.{end}").read_bytes())
    options: dict[str, Any] = {"sizes": (64, 0, 0), "weights": [0.7, 0.3]}
    here = build(kind, [str(tmp_path / name) for name in names], **options)[0]
    there = build(kind, [f"{base}/{name}" for name in names], **options)[0]
    loader = binidx.build_pretraining_data_loader(there, 0, 8, num_workers=workers)
    assert loader is not None
    served = [*loader]
    assert len(served) == 8
    for step, batch in enumerate(served):
        needed = torch.utils.data.default_collate([here[idx] for idx in range(8 * step, 8 * step + 8)])
        assert sorted(batch) == sorted(needed)
        for key in batch:
            assert batch[key].dtype == needed[key].dtype
            assert torch.equal(batch[key], needed[key])


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"masking_probability": None}, "masking_probability: must be given"),
        ({"masking_probability": 1.0}, "above 0 and below 1"),
        ({"short_sequence_probability": 1.5}, "0 to 1"),
        ({"masking_max_ngram": 0}, "at least 1"),
        ({"tokenizer": None}, "tokenizer: must be given"),
        ({"masking_do_permutation": True, "masking_use_geometric_distribution": True}, "excludes"),
    ],
)
def test_options_that_cannot_be_are_refused(prefix: str, changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        build(BERT, [prefix], **changes)
