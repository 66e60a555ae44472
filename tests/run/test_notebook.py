"""Objects as a notebook shows them, several samples at once, and samples as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.explored import HOSTILE, read_html, write_run
from helpers.gpt_data import Tokenizer

import binidx
from binidx.errors import ConfigError
from binidx.html_table import MOST_HTML_ROWS, format_html_table
from binidx.order.reads import OrderReads
from binidx.run.plan.run_plan import plan_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> binidx.Run:
    return binidx.Run.load(write_run(tmp_path_factory.mktemp("run")))


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_slice_or_a_list_of_numbers_is_a_list_of_samples(run: binidx.Run) -> None:
    blend = run.build()[0]
    loaded = binidx.load_dataset(run.config.blend[0][0], 8)  # type: ignore[index]
    for dataset in (blend, blend.datasets[0], loaded):
        assert equal(dataset[[1, 7, -1]][2], dataset[len(dataset) - 1])
        for idx, numbers in (
            (slice(2, 5), [2, 3, 4]),
            (slice(None, None, -9), range(len(dataset))[::-9]),
            (slice(5, 2), []),
            (np.array([7, 1]), [7, 1]),
            ([], []),
        ):
            samples = dataset[idx]
            assert isinstance(samples, list)
            assert len(samples) == len(numbers)
            assert all(equal(sample, dataset[number]) for sample, number in zip(samples, numbers, strict=True))
        for wrong in ([len(dataset)], [-len(dataset) - 1]):
            with pytest.raises(IndexError):
                dataset[wrong]
        with pytest.raises(TypeError, match=r"found True among them, needs numbers; numpy\.flatnonzero"):
            dataset[[True, False]]
        with pytest.raises(TypeError, match="found 'b' among them, needs numbers"):
            dataset[[1, "b"]]
        with pytest.raises(TypeError, match=r"samples: found 1.5, needs a whole number"):
            dataset[1.5]
        with pytest.raises(TypeError, match=r"found 'tokens', needs a whole number; dataset\[0\]\['tokens'\] is that"):
            dataset["tokens"]


def test_a_subclass_keeps_its_own_getitem(run: binidx.Run) -> None:
    class Numbers(binidx.GPTDataset):
        def __getitem__(self, idx: Any) -> Any:
            return idx

    config = run.config
    train = binidx.BlendedMegatronDatasetBuilder(Numbers, [20, 0, 0], lambda: True, config).build()[0]
    assert train.datasets[0][2:5] == slice(2, 5)


def test_objects_have_small_tables(run: binidx.Run) -> None:
    train, order = run.build()[0], binidx.RunOrder.open(run)
    loaded = binidx.load_dataset(run.config.blend[0][0], 8)  # type: ignore[index]
    shown = [train, train.datasets[0], loaded, loaded.loader(2), order, run, binidx.account(order, 5), plan_run(run)]
    for thing in shown:
        text = thing._repr_html_()
        assert len(read_html(text).rows) <= MOST_HTML_ROWS
        assert len(text) < 4000
    cells = read_html(order._repr_html_()).rows
    assert ["samples", "300"] in cells


def test_a_table_is_escaped_and_cut() -> None:
    text = format_html_table("<b>", [("<script>", 1234, 0.5)] * 50)
    assert "<script>" not in text
    assert "<b>" not in text
    assert read_html(text).rows[0] == ["<script>", "1,234", "0.500"]
    assert read_html(text).rows[-1] == ["and 30 more"]


def test_a_shown_sample_has_its_documents_and_where_they_came_from(run: binidx.Run) -> None:
    train, order = run.build()[0], binidx.RunOrder.open(run)
    for number in range(0, 40, 7):
        shown = str(binidx.show_sample(train, number))
        spans = OrderReads(order.order).trace(np.array([number]))
        titles = [line for line in shown.splitlines() if line.startswith("── ")]
        pieces = zip(spans.document, spans.start, spans.length, strict=True)
        expected = [
            f"── document {doc}, tokens {start} to {start + length}, from s3://text/" for doc, start, length in pieces
        ]
        assert [title.startswith(text) for title, text in zip(titles, expected, strict=True)] == [True] * len(expected)
    html = "".join(binidx.show_sample(train, number)._repr_html_() for number in range(40))
    assert not [tag for tag, _ in read_html(html).tags if tag not in ("b", "p", "pre", "span")]
    assert "loss" not in html
    assert any(word in "".join(read_html(html).texts) for word in HOSTILE)


def test_tokens_without_loss_are_marked(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for length in (5, 9, 30):
            builder.add_document([*range(10, 10 + length), 0], [length + 1])
        builder.finalize(f"{tmp_path}/en.idx")
    train = binidx.load_dataset(f"{tmp_path}/en", 12, tokenizer=Tokenizer(), eod_mask_loss=True)
    for number in range(len(train)):
        tokens, mask = train.read_tokens([number])[0], train[number]["loss_mask"].tolist()
        shown = train.show(number)
        assert shown.without_loss == {place + 1 for place, loss in enumerate(mask) if not loss}
        assert ("no loss on tokens" in str(shown)) == (0.0 in mask)
        assert str(tokens[0]) in str(shown)
        assert "no manifest" in str(shown)


def test_a_dataset_that_knows_no_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="show: found a list"):
        binidx.show_sample([], 0)
