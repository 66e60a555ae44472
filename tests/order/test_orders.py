"""Orders of random data against their contract, a model, and what datasets serve."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_samples import config
from helpers.traceable_runs import random_run, write_source

import binidx
from binidx import RunOrder
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.errors import BlendError, ConfigError, IndexBuildError
from binidx.native.mappings import first_fit
from binidx.order.requests import OverRequest
from binidx.order.sequences import SequenceRunsOrder
from binidx.order.source_order import StoredSource
from binidx.run.global_order import GlobalOrder
from binidx.run.plan.node_check import check_node
from binidx.run.provenance.accounts import account
from binidx.run.schedule import BatchSchedule
from binidx.testing import check_order

S = 16


class SequenceOrder(SequenceRunsOrder):
    """Sample i is sequence i, whole."""

    @property
    def identity(self) -> Any:
        return {"class": "SequenceOrder", "data": self.source.dataset.identity}

    def __len__(self) -> int:
        return len(self.source.dataset)

    def runs(self, samples: Any) -> tuple[Any, Any]:
        return samples, samples + 1

    def candidates(self, sequences: Any) -> Any:
        return sequences


def load(prefixes: Any, num_samples: int | None = None, **options: Any) -> Any:
    return binidx.load_dataset(prefixes, S, num_samples=num_samples, random_seed=5, **options).wrapped


def rows(dataset: Any) -> list[list[int]]:
    return [row.tolist() for row in dataset.read_tokens(range(len(dataset)))]


def documents_in(row: list[int]) -> set[int]:
    return {token // 1000 for token in row if token >= 0}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_source(tmp_path_factory.mktemp("one") / "a", random.Random(3), True)


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("blend")
    return {write_source(folder / f"s{n}", random.Random(n), True): 1.0 + n for n in range(3)}


def listed(tmp_path: Path, *lines: object) -> str:
    (tmp_path / "list.txt").write_text("".join(f"{line}\n" for line in lines))
    return f"{tmp_path}/list.txt"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [binidx.GPTDataset, BestFitGPTDataset])
def test_orders_of_datasets_keep_the_contract(kind: Any, seed: int, tmp_path: Path) -> None:
    check_order(random_run(tmp_path, seed, kind).order, seed=seed)


def test_the_contract_refuses_an_order_that_finds_too_little(one: str) -> None:
    class Blind(SequenceOrder):
        def candidates(self, sequences: Any) -> Any:
            return sequences[1:]

    dataset = binidx.IndexedDataset(one)
    check_order(SequenceOrder(StoredSource(one, dataset, range(len(dataset)))))
    with pytest.raises(AssertionError, match="find: found samples"):
        check_order(Blind(StoredSource(one, dataset, range(len(dataset)))))


def test_orders_of_one_identity_begin_with_each_other(one: str, blend: dict[str, float]) -> None:
    """What a loader's state compares: whatever else differs must be in it."""
    made = [
        binidx.load_dataset(prefixes, S, num_samples=size, random_seed=seed, order=kind).wrapped
        for prefixes in (one, next(iter(blend)), blend, dict.fromkeys(blend, 1.0))
        for kind in (None, "first_fit", "best_fit")
        for seed in (5, 6)
        for size in (10, 30)
    ]
    found = [(json.dumps(dataset.order.identity, sort_keys=True), rows(dataset)) for dataset in made]
    equal = [
        (first, second) for (identity, first), (other, second) in itertools.combinations(found, 2) if identity == other
    ]
    for first, second in equal:
        assert first == second[: len(first)]
    assert len(equal) > len(made) // 3  # of the 24 pairs that differ in size alone


@pytest.mark.parametrize("size", [30, None])
def test_the_identity_of_a_blend_has_the_fields_of_earlier_versions(blend: dict[str, float], size: int | None) -> None:
    built = config(([*blend], [*blend.values()] if size else None), sequence_length=S, split="1,0,0")
    order: Any = (
        binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [size, 0, 0], lambda: True, built).build()[0].order
    )
    assert [*order.identity] == ["class", "weights", "all", "datasets"]
    assert order.identity["class"] == "BlendedDataset"
    assert order.identity["all"] is (size is None)
    assert order.identity["datasets"] == [part.identity for part in order.parts]


