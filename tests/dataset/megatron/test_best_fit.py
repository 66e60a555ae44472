"""Best-fit packing: whole documents in samples, each document once an epoch, and little room left."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_samples import config, tokens
from helpers.traceable_runs import write_source
from hypothesis import given
from hypothesis import strategies as st

import binidx
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.errors import IndexBuildError
from binidx.index.packing import cut_documents
from binidx.native.mappings import best_fit
from binidx.order.reads import OrderReads


def build(prefix: str, size: int | None = None, **options: Any) -> Any:
    built = config(([prefix], None), **{"sequence_length": 32, "split": "1,0,0", **options})
    return binidx.BlendedMegatronDatasetBuilder(BestFitGPTDataset, [size, 0, 0], lambda: True, built).build()[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_source(tmp_path_factory.mktemp("fit") / "a", random.Random(3), True)


def model(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    since: list[int] = []
    for now, piece in enumerate(sorted(range(len(lengths)), key=lambda piece: -lengths[piece])):
        fitting = [bin for bin in range(len(bins)) if room[bin] >= lengths[piece]]
        if not fitting:
            bins.append([])
            room.append(capacity)
            since.append(now)
            fitting = [len(bins) - 1]
        best = min(fitting, key=lambda bin: (room[bin], -since[bin]))
        bins[best].append(piece)
        room[best] -= lengths[piece]
        since[best] = now
    return bins


@given(st.integers(1, 200).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), max_size=80))))
def test_each_piece_goes_into_the_fullest_bin_with_room(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bounds, pieces = best_fit(np.array(lengths, np.int32), capacity)
    assert [part.tolist() for part in np.split(pieces, bounds[1:-1])] == (model(lengths, capacity) or [[]])


@pytest.mark.parametrize("lengths", [[0, 3], [9], [-1]])
def test_pieces_that_no_bin_holds_are_refused(lengths: list[int]) -> None:
    with pytest.raises(IndexBuildError, match="a bin needs 1 to 8"):
        best_fit(np.array(lengths, np.int32), 8)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 20), st.integers(0, 1))
def test_pieces_of_a_document_feed_each_of_its_tokens_once(lengths: list[int], length: int, extra: int) -> None:
    pieces = cut_documents(np.array(lengths, np.int32), length, extra)
    for document, tokens_of in enumerate(lengths):
        own = pieces[pieces[:, 0] == document]
        covered = [token for _, first, count in own.tolist() for token in range(first, first + count)]
        assert set(covered) == set(range(tokens_of))
        assert len(covered) == tokens_of + extra * max(0, len(own) - 1)
        assert (own[:, 2] <= length + extra).all()


@pytest.mark.parametrize("extra", [True, False])
def test_every_document_is_in_one_sample_an_epoch_whole_if_it_fits(prefix: str, extra: bool) -> None:
    dataset = build(prefix, add_extra_token_to_sequence=extra)
    stored = binidx.IndexedDataset(prefix)
    text = [[*map(int, stored[number])] for number in range(len(stored)) if len(stored[number])]
    served = Counter(token for row in dataset.read_tokens(range(len(dataset))).tolist() for token in row if token >= 0)
    assert set(served) == {token for document in text for token in document}
    for document in text:
        if len(document) <= 32 + extra:
            assert all(served[token] == 1 for token in document)
            holding = [row for row in dataset.read_tokens(range(len(dataset))).tolist() if document[0] in row]
            at = holding[0].index(document[0])
            assert holding[0][at : at + len(document)] == document


def test_samples_are_padded_without_loss_and_have_gpt_keys(prefix: str) -> None:
    dataset = build(prefix)
    for sample in dataset:
        assert sample.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        assert all(value.shape == (32,) for value in sample.values())
        pads = sample["loss_mask"] == 0
        assert (sample["tokens"][pads][1:] == 0).all()
    assert 0.75 < dataset.fill <= 1
    assert dataset.num_tokens == sum(map(len, binidx.IndexedDataset(prefix)[:]))


def test_a_batch_is_its_samples_and_attention_stays_within_documents(prefix: str) -> None:
    dataset = build(prefix, inter_document_masking=True)
    for sample, number in zip(dataset.__getitems__([3, 0, 2]), [3, 0, 2], strict=True):
        assert tokens(sample) == tokens(dataset[number])
        spans = dataset.spans(number)
        ends = np.cumsum([count for *_, count in spans])
        assert sample["cu_seqlens"][: len(spans)].tolist() == [0, *ends[:-1].tolist()]


def test_an_epoch_is_served_before_the_next_and_a_run_that_grows_keeps_its_order(prefix: str) -> None:
    once, thrice = build(prefix), build(prefix, size=2 * len(build(prefix)) + 1)
    assert len(thrice) == 3 * len(once)
    assert thrice.shuffle_index[: len(once)].tolist() == once.shuffle_index.tolist()
    for epoch in range(3):
        part = thrice.shuffle_index[epoch * len(once) : (epoch + 1) * len(once)]
        assert sorted(part.tolist()) == [*range(len(once))]
    assert thrice.order.epochs(np.array([0, len(once), 3 * len(once) - 1])).tolist() == [0, 1, 2]


def test_the_cache_gives_the_same_samples(prefix: str, tmp_path: Path) -> None:
    cached = {"cache_small_indices": True, "path_to_cache": str(tmp_path)}
    first, second = build(prefix, **cached), build(prefix, **cached)
    assert len([*tmp_path.glob("*-pieces.npy")]) == 1
    assert [tokens(sample) for sample in first] == [tokens(sample) for sample in second]
    assert [tokens(sample) for sample in first] == [tokens(sample) for sample in build(prefix)]


def test_its_documents_can_be_traced(prefix: str) -> None:
    dataset = build(prefix)
    contents = OrderReads(dataset.order).trace(np.arange(len(dataset)))
    assert contents.length.sum() == dataset.pieces[:, 2].sum()
    assert (contents.epoch == 0).all()


def test_samples_of_no_tokens_are_refused(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/empty.bin", np.int32) as builder:
        builder.add_document([], [0])
        builder.finalize(f"{tmp_path}/empty.idx")
    with pytest.raises(IndexBuildError, match="0 tokens in 1 documents, 5 samples need some"):
        build(f"{tmp_path}/empty", size=5)
    assert len(build(f"{tmp_path}/empty")) == 0
