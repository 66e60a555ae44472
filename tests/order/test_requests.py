"""Requests: trees drawn at random against a model of lists, options of version 0.1, and what `plan` counts of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.traceable_runs import write_source

import binidx
from binidx import RunOrder
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.ordered_dataset import make_opener
from binidx.dataset.split_requests import request_splits
from binidx.errors import ConfigError
from binidx.order.order_options import OrderOption
from binidx.order.order_protocols import Order
from binidx.order.requests import OverRequest, Request, find_blend
from binidx.order.stored.baked_order import BakedRequest
from binidx.order.stored.planned_order import PlannedRequest
from binidx.order.view import View, ViewOrder
from binidx.run.history import RunHistory
from binidx.run.plan.run_plan import plan_run
from binidx.run.stored.baking import bake, plan_bake
from binidx.run.stored.read_planning import plan_reads, prepare_read_plan, write_read_plan
from binidx.storage.location import Location
from binidx.testing import check_order

S = 16

Pieces = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class EveryOtherRequest(OverRequest):
    """Every other sample of another request, from `first` on."""

    first: int

    def serve(self, order: Order) -> Order:
        return ViewOrder(order, np.arange(self.first, len(order), 2), {"class": "EveryOther", "first": self.first})


@dataclass(frozen=True)
class EveryOther(OrderOption):
    first: int = 0

    def request(self, inner: Request) -> Request:
        return EveryOtherRequest(inner, self.first)


@dataclass(frozen=True)
class Twice(OrderOption):
    """Every document two times in each epoch."""

    def request(self, inner: Request) -> Request:
        return inner.map_sources(lambda source: source.with_documents(self))

    def index_fields(self, options: Any) -> dict[str, Any]:
        return {"times": 2}

    def choose_sequences(self, source: Any, options: Any) -> Any:
        return np.repeat(np.asarray(source.sequences, np.int32), 2)


@dataclass(frozen=True)
class EarlyEveryOther(OrderOption):
    """The example of how-to/choose-an-order in version 0.1, word for word."""

    first: int = 0

    def wrap(self, order: Any, options: Any, *, is_whole: bool) -> Any:
        if not is_whole:
            return order
        kept = np.arange(self.first, len(order), 2)
        return ViewOrder(order, kept, {"class": "EveryOther", "first": self.first})


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sources")
    return [write_source(folder / f"s{n}", random.Random(n), True) for n in range(3)]


def configure(prefixes: list[str], weights: list[float] | None = None, **options: Any) -> GPTDatasetConfig:
    tokenizer = binidx.SpecialTokens()
    return GPTDatasetConfig(5, S, (prefixes, weights), split="1,0,0", tokenizer=tokenizer, **options)


def list_samples(order: Order) -> list[Pieces]:
    spans, bounds = order.spans(np.arange(len(order)))
    rows = [tuple(row) for row in spans.tolist()]
    return [rows[first:stop] for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


class Tree:
    """A request drawn at random, and its samples by lists of pieces; the blend's draws alone are the library's."""

    def __init__(self, choose: random.Random, prefixes: list[str], folder: Path) -> None:
        self.choose, self.folder, self.lists = choose, folder, 0
        self.prefixes, self.opener = prefixes, make_opener(configure(prefixes))
        self.config = configure(prefixes, [1.0 + choose.random() for _ in prefixes])

    def draw(self) -> tuple[Request, list[Pieces]]:
        [blend] = request_splits(binidx.GPTDataset, self.config, [self.choose.randrange(40, 90), 0, 0]).values()
        found = find_blend(blend[0])
        assert found is not None
        over = [self.draw_over(source, list_samples(self.opener.open(source)), [number])
                for number, source in enumerate(found.sources)]  # fmt: skip
        requests, samples = [request for request, _ in over], [pieces for _, pieces in over]
        size = min(map(len, samples))
        request = replace(found, parts=requests, size=size)
        order: Any = self.opener.open(request)
        drawn = zip(order.dataset_index.tolist(), order.dataset_sample_index.tolist(), strict=True)
        served = [[(source, *rest) for _, *rest in samples[source][number]] for source, number in drawn]
        return self.draw_over(request, served, [0, 1, 2])

    def draw_over(self, request: Request, samples: list[Pieces], sources: list[int]) -> tuple[Request, list[Pieces]]:
        """Return a request with up to three others around it, and its samples."""
        for _ in range(self.choose.randrange(4)):
            if self.choose.random() < 0.4:
                first = self.choose.randrange(2)
                request, samples = EveryOtherRequest(request, first), samples[first::2]
            else:
                request, samples = self.draw_view(request, samples, sources)
        return request, samples

    def draw_view(self, request: Request, samples: list[Pieces], sources: list[int]) -> tuple[Request, list[Pieces]]:
        gone, lines = set[tuple[int, int]](), []
        for source in sources:
            dataset = binidx.IndexedDataset(self.prefixes[source])
            bounds = dataset.document_indices.tolist()
            document = self.choose.randrange(len(bounds) - 1)
            lines.append(f"{self.prefixes[source]}\t{document}\n")
            own = source if len(sources) > 1 else 0
            gone |= {(own, sequence) for sequence in range(bounds[document], bounds[document + 1])}
        left = [sample for sample in samples if not any((s, q) in gone and count for s, q, _, count in sample)]
        if not left:
            return request, samples
        self.lists += 1
        (self.folder / f"{self.lists}.txt").write_text("".join(lines))
        return View(f"{self.folder}/{self.lists}.txt").request(request), left


@pytest.mark.parametrize("seed", range(12))
def test_requests_nested_three_deep_are_what_lists_say(prefixes: list[str], seed: int, tmp_path: Path) -> None:
    tree = Tree(random.Random(seed), prefixes, tmp_path)
    request, samples = tree.draw()
    order = tree.opener.open(request)
    assert list_samples(order) == samples
    check_order(order, seed=seed)
    assert [source.name for source in request.sources] == prefixes


def test_an_option_of_version_0_1_serves_what_its_request_serves(prefixes: list[str]) -> None:
    for blend in ({prefix: 1.0 + number for number, prefix in enumerate(prefixes)}, prefixes[0]):
        new = binidx.load_dataset(blend, S, num_samples=90, order=EveryOther(1)).wrapped
        with pytest.warns(DeprecationWarning, match="EarlyEveryOther: override `request`, not .'wrap'"):
            early = binidx.load_dataset(blend, S, num_samples=90, order=EarlyEveryOther(1)).wrapped
        assert early.order_identity == new.order_identity
        assert (early.read_tokens(range(len(new))) == new.read_tokens(range(len(early)))).all()
        check_order(early.order)


def test_an_early_option_with_an_index_of_its_own_is_opened(prefixes: list[str]) -> None:
    from binidx.order.document_packing import PackRule

    @dataclass(frozen=True)
    class Packed(OrderOption):
        def index_fields(self, options: Any) -> dict[str, Any]:
            return {"packing": "mine"}

        def open_source(self, parameters: Any, source: Any, options: Any) -> Any:
            return PackRule(parameters, "first_fit").open(source, options)

    with pytest.warns(DeprecationWarning, match="Packed: override `request`"):
        early = binidx.load_dataset(prefixes[0], S, order=Packed()).wrapped
    plain = binidx.load_dataset(prefixes[0], S, order="first_fit").wrapped
    assert (early.read_tokens(range(len(early))) == plain.read_tokens(range(len(plain)))).all()
    assert early.unique_identifiers["order"] == {"packing": "mine"}


def test_an_early_option_that_chooses_sequences_serves_those_alone(prefixes: list[str]) -> None:
    @dataclass(frozen=True)
    class Tail(OrderOption):
        def index_fields(self, options: Any) -> dict[str, Any]:
            return {"tail": 3}

        def choose_sequences(self, source: Any, options: Any) -> Any:
            return np.asarray(source.sequences[-3:], np.int32)

    with pytest.warns(DeprecationWarning, match="Tail: override `request`"):
        early = binidx.load_dataset(prefixes[0], S, order=Tail()).wrapped
    stored = binidx.IndexedDataset(prefixes[0])
    spans, _ = early.order.spans(np.arange(len(early)))
    assert {*spans[:, 1].tolist()} == {*range(len(stored) - 3, len(stored))}


def test_a_plan_counts_an_order_and_says_what_it_cannot_count(prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t0\n")
    weights = [1.0, 2.0, 3.0]
    plain = plan_run(binidx.Run(configure(prefixes, weights), [90, 0, 0], 4, 1)).to_json()
    told = {
        View(f"{tmp_path}/list.txt"): "order: view: counted with the samples that .*list.txt leaves out: at most",
        View(f"{tmp_path}/list.txt", over="source"): "leaves out: at most",
        View(f"{tmp_path}/list.txt", how="rebuild"): "the index is built without the listed documents",
        "first_fit": "documents are counted as if samples had no pads",
        EveryOther(): "order: EveryOther: samples and reads are counted without it",
        Twice(): "order: Twice: documents, tokens and epochs are counted before it chooses documents",
    }
    for option, message in told.items():
        planned = plan_run(binidx.Run(configure(prefixes, weights, order=option), [90, 0, 0], 4, 1)).to_json()
        assert planned["samples"] == plain["samples"]
        assert [row["documents"] for row in planned["indices"]] == [row["documents"] for row in plain["indices"]]
        [caution] = [line for line in planned["cautions"] if line.startswith("order: ")]
        assert re.search(message, caution)
        assert not [line for line in planned["cautions"] if "fill no step" in line]
        is_exact = "leaves out" in message or option == EveryOther()
        assert planned["same_order_up_to"] == (plain["same_order_up_to"] if is_exact else None)
    assert not [line for line in plain["cautions"] if line.startswith("order: ")]
    assert [line for line in plain["cautions"] if "the last 2 samples fill no step of 4" in line]


@pytest.mark.parametrize("option", ["view", "mine"])
def test_a_plan_finds_the_index_of_chosen_documents(option: str, prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t0\n{prefixes[1]}\t0\n")
    order = View(f"{tmp_path}/list.txt", how="rebuild") if option == "view" else Twice()
    cached = {"order": order, "path_to_cache": f"{tmp_path}/cache", "cache_small_indices": True}
    run = binidx.Run(configure(prefixes[:2], [1.0, 2.0], **cached), [90, 0, 0], 3, 1)
    missing = plan_run(run)
    run.build()
    planned = plan_run(run)
    assert {row["cache"] for row in missing.index_rows()} == {"missing"}
    assert {row["cache"] for row in planned.index_rows()} <= {"there", "to be proven"}
    assert not [line for line in planned.cautions if "stale" in line]


def test_a_class_that_opens_its_order_by_itself_is_refused_by_name(prefixes: list[str]) -> None:
    source = binidx.megatron.MegatronDataset.request_source(
        prefixes[0], 9, binidx.Split.train, configure(prefixes), (0.0, 1.0)
    )
    with pytest.raises(ConfigError, match="order: found MegatronDataset, which opens its order by itself"):
        make_opener(configure(prefixes)).open(source)


@pytest.mark.parametrize("over", ["blend", "source"])
def test_a_view_is_one_order_however_it_is_opened(prefixes: list[str], over: Any, tmp_path: Path) -> None:
    """By builder, constructors, load_dataset, the file of a run, its history, a read plan, and a bake."""
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t0\n{prefixes[2]}\t1\n")
    weights, order = [1.0, 2.0, 3.0], View(f"{tmp_path}/list.txt", over=over)
    config = configure(prefixes, weights, order=order, path_to_cache=f"{tmp_path}/cache", mid_level_dataset_surplus=1.0)
    sizes = [90, 0, 0]
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config)
    built: Any = builder.build()[0]
    needed = samples_of(built)
    parts = [
        binidx.GPTDataset(part.dataset, part.dataset_path, part.indices, part.num_samples, part.index_split, config)
        for part in built.datasets
    ]
    assert samples_of(binidx.megatron.BlendedDataset(parts, built.weights, built.size, config)) == needed
    blend = dict(zip(prefixes, weights, strict=True))
    options = {"random_seed": 5, "order": order, "mid_level_dataset_surplus": 1.0}
    assert samples_of(binidx.load_dataset(blend, S, num_samples=90, **options)) == needed
    binidx.Run(config, sizes, 3, 2).save(f"{tmp_path}/run.json")
    run = binidx.Run.load(f"{tmp_path}/run.json")
    assert samples_of(run.build()[0]) == needed
    for opened in (RunOrder.of(run), RunOrder.open(run), RunHistory.of(run).last):
        steps = range(opened.num_steps() or 0)
        rows = opened.table(steps, tokens=True).sort_by("sample").to_pylist()
        assert rows
        for row in rows:
            assert row["input_ids"] == needed[row["sample"]][0]
            assert prefixes.index(row["source"]) == needed[row["sample"]][1]
    prepare_read_plan(built, 90)
    planned = binidx.BlendedMegatronDatasetBuilder(
        binidx.GPTDataset, sizes, lambda: True, replace(config, read_plan=True)
    ).build()[0]
    assert isinstance(planned, binidx.PlannedDataset)
    assert samples_of(planned) == needed
    ran = RunOrder.of(run)
    bake(ran, f"{tmp_path}/baked", plan_bake(ran, range(ran.num_steps() or 0)))
    baked = binidx.BakedDataset(f"{tmp_path}/baked", config)
    assert samples_of(baked) == needed[: len(baked)]


def test_a_stored_run_has_a_request_that_refuses_what_depends_on_its_sources(
    prefixes: list[str], tmp_path: Path
) -> None:
    config = configure(prefixes, [1.0, 2.0, 3.0])
    run = binidx.Run(config, [90, 0, 0], 3, 1)
    order = RunOrder.of(run)
    steps = range(order.num_steps() or 0)
    bake(order, f"{tmp_path}/baked", plan_bake(order, steps))
    write_read_plan(order, f"{tmp_path}/plan", plan_reads(order, steps))
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t0\n")
    for request, kind in (
        (BakedRequest(Location(f"{tmp_path}/baked")), binidx.BakedDataset),
        (PlannedRequest(Location(f"{tmp_path}/plan")), binidx.PlannedDataset),
    ):
        opened, dataset = make_opener(config).open(request), kind(str(request.directory), config)
        check_order(opened)
        assert opened.identity == dataset.order.identity
        assert list_samples(opened) == list_samples(dataset.order)
        for ask in (
            lambda request=request: request.sources,
            lambda request=request: request.map_sources(lambda source: source),
            lambda request=request: make_opener(config).open(View(f"{tmp_path}/list.txt").request(request)),
        ):
            with pytest.raises(ConfigError, match=r"order: found the stored run .*, needs sources"):
                ask()


def samples_of(dataset: Any) -> list[tuple[list[int], int]]:
    """Tokens and source of each sample, as training reads them."""
    return [
        ([*sample["tokens"].tolist(), int(sample["labels"][-1])], int(sample["dataset_id"]))
        for sample in dataset.__getitems__(range(len(dataset)))
    ]