# Views


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep", [False, True])
def test_skip_leaves_out_the_samples_with_a_listed_document_and_no_others(
    one: str, seed: int, keep: bool, tmp_path: Path
) -> None:
    inner, count = load(one, 100), len(binidx.IndexedDataset(one).document_indices) - 1
    chosen = set(random.Random(seed).sample(range(count), 2 if not keep else count - 2))
    gone = chosen if not keep else {*range(count)} - chosen
    viewed = load(one, 100, order=binidx.View(listed(tmp_path, *chosen), keep=keep))
    assert rows(viewed) == [row for row in rows(inner) if not documents_in(row) & gone]
    assert len(viewed) <= len(inner)
    check_order(viewed.order, seed=seed)
    assert viewed.order_identity["order"] == inner.order_identity


@pytest.mark.parametrize("over", ["blend", "source"])
def test_a_view_of_a_blend_is_one_of_the_split_or_of_each_source(
    blend: dict[str, float], over: Any, tmp_path: Path
) -> None:
    prefixes, inner = [*blend], load(blend, 90)
    where = listed(tmp_path, f"{prefixes[0]}\t0", f"{prefixes[2]}\t1")
    viewed = load(blend, 90, order=binidx.View(where, over=over))
    check_order(viewed.order)
    gone = {(0, 0), (2, 1)}
    for sample, row in zip(viewed, rows(viewed), strict=True):
        assert not {(int(sample["dataset_id"]), document) for document in documents_in(row)} & gone
    ids = [int(sample["dataset_id"]) for sample in inner]
    left = [
        (number, row)
        for number, row in zip(ids, rows(inner), strict=True)
        if not {(number, document) for document in documents_in(row)} & gone
    ]
    if over == "blend":
        assert [(int(each["dataset_id"]), row) for each, row in zip(viewed, rows(viewed), strict=True)] == left
    else:
        assert len(viewed) == len(inner)
        assert [int(each["dataset_id"]) for each in viewed] == ids


def test_rebuild_is_the_order_of_data_without_the_documents(one: str, tmp_path: Path) -> None:
    dataset = binidx.IndexedDataset(one)
    viewed = load(one, 100, order={"kind": "view", "documents": listed(tmp_path, 0, 2), "how": "rebuild"})
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/rest.bin", np.int32) as builder:
        bounds = dataset.document_indices
        for document in range(len(bounds) - 1):
            if document not in (0, 2):
                sequences = dataset[int(bounds[document]) : int(bounds[document + 1])]
                builder.add_document(np.concatenate([[], *sequences]), [*map(len, sequences)])
        builder.finalize(f"{tmp_path}/rest.idx")
    assert rows(viewed) == rows(load(f"{tmp_path}/rest", 100))
    assert viewed.order_identity != load(one, 100).order_identity
    assert viewed.unique_description_hash != load(one, 100).unique_description_hash
    check_order(viewed.order)


