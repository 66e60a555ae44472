"""Requests with the same order: the arithmetic, and the arrays that Megatron Core builds for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, random_lengths, write_with_megatron
from helpers.oracle import megatron
from hypothesis import given
from hypothesis import strategies as st

import binidx
from binidx.index.blend import build_blend_index, build_exhaustive_blend_index
from binidx.index.cache.order_record import (
    Known,
    OrderKey,
    add_index,
    describe_change,
    format_known,
    get_order_key,
    parse_known,
)
from binidx.index.document_sample import build_document_index, plan_epochs
from binidx.native.permutations import RandomState

ARRAYS = ("document_index", "sample_index", "shuffle_index")


def order_for(num_samples: int | None, tokens: int, length: int, extra: bool) -> OrderKey:
    plan = plan_epochs(tokens, length, num_samples, add_extra_token=extra, drop_last_partial=True)
    return get_order_key(plan, length, add_extra_token=extra)


@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 200), st.booleans())
def test_a_request_has_the_order_of_exactly_those_within_its_bounds(
    tokens: int, length: int, num_samples: int, extra: bool
) -> None:
    order = order_for(num_samples, tokens, length, extra)
    assert order.fewest <= num_samples <= order.most
    for inside in (order.fewest, order.most):
        assert order_for(inside, tokens, length, extra) == order
    for outside in (order.fewest - 1, order.most + 1):
        assert outside < 0 or order_for(outside, tokens, length, extra).fields != order.fields


def test_epochs_together_are_the_beginning_of_one_more_that_is_separate() -> None:
    documents = np.arange(50, dtype=np.int32)
    for epochs in (1, 2, 3):
        together = build_document_index(documents, epochs, RandomState(5), separate_final_epoch=False)
        one_more = build_document_index(documents, epochs + 1, RandomState(5), separate_final_epoch=True)
        np.testing.assert_array_equal(one_more[: len(together)], together)


def test_no_number_of_samples_requests_one_epoch() -> None:
    assert order_for(None, 1000, 10, True) == order_for(5, 1000, 10, True)


@pytest.mark.parametrize("seed", range(20))
def test_megatron_makes_the_same_arrays_within_the_bounds_and_others_beyond(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, 40)
    lengths[[0, -1]] += 1
    prefix = write_with_megatron(tmp_path / "data", lengths, rng)
    length, extra = int(rng.integers(2, 9)), bool(rng.integers(2))
    order = order_for(int(lengths.sum() / length * rng.uniform(0, 5)), int(lengths.sum()), length, extra)
    settings: dict[str, Any] = {
        "random_seed": seed, "sequence_length": length, "split": "1,0,0", "tokenizer": TOKENIZER,
        "reset_position_ids": 0, "reset_attention_mask": 0, "eod_mask_loss": 0, "add_extra_token_to_sequence": extra,
    }  # fmt: skip

    def arrays(num_samples: int) -> list[np.ndarray]:
        config = megatron.gpt.GPTDatasetConfig(blend=([prefix], None), path_to_cache=None, **settings)
        low_level = megatron.indexed.IndexedDataset(prefix)
        indices = np.arange(len(lengths), dtype=np.int32)
        made = megatron.gpt.GPTDataset(low_level, prefix, indices, num_samples, megatron.utils.Split.train, config)
        return [getattr(made, name) for name in ARRAYS]

    try:
        fewest, most, beyond = arrays(max(order.fewest, 1)), arrays(max(order.most, 1)), arrays(order.most + 1)
    except AssertionError:
        pytest.skip("an empty last document trips Megatron's own assertion")
    for one, other in zip(fewest, most, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(most[2], beyond[2][: len(most[2])]) or len(most[2]) < 5


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(0, 500), st.integers(0, 500))
def test_a_longer_blend_begins_with_the_shorter_one(weights: list[float], size: int, more: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    for shorter, longer in zip(build_blend_index(shares, size), build_blend_index(shares, size + more), strict=True):
        np.testing.assert_array_equal(longer[:size], shorter)
    index, samples = np.zeros(size + more, np.int16), np.zeros(size + more, np.int64)
    megatron.helpers.build_blending_indices(index, samples, shares.tolist(), len(shares), size + more, False)
    np.testing.assert_array_equal(index[:size], build_blend_index(shares, size)[0])


def test_a_blend_of_whole_datasets_has_no_such_beginning() -> None:
    assert not np.array_equal(build_exhaustive_blend_index([2, 5])[0], build_exhaustive_blend_index([20, 5])[0][:7])


def test_the_record_drops_the_oldest() -> None:
    known: list[Known] = []
    for number in range(30):
        known = add_index(known, f"n{number}", OrderKey(1, False, 0, 10))
    assert [each.name for each in known] == [f"n{number}" for number in range(14, 30)]
    assert parse_known(format_known(known)) == known


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"indices": 1}', b'{"indices": [{"name": "a"}]}', b"[" * 100_000])
def test_a_damaged_record_is_an_empty_one(data: bytes) -> None:
    assert parse_known(data) == []


def test_a_change_of_order_is_described() -> None:
    known = add_index([], "a-GPTDataset-train", OrderKey(1, False, 0, 10))
    assert describe_change(known, OrderKey(1, False, 0, 10), "b-GPTDataset-train") == ""
    words = describe_change(known, OrderKey(3, True, 21, 27), "b-GPTDataset-train")
    assert (
        "this run reads 3 epochs, the last shuffled by itself; the index before it 1 epoch, up to 10 samples" in words
    )
    assert "valid for 21 to 27 samples" in words


def test_an_order_that_is_recorded_is_no_change_though_a_newer_index_has_another() -> None:
    known = add_index([], "a-GPTDataset-train", OrderKey(1, False, 0, 10))
    known = add_index(known, "b-GPTDataset-train", OrderKey(3, True, 21, 27))
    assert describe_change(known, OrderKey(1, False, 0, 10), "c-GPTDataset-train") == ""
    known = add_index(known, "d-GPTDataset-valid", OrderKey(2, False, 11, 20))
    assert "3 epochs, the last" in describe_change(known, OrderKey(2, False, 11, 20), "c-GPTDataset-train")


def test_another_split_of_the_same_data_is_no_run_that_grew() -> None:
    known = add_index([], "a-GPTDataset-train", OrderKey(3, True, 21, 27))
    assert describe_change(known, OrderKey(1, False, 0, 10), "b-GPTDataset-valid") == ""


# With datasets


def config_of(prefix: str, cache: str | None, **changes: Any) -> binidx.GPTDatasetConfig:
    defaults: dict[str, Any] = {
        "random_seed": 7, "sequence_length": 8, "split": "1,0,0", "tokenizer": TOKENIZER, "cache_small_indices": True,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    return binidx.GPTDatasetConfig(blend=([prefix], None), path_to_cache=cache, **{**defaults, **changes})


def train(config: binidx.GPTDatasetConfig, size: int | None) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [size, 0, 0], lambda: True, config).build()[0]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    return write_with_megatron(tmp_path / "en", rng.integers(1, 30, 100).astype(np.int32), rng)


@pytest.fixture(params=["local", "s3"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "cache") if request.param == "local" else request.getfixturevalue("s3").fresh()


def test_more_epochs_are_built_and_the_log_describes_the_change(
    prefix: str, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(config_of(prefix, cache), 100)
    grown = train(config_of(prefix, cache), 2 * len(first))
    assert "this run reads 2 epochs, shuffled together; the index before it 1 epoch" in caplog.text
    np.testing.assert_array_equal(grown.shuffle_index, train(config_of(prefix, None), 2 * len(first)).shuffle_index)


def test_the_same_order_and_another_seed_are_no_change(
    prefix: str, cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(config_of(prefix, cache), 100)
    grown = train(config_of(prefix, cache), 101)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(grown, name), getattr(first, name))
    for end in ("bin", "idx"):
        Path(f"{prefix}.{end}").rename(tmp_path / f"moved.{end}")
    for change in ({"random_seed": 8}, {"sequence_length": 9}, {"add_extra_token_to_sequence": False}):
        train(config_of(f"{tmp_path}/moved", cache, **change), 101)
    assert "this run reads" not in caplog.text
    train(config_of(f"{tmp_path}/moved", cache), 2 * len(first))
    assert "this run reads 2 epochs" in caplog.text
