"""One notion of a read: what is an input of a sample, what only a label, and what is not read at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import binidx
from binidx import RunOrder
from binidx.order.reads import OrderReads, TokenReads
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.exposures import count_exposures
from binidx.run.schedule import BatchSchedule

S = 8
LENGTHS = [5, 12, 3, 9, 7, 1, 14]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Documents whose tokens are 1000 times the number of the document, and their place in it."""
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        for document, length in enumerate(LENGTHS):
            builder.add_document(document * 1000 + np.arange(length), [length])
        builder.finalize(f"{tmp_path}/en.idx")
    return f"{tmp_path}/en"


def load(prefix: str, **options: Any) -> Any:
    return binidx.load_dataset(prefix, S, **options).wrapped


def inputs_of(reads: TokenReads) -> list[list[int]]:
    """Tokens that each sample has as inputs."""
    rows: list[list[int]] = [[] for _ in reads.source]
    columns = reads.owner, reads.document, reads.start, reads.inputs
    for sample, document, start, count in zip(*(column.tolist() for column in columns), strict=True):
        rows[sample] += range(document * 1000 + start, document * 1000 + start + count)
    return rows


def served(dataset: Any) -> list[list[int]]:
    """Input tokens of each sample as it is served, without pads."""
    return [[token for token in dataset[number]["tokens"].tolist() if token >= 0] for number in range(len(dataset))]


@pytest.mark.parametrize("num_samples", [None, 30])
def test_the_last_label_is_no_input(prefix: str, num_samples: int | None) -> None:
    dataset = load(prefix, num_samples=num_samples)
    order, samples = dataset.order, np.arange(len(dataset))
    reads = OrderReads(order).trace(samples)
    assert inputs_of(reads) == served(dataset)
    assert [len(text) for text in OrderReads(order).read_text(samples)] == [S + 1] * len(samples)
    only_labels = np.flatnonzero((reads.inputs == 0) & (reads.length > 0))
    assert (reads.target[only_labels] == S).all()
    for piece in only_labels.tolist():  # `find` names the sample all the same
        assert reads.owner[piece] in OrderReads(order).find(0, [int(reads.document[piece])])
    assert OrderReads(order).count_inputs(samples, reads.source).tolist() == [S] * len(samples)


def test_the_last_token_of_a_packed_document_is_an_input_without_a_label(prefix: str) -> None:
    order = load(prefix, order="best_fit").order
    assert order.ends_documents
    reads = OrderReads(order).trace(np.arange(len(order)))
    whole = [piece for piece in range(len(reads.document)) if reads.target[piece] + reads.length[piece] <= S]
    assert (reads.inputs[whole] == reads.length[whole]).all()


def test_pads_are_not_read(prefix: str) -> None:
    order = binidx.load_dataset(prefix, 20, order="best_fit").wrapped.order
    samples = np.arange(len(order))
    counts = OrderReads(order).count_inputs(samples, np.zeros_like(samples))
    assert counts.tolist() == [len(row) for row in inputs_of(OrderReads(order).trace(samples))]
    assert counts.min() < 20


def test_masked_tokens_are_read(prefix: str) -> None:
    tokenizer = binidx.SpecialTokens(eod=1000, pad=-1)
    masked = load(prefix, tokenizer=tokenizer, eod_mask_loss=True, reset_attention_mask=True)
    reads = [inputs_of(OrderReads(each.order).trace(np.arange(len(each)))) for each in (masked, load(prefix))]
    assert reads[0] == reads[1]


def test_tokens_of_another_epoch_are_read_again(prefix: str) -> None:
    order = load(prefix, num_samples=30).order
    rows = inputs_of(OrderReads(order).trace(np.arange(len(order))))
    tokens = [token for row in rows for token in row]
    assert max(map(tokens.count, {*tokens})) > 1
    assert len(tokens) == len(order) * S


def test_dropped_tokens_and_samples_are_not_read(prefix: str) -> None:
    dataset = load(prefix)
    rows = inputs_of(OrderReads(dataset.order).trace(np.arange(len(dataset))))
    assert sum(map(len, rows)) == (sum(LENGTHS) - 1) // S * S  # the stream's last tokens fill no sample
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 2, 2), len(dataset)))
    found = count_exposures(order, {prefix: range(len(LENGTHS))}, order.num_steps() or 0)[prefix]
    assert found.tokens.sum() == sum(map(len, rows[: len(dataset) // 4 * 4]))


def test_skipped_iterations_read_without_training(prefix: str) -> None:
    dataset = load(prefix, num_samples=30)
    schedule = BatchSchedule(4, 2, 2, skipped_steps=(1,))
    order = RunOrder.of_dataset(dataset, GlobalOrder(schedule, len(dataset)))
    found = count_exposures(order, {prefix: range(len(LENGTHS))}, 3)[prefix]
    rows = inputs_of(OrderReads(dataset.order).trace(np.arange(12)))
    for document in range(len(LENGTHS)):
        holds = [any(token // 1000 == document for token in row) for row in rows]
        assert found.samples[document] == sum(holds)
        assert found.samples_trained[document] == sum(holds[:4] + holds[8:])
