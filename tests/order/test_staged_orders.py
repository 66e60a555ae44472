"""Orders whose blend or length changes during a run, opened of their requests: those that datasets serve."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_samples import config
from helpers.traceable_runs import write_source

import binidx
from binidx.dataset.config import Split
from binidx.dataset.megatron.ordered_dataset import make_opener, request_order
from binidx.dataset.split_requests import request_splits
from binidx.dataset.staged import LengthStagedDataset, Stage, StagedBlendedDataset, request_stages
from binidx.errors import BlendError, ConfigError
from binidx.order.order_protocols import Order
from binidx.order.requests import Request
from binidx.order.staged.window_order import LengthStage, WindowRequest
from binidx.order.view import ViewRequest
from binidx.testing import check_order

LENGTHS = [LengthStage(4, 16), LengthStage(8, 12), LengthStage(2, 20)]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("orders")
    return [write_source(directory / f"s{number}", random.Random(number), True) for number in range(3)]


def stages_of(prefixes: list[str]) -> list[Stage]:
    return [Stage((prefixes[:2], [3.0, 1.0]), 70, 90), Stage((prefixes, [1.0, 1.0, 0.5]), 130)]


def listed(folder: Path, prefixes: list[str]) -> str:
    (folder / "list.txt").write_text(f"{prefixes[0]}\t1\n{prefixes[1]}\t0\n")
    return f"{folder}/list.txt"


def windows_of(options: Any, size: int = 60) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [size, 0, 0], lambda: True, options).build()[0]


def assert_same(order: Any, other: Any) -> None:
    samples = np.arange(len(order))
    assert len(order) == len(other)
    assert order.identity == other.identity
    for some, others in zip(order.spans(samples), other.spans(samples), strict=True):
        np.testing.assert_array_equal(some, others)


VIEWS: list[Callable[[str], Any]] = [
    lambda where: None,
    lambda where: binidx.View(where),
    lambda where: binidx.View(where, over="source"),
    lambda where: binidx.View(where, how="rebuild"),
]


@pytest.mark.parametrize("view", VIEWS)
def test_an_opened_request_is_the_order_that_datasets_serve(view: Any, prefixes: list[str], tmp_path: Path) -> None:
    weights = [0.5, 0.3, 0.2]
    options = config((prefixes, weights), order=view(listed(tmp_path, prefixes)), mid_level_dataset_surplus=0.5)
    staged = StagedBlendedDataset(binidx.GPTDataset, stages_of(prefixes), options)
    request = request_order(options, request_stages(binidx.GPTDataset, stages_of(prefixes), options))
    opened: Any = make_opener(options).open(request)
    assert_same(opened, staged.order)
    check_order(opened)
    assert len(staged.datasets) > len(prefixes)
    inner = opened if view("") is None or view("").how == "rebuild" or view("").over == "source" else opened.inner
    assert (inner.seams, inner.proof) == (staged.seams, staged.proof)
    windows = windows_of(options)
    [asked] = request_splits(binidx.GPTDataset, options, [60, 0, 0])[Split.train]
    cut = make_opener(options).open(WindowRequest(asked, LENGTHS, mixed_windows=4))
    assert_same(cut, LengthStagedDataset(windows, LENGTHS, mixed_windows=4).order)
    check_order(cut)


def test_windows_may_be_a_blend_in_stages_and_have_views_over_them(prefixes: list[str], tmp_path: Path) -> None:
    options = config((prefixes, [1.0, 1.0, 1.0]))
    staged = StagedBlendedDataset(binidx.GPTDataset, stages_of(prefixes), options)
    lengths = LengthStagedDataset(staged, LENGTHS)
    check_order(lengths.order)
    for dataset in (staged, lengths):  # workers unpickle it
        again = pickle.loads(pickle.dumps(dataset))
        assert again[7]["tokens"].tolist() == dataset[7]["tokens"].tolist()
    [asked] = request_splits(binidx.GPTDataset, options, [60, 0, 0])[Split.train]
    view = binidx.View(listed(tmp_path, prefixes))
    over = make_opener(options).open(ViewRequest(WindowRequest(asked, LENGTHS), view))
    assert 0 < len(over) < sum(stage.num_samples for stage in LENGTHS)
    check_order(over)
    stages = request_stages(binidx.GPTDataset, stages_of(prefixes), options)
    with pytest.raises(ConfigError, match="build the datasets"):
        make_opener(options).open(WindowRequest(stages, LENGTHS))


def test_the_sources_of_stages_are_the_first_rounds_by_their_names(prefixes: list[str], tmp_path: Path) -> None:
    options = config((prefixes, [1.0, 1.0, 1.0]), path_to_cache=f"{tmp_path}/cache", cache_small_indices=True)
    request = request_stages(binidx.GPTDataset, stages_of(prefixes), options)
    names = [source.index_name().files.name for source in request.sources]
    assert [source.name for source in request.sources] == prefixes
    assert not (tmp_path / "cache").exists()
    staged = StagedBlendedDataset(binidx.GPTDataset, stages_of(prefixes), options)
    written = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {f"{name}-binidx.json" for name in names} < written
    assert len(names) < len(staged.datasets)


def test_later_rounds_have_the_order_of_the_option_too(prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t1\n")
    drop = range(*binidx.IndexedDataset(prefixes[0]).document_indices[1:3].tolist())
    stages = [Stage((prefixes[:1], None), 20), Stage((prefixes[:1], None), 200)]
    for options in ({"over": "source"}, {"how": "rebuild"}, {}):
        view = binidx.View(f"{tmp_path}/list.txt", **options)
        staged = StagedBlendedDataset(binidx.GPTDataset, stages, config((prefixes[:1], None), order=view))
        spans, _ = staged.order.spans(np.arange(len(staged)))
        assert len({*spans[:, 0].tolist()}) > 1
        assert not {*drop} & {*spans[:, 1].tolist()}


def test_changes_of_sources_are_applied_one_after_the_other(prefixes: list[str]) -> None:
    marks: list[tuple[str, str]] = []

    def mark(text: str) -> Callable[[Any], Request]:
        def change(source: Any) -> Request:
            marks.append((text, source.name))
            changed: Request = source
            return changed

        return change

    asked = request_stages(binidx.GPTDataset, [Stage((prefixes[:1], None), 20)], config())
    changed = asked.map_sources(mark("first")).map_sources(mark("second"))
    order: Order = make_opener(config()).open(changed)
    assert len(order) == 20
    assert marks == [("first", prefixes[0]), ("second", prefixes[0])]


class Read(binidx.GPTDataset):
    """Its own method makes the samples."""

    def __getitem__(self, idx: Any) -> Any:
        return {"first": super().__getitem__(idx)["tokens"][:1]}


class Assembled(binidx.GPTDataset):
    """Its own function makes the samples."""

    def assemble(self, idx: Any, sequences: Any) -> Any:
        return super().assemble(idx, sequences)


@pytest.mark.parametrize("kind", [Read, Assembled])
def test_windows_of_a_length_of_their_own_are_refused(kind: Any, prefixes: list[str]) -> None:
    built = binidx.BlendedMegatronDatasetBuilder(kind, [60, 0, 0], lambda: True, config((prefixes[:1], None))).build()
    with pytest.raises(ConfigError, match=f"windows: found {kind.__name__}.*own methods"):
        LengthStagedDataset(built[0], LENGTHS)  # type: ignore[arg-type]


def test_windows_in_another_order_are_refused(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="in an order of its own, needs Megatron's order"):
        LengthStagedDataset(windows_of(config((prefixes[:1], None), order="best_fit")), LENGTHS)


def test_methods_of_a_user_make_the_samples_of_stages_but_take_no_order(prefixes: list[str], tmp_path: Path) -> None:
    stages = stages_of(prefixes)
    assert len(StagedBlendedDataset(Read, stages, config((prefixes, None)))[0]["first"]) == 1
    view = binidx.View(listed(tmp_path, prefixes))
    with pytest.raises(ConfigError, match="reads or counts samples by itself"):
        StagedBlendedDataset(Read, stages, config((prefixes, None), order=view))


def test_a_source_whose_documents_all_leave_is_refused(prefixes: list[str], tmp_path: Path) -> None:
    count = len(binidx.IndexedDataset(prefixes[0]).document_indices) - 1
    (tmp_path / "list.txt").write_text("".join(f"{prefixes[0]}\t{document}\n" for document in range(count)))
    view = binidx.View(f"{tmp_path}/list.txt", over="source")
    with pytest.raises(BlendError, match="too few samples are left"):
        StagedBlendedDataset(binidx.GPTDataset, stages_of(prefixes), config((prefixes, None), order=view))