def test_an_empty_list_is_the_inner_order(one: str, blend: dict[str, float], tmp_path: Path) -> None:
    for prefixes in (one, blend):
        for how in ("skip", "rebuild"):
            viewed = load(prefixes, 60, order=binidx.View(listed(tmp_path), how=how))  # type: ignore[arg-type]
            assert viewed.order_identity == load(prefixes, 60).order_identity
            assert viewed.unique_description_hash == load(prefixes, 60).unique_description_hash
            assert rows(viewed) == rows(load(prefixes, 60))


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["99999"], {}, r"list.txt: .*: document 99999, it has \d+, counted from 0"),
        (["seven"], {}, "line 1: found 'seven', needs .PREFIX TAB. NUMBER"),
        (["s3://other/x\t3"], {}, "found s3://other/x, needs the prefix of one of 1 sources"),
        (["0"], {"digest": "0" * 32}, "another list"),
    ],
)
def test_a_list_that_names_nothing_is_an_error(
    one: str, lines: list[str], options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(one, 50, order=binidx.View(listed(tmp_path, *lines), **options))


def test_too_few_samples_are_an_error_with_both_numbers(one: str, tmp_path: Path) -> None:
    count = len(load(one, 50))
    with pytest.raises(BlendError, match=rf"too few samples are left \(found \d+ of {count}, need {count}\)"):
        load(one, 50, order=binidx.View(listed(tmp_path, 0), num_samples=count))
    with pytest.raises(BlendError, match=rf"found 0 of {count}, need 1"):
        load(one, 50, order=binidx.View(listed(tmp_path), keep=True))


def test_a_run_with_a_view_is_saved_traced_and_counted(blend: dict[str, float], tmp_path: Path) -> None:
    prefixes = [*blend]
    where = listed(tmp_path, f"{prefixes[0]}\t0")
    viewed = binidx.load_dataset(blend, S, num_samples=90, order=binidx.View(where))
    run = binidx.Run(viewed.config, viewed.sizes, 2)
    run.save(f"{tmp_path}/run.json")
    again = binidx.Run.load(f"{tmp_path}/run.json")
    assert again.config.order.digest is not None
    order, plain = RunOrder.open(again), RunOrder.of_dataset(load(blend, 90), GlobalOrder(BatchSchedule(2, 2, 1), 90))
    assert order.fingerprint != plain.fingerprint
    steps = range(order.num_steps() or 0)
    table = order.table(steps, tokens=True).to_pylist()
    assert [row["input_ids"] for row in table] == rows(viewed)[: len(table)]
    assert not [row for row in table if row["source"] == prefixes[0] and 0 in row["docs"]]
    assert not len(order.where(0, [0], len(steps))[0].step)
    assert sum(each.samples_read for each in account(order, len(steps), repeats=True)) == len(table)
    made: dict[str, Any] = {"binidx": binidx}
    exec(viewed.as_code(), made)
    assert rows(made["train"]) == rows(viewed)
    state = viewed.loader(2).state_dict()
    with pytest.raises(ConfigError, match="resume"):
        binidx.load_dataset(blend, S, num_samples=90).loader(2).load_state_dict(state)
    Path(where).write_text(f"{prefixes[0]}\t1\n")
    with pytest.raises(ConfigError, match="another list"):
        binidx.Run.load(f"{tmp_path}/run.json").build()


# Packings


def test_a_piece_goes_into_the_first_bin_with_room() -> None:
    choose = random.Random(0)
    for _ in range(200):
        capacity = choose.randrange(1, 60)
        lengths = [choose.randrange(1, capacity + 1) for _ in range(choose.randrange(0, 400))]
        room: list[int] = []
        bins: list[list[int]] = []
        for piece, length in enumerate(lengths):
            bin_number = next((number for number, left in enumerate(room) if left >= length), len(room))
            if bin_number == len(room):
                room.append(capacity)
                bins.append([])
            room[bin_number] -= length
            bins[bin_number].append(piece)
        bounds, pieces = first_fit(np.array(lengths, np.int32), capacity)
        assert [part.tolist() for part in np.split(pieces, bounds[1:-1])] == (bins or [[]])
    with pytest.raises(IndexBuildError, match="a bin needs 1 to 8"):
        first_fit(np.array([9], np.int32), 8)


@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
def test_packed_samples_hold_whole_documents_and_no_label_of_another(one: str, kind: str, tmp_path: Path) -> None:
    dataset = load(one, order=kind, inter_document_masking=True, path_to_cache=str(tmp_path), cache_small_indices=True)
    check_order(dataset.order)
    stored = binidx.IndexedDataset(one)
    whole = {tuple(sequence.tolist()) for sequence in stored[:] if 0 < len(sequence) <= S + 1}
    served = {tuple(part) for row, number in zip(rows(dataset), range(len(dataset)), strict=True)
              for part in split(row, dataset.spans(number))}  # fmt: skip
    assert whole <= served
    for number, sample in enumerate(dataset):
        counts = [count for _, _, count in dataset.spans(number)]
        ends = np.cumsum(counts)[:-1] - 1
        assert (sample["loss_mask"][ends[ends < S]] == 0).all()
        assert int(sample["loss_mask"].sum()) == sum(counts) - len(counts)
        starts = [0, *(ends + 1).tolist()]
        assert sample["cu_seqlens"][: len(starts)].tolist() == [min(start, S) for start in starts]
    again = load(one, order=kind, inter_document_masking=True, path_to_cache=str(tmp_path), cache_small_indices=True)
    assert rows(again) == rows(dataset)
    assert [*tmp_path.glob("*-pieces.npy")]


def split(row: list[int], spans: list[tuple[int, int, int]]) -> list[list[int]]:
    bounds = np.cumsum([0, *(count for _, _, count in spans)])
    return [row[first:stop] for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def test_packings_and_megatrons_order_keep_their_caches_apart(one: str, tmp_path: Path) -> None:
    options = {"path_to_cache": str(tmp_path), "cache_small_indices": True}
    built = {kind: rows(load(one, order=kind, **options)) for kind in (None, "first_fit", "best_fit")}
    for kind, found in built.items():
        assert rows(load(one, order=kind, **options)) == found == rows(load(one, order=kind))


def test_unknown_orders_and_fields_are_errors() -> None:
    wrong: dict[str, dict[str, Any]] = {
        r"order: found kind 'third_fit', needs one of best_fit, first_fit, view.*, or an installed package with it "
        r"\(entry point group binidx.orders\)": {"kind": "third_fit"},
        "^order: view: field 'documents' is missing$": {"kind": "view"},
        r"^order: first_fit: no field 'size' \(has none\)$": {"kind": "first_fit", "size": 1},
    }
    for message, order in wrong.items():
        with pytest.raises(ConfigError, match=message):
            binidx.GPTDatasetConfig(
                1, 4, blend=(["a"], None), split="1,0,0", tokenizer=binidx.SpecialTokens(), order=order
            )
    with pytest.raises(ConfigError, match="order 'bare': BareOption is no dataclass; write @dataclass"):
        binidx.register_order("bare", type("BareOption", (binidx.OrderOption,), {}))
    with pytest.raises(ConfigError, match="built in, cannot be replaced"):
        binidx.register_order("view", binidx.View)


def test_an_order_over_a_blend_must_say_which_source_each_sample_is_of(blend: dict[str, float]) -> None:
    class Blind:
        """Has the members of `Order` alone."""

        def __init__(self, inner: Any) -> None:
            for name in ("identity", "sources", "num_epochs", "locate", "spans", "find", "epochs"):
                setattr(self, name, getattr(inner, name))
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner)

    @dataclass(frozen=True)
    class BlindRequest(OverRequest):
        def serve(self, order: Any) -> Any:
            return Blind(order)

    @dataclass(frozen=True)
    class Option(binidx.OrderOption):
        def request(self, inner: Any) -> Any:
            return BlindRequest(inner)

    with pytest.raises(ConfigError, match="order: Blind of 3 sources is no ComposedOrder"):
        load(blend, 90, order=Option())
    with pytest.raises(AssertionError, match="an order of several sources is a ComposedOrder"):
        check_order(Blind(load(blend, 90).order))


def test_a_node_is_checked_for_a_run_with_an_order(one: str, tmp_path: Path) -> None:
    viewed = load(one, 100, order=binidx.View(listed(tmp_path, 0)))
    run = binidx.Run(viewed.config, [100, 0, 0], 4, 1)
    plain = replace(run, config=replace(run.config, order=None))
    ordered, needed = ([check.what for check in check_node(each)] for each in (run, plain))
    assert ordered == needed
