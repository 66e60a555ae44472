"""Accounts against a count of what was served."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pickling_executor import PicklingExecutor
from helpers.traceable_runs import random_config, random_run, write_source

import binidx
from binidx import RunOrder
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.dataset.staged import LengthStagedDataset
from binidx.errors import ConfigError
from binidx.explore.explored import Explored
from binidx.explore.views import show_run
from binidx.jobs.parts import Shard, Workers
from binidx.order.blended_order import list_members
from binidx.order.order_options import OrderOption
from binidx.order.requests import Request
from binidx.order.staged.window_order import LengthStage
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.accounts import _times_seen, account
from binidx.run.provenance.data_card import build_card
from binidx.run.run_file import Run
from binidx.run.schedule import BatchSchedule


@pytest.mark.parametrize(
    ("kind", "seed"), [*((GPTDataset, seed) for seed in range(25)), *((BestFitGPTDataset, seed) for seed in range(10))]
)
def test_accounts_add_up_to_what_was_served(
    kind: type[GPTDataset], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("binidx.run.provenance.accounts.STRETCH_POSITIONS", 5)
    monkeypatch.setattr("binidx.run.run_order.STRETCH_POSITIONS", 5)
    dataset = random_run(tmp_path, seed, kind)
    order = RunOrder.of_dataset(
        dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset), ["single", "cyclic"][seed % 2])
    )
    stop_step = order.num_steps() or len(dataset)
    readings, contents = order.trace(range(stop_step))
    if order.num_steps() is not None:
        with pytest.raises(IndexError, match=f"stop_step: found 0:{stop_step + 1}, the run has {stop_step} steps"):
            account(order, stop_step + 1)
    for number, found in enumerate(account(order, stop_step, repeats=True)):
        source = order.sources[number]
        assert found.samples_read == int((contents.source == number).sum())
        served = [dataset.read_tokens([int(sample)])[0] for sample in readings.sample[contents.source == number]]
        assert found.tokens_read == sum(int((tokens[: dataset.config.sequence_length] >= 0).sum()) for tokens in served)
        assert found.samples_in_run <= found.samples_built == len(list_members(order.order)[number])
        assert found.tokens == int(source.dataset.sequence_lengths[np.asarray(source.sequences)].sum())
        assert found.epochs_read == pytest.approx(found.tokens_read / found.tokens)
        fed = Counter(
            token // 1000
            for place in np.flatnonzero(contents.source == number).tolist()
            for token in dataset.read_tokens([int(readings.sample[place])])[0, :-1].tolist()
            if token >= 0 and token % 1000 == 0
        )
        bounds = source.dataset.document_indices
        split = {int(np.searchsorted(bounds, each, side="right")) - 1 for each in source.sequences}
        needed = Counter(fed[document] for document in split)
        assert found.seen == tuple(needed[count] for count in range(max(needed) + 1))


def test_documents_that_an_index_repeats_count_once(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Often(OrderOption):
        def request(self, inner: Request) -> Request:
            return inner.map_sources(lambda source: source.with_documents(self))

        def index_fields(self, options: Any) -> dict[str, Any]:
            return {"times": 300}

        def choose_sequences(self, source: Any, options: Any) -> Any:
            return np.repeat(np.asarray(source.sequences, np.int32), 300)

    plain = random_run(tmp_path, 1)
    config = replace(plain.config, blend=([plain.config.blend[0][0]], None), blend_per_split=None, split="1,0,0")
    run = Run(replace(config, order=Often()), [None, 0, 0], 1, 1)
    [train, *_] = run.build()
    order = RunOrder.of(run)
    [found] = account(order, len(train), repeats=True)  # type: ignore[arg-type]
    lengths = order.sources[0].dataset.sequence_lengths
    assert (found.documents, found.tokens) == (len(lengths), lengths.sum())
    assert 299 <= found.epochs_read <= 300
    assert len(found.seen) > 256


def test_without_repeats_no_document_is_looked_at(tmp_path: Path) -> None:
    dataset = random_run(tmp_path, 1)
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(1, 1, 1), len(dataset)))
    assert all(each.seen == () for each in account(order, 1))


def test_samples_of_each_length_count_their_own_tokens_and_starts(tmp_path: Path) -> None:
    stages = [LengthStage(4, 16), LengthStage(16, 3), LengthStage(8, 6)]
    dataset = LengthStagedDataset(random_run(tmp_path, 44), stages)
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(1, 1, 1), len(dataset)))
    served = [np.asarray(dataset[sample]["tokens"]).tolist() for sample in range(25)]
    found = account(order, 25, repeats=True)
    assert [each.tokens_read for each in found] == [sum(map(len, served[:16])), sum(map(len, served[16:19])),
                                                    sum(map(len, served[19:]))]  # fmt: skip
    begun = sum(token % 1000 == 0 for tokens in served for token in tokens)
    assert sum(times * count for each in found for times, count in enumerate(each.seen)) == begun


@pytest.mark.parametrize("part_positions", [1, 7, 1000])
def test_workers_count_the_repeats_of_one_process(part_positions: int, tmp_path: Path) -> None:
    choose = random.Random(part_positions)
    prefixes = [write_source(tmp_path / f"s{number}", choose, bool(number)) for number in range(2)]
    config, _ = random_config(choose, 3, prefixes, [0.3, 0.7], f"{tmp_path}/cache")
    binidx.Run(config, [120, 0, 0], 1, 2, global_batch_size=4).save(f"{tmp_path}/run.json")
    order = RunOrder.of(binidx.Run.load(f"{tmp_path}/run.json"))
    expected = _times_seen(order, 3, 118, None)
    assert sum(map(np.sum, expected)) > 0
    with PicklingExecutor(2) as executor:
        workers = Workers(executor=executor)
        found = _times_seen(order, 3, 118, workers, part_positions)
        assert account(order, 20, repeats=True, workers=workers) == account(order, 20, repeats=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match="shard: a count needs"):
        account(order, 20, repeats=True, workers=Workers(shard=Shard(0, 2)))


def test_a_prefix_that_a_blend_names_twice_is_one_source_of_a_card_and_of_a_page(tmp_path: Path) -> None:
    prefix, other = (write_source(tmp_path / name, random.Random(seed), False) for seed, name in enumerate("ab"))
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([prefix, other, prefix], [0.5, 0.3, 0.2]), split="1,0,0",
        tokenizer=binidx.SpecialTokens(),
    )  # fmt: skip
    Run(config, [60, 0, 0], 1).save(f"{tmp_path}/run.json")
    history = binidx.RunHistory.of(Run.load(f"{tmp_path}/run.json"))
    _, contents = history.last.trace(range(60))
    starts = Counter(contents.document[(contents.inputs > 0) & (contents.start == 0) & (contents.piece_source != 1)])
    first, second = build_card(history, 60, repeats=True)["sources"]
    index = binidx.IndexedDataset(prefix).index
    assert (first["source"], second["source"], first["tokens"]) == (prefix, other, index.num_tokens)
    assert first["tokens_read"] + second["tokens_read"] == 60 * 16
    assert first["seen"][1:] == [[*starts.values()].count(times) for times in range(1, len(first["seen"]))]
    shares = [row["share"] for row in show_run(Explored.open(f"{tmp_path}/run.json"), {})["rows"]]
    assert shares == pytest.approx([first["samples_read"] / 60, second["samples_read"] / 60])
