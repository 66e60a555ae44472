"""Exposures against a count over the tokens that were served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.gpt_data import Tokenizer
from helpers.pickling_executor import PicklingExecutor
from helpers.traceable_runs import random_config, random_run, write_source

import binidx
from binidx import RunOrder
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.dataset.staged import LengthStagedDataset
from binidx.errors import ConfigError
from binidx.jobs.parts import Shard, Workers
from binidx.order.staged.window_order import LengthStage
from binidx.run.global_order import GlobalOrder
from binidx.run.history import RunHistory
from binidx.run.provenance.exposures import Exposures, count_exposures, count_groups
from binidx.run.schedule import BatchSchedule


@pytest.mark.parametrize(
    ("kind", "seed"), [*((GPTDataset, seed) for seed in range(25)), *((BestFitGPTDataset, seed) for seed in range(10))]
)
def test_exposures_are_those_of_the_tokens_that_were_served(
    kind: type[GPTDataset], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("binidx.run.provenance.exposures.STRETCH_SAMPLES", 5)
    monkeypatch.setattr("binidx.run.provenance.exposures.PAIRS", [1, 7, 1 << 21][seed % 3])
    monkeypatch.setattr("binidx.order.source_order.STRETCH", 11)
    monkeypatch.setattr("binidx.order.source_order.MANY", seed % 3 * 2)
    dataset, choose = random_run(tmp_path, seed, kind), random.Random(seed)
    order = RunOrder.of_dataset(
        dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset), ["single", "cyclic"][seed % 2])
    )
    stop = choose.randrange((order.num_steps() or len(dataset)) + 1)
    reads, contents = order.trace(range(stop))
    served = [dataset.read_tokens([sample])[0, :-1] for sample in reads.sample.tolist()]
    for number, source in enumerate(order.sources):
        count = len(source.dataset.document_indices) - 1
        documents = choose.sample(range(count), choose.randrange(1, count))
        lengths = [sum(map(len, source.dataset[slice(*source.dataset.document_indices[document : document + 2])]))
                   for document in range(count)]  # fmt: skip
        ranges = [random_range(document, lengths[document], choose) for document in documents * 4 if lengths[document]]
        inputs = [
            (int(step), tokens[tokens >= 0].tolist())
            for step, own, tokens in zip(reads.step, contents.source, served, strict=True)
            if own == number
        ]
        found = count_exposures(order, {source.name: documents}, stop)[source.name]
        assert ({*found.first_token}, {*found.stop_token}) == ({0}, {-1})
        check_reads(found, [(document, 0, lengths[document]) for document in sorted(documents)], inputs)
        found = count_exposures(order, {source.name: np.array(ranges).reshape(-1, 3)}, stop)[source.name]
        assert [*zip(found.document, found.first_token, found.stop_token, strict=True)] == sorted(ranges)
        check_reads(found, sorted(ranges), inputs)
        groups = np.array([(choose.randrange(3), *each) for each in ranges]).reshape(-1, 4)
        together = count_groups(order, {source.name: groups}, 3, stop)
        for group in range(3):
            sets = [{*range(1000 * document + first, 1000 * document + last)}
                    for own, document, first, last in groups.tolist() if own == group]  # fmt: skip
            held = [(any(each <= {*tokens} for each in sets), any(each & {*tokens} for each in sets))
                    for _, tokens in inputs]  # fmt: skip
            expected = sum(whole for whole, _ in held), sum(part and not whole for whole, part in held)
            assert (together["samples_whole"][group], together["samples_part"][group]) == expected


@pytest.mark.parametrize("part_ranges", [1, 7, 1000])
def test_workers_count_the_reads_of_one_process(part_ranges: int, tmp_path: Path) -> None:
    choose = random.Random(part_ranges)
    prefixes = [write_source(tmp_path / f"s{number}", choose, bool(number)) for number in range(2)]
    config, _ = random_config(choose, 3, prefixes, [0.3, 0.7], f"{tmp_path}/cache")
    binidx.Run(config, [120, 0, 0], 1, 2, global_batch_size=4).save(f"{tmp_path}/run0.json")
    later = {"first_step": 12, "consumed_samples": 48, "previous": f"{tmp_path}/run0.json"}
    replace(binidx.Run.load(f"{tmp_path}/run0.json"), global_batch_size=8, **later).save(f"{tmp_path}/run1.json")
    asked = {prefixes[1]: [0, 3, 2], prefixes[0]: np.array([[2, 0, 1], [1, 0, -1], [2, 1, 3]])}
    for history in (
        RunOrder.of(binidx.Run.load(f"{tmp_path}/run0.json")),
        RunHistory.of(binidx.Run.load(f"{tmp_path}/run1.json")),
    ):
        expected = count_exposures(history, asked, 16)
        assert sum(each.samples.sum() for each in expected.values()) > 0
        with PicklingExecutor(2) as executor:
            count = partial(count_exposures, workers=Workers(executor=executor), part_ranges=part_ranges)
            found = count(history, asked, 16)
            with pytest.raises(IndexError, match="document 999999"):
                count(history, {prefixes[0]: [0, 999_999]}, 16)
        assert [*found] == [*expected]
        for name, each in expected.items():
            for column, values in vars(each).items():
                np.testing.assert_array_equal(vars(found[name])[column], values)
        with pytest.raises(ConfigError, match="shard: a count needs the results of all parts; name an engine"):
            count_exposures(history, asked, 16, workers=Workers(shard=Shard(0, 2)))


def random_range(document: int, length: int, choose: random.Random) -> tuple[int, int, int]:
    first = choose.randrange(length)
    return document, first, choose.randrange(first, length) + 1


def check_reads(
    found: Exposures, ranges: Sequence[tuple[int, int, int]], inputs: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Compare exposures with (step, input tokens) of all samples that were served."""
    for place, (document, first, stop) in enumerate(ranges):
        own = {*range(1000 * document + first, 1000 * document + stop)}
        held = [(step, [token for token in tokens if token in own]) for step, tokens in inputs]
        held = [(step, tokens) for step, tokens in held if tokens]
        whole = [step for step, tokens in held if {*tokens} == own]
        part = [step for step, tokens in held if {*tokens} != own]
        counts = {"samples": len(held), "samples_whole": len(whole), "samples_part": len(part)}
        counts |= {"tokens": sum(len(tokens) for _, tokens in held)}
        counts |= {"times_started": sum(tokens.count(1000 * document + first) for _, tokens in held)}
        for name, steps in (("", [*whole, *part]), ("_whole", whole), ("_part", part)):
            counts |= {f"first_step{name}": min(steps, default=-1), f"last_step{name}": max(steps, default=-1)}
        assert {name: getattr(found, name)[place] for name in counts} == counts


def test_samples_before_a_resumed_run_count_without_a_step(tmp_path: Path) -> None:
    dataset = random_run(tmp_path, 1)
    whole = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset)))
    resumed = replace(whole, reading=GlobalOrder(BatchSchedule(2, 1, 2, consumed_samples=4), len(dataset)))
    documents = np.arange(len(dataset.order.sources[0].dataset.document_indices) - 1)
    steps, name = whole.num_steps() or 0, whole.prefixes[0]
    expected = count_exposures(whole, {name: documents}, steps)[name]
    found = count_exposures(resumed, {name: documents}, steps - 2)[name]
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.last_step.tolist() == np.where(expected.last_step < 2, -1, expected.last_step - 2).tolist()
    later = count_exposures(resumed, {name: documents}, steps - 2, earlier=False)[name]
    assert later.tokens.sum() < found.tokens.sum()
    assert found.samples_trained.tolist() == later.samples.tolist()


def test_samples_of_each_length_feed_all_but_their_last_token(tmp_path: Path) -> None:
    windows = random_run(tmp_path, 44)
    length = windows.config.sequence_length
    assert (length, windows.config.add_extra_token_to_sequence) == (16, True)
    dataset = LengthStagedDataset(windows, [LengthStage(4, 16), LengthStage(16, 3), LengthStage(8, 6)])
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(1, 1, 1), len(dataset)))
    served = [np.asarray(dataset[sample]["tokens"]) for sample in range(25)]
    assert {*map(len, served)} == {4, 8, 16}
    found = count_exposures(order, {order.prefixes[0]: range(5)}, 25)[order.prefixes[0]]
    assert found.tokens.tolist() == [sum(int((tokens // 1000 == number).sum()) for tokens in served)
                                     for number in range(5)]  # fmt: skip


def test_documents_of_fill_in_the_middle_are_refused_by_name(tmp_path: Path) -> None:
    prefix = write_source(tmp_path / "en", random.Random(0), False)
    tokens = {name: f"<{name}>" for name in ("prefix", "middle", "suffix", "pad", "eod")}
    config = binidx.megatron.GPTFIMDatasetConfig(
        random_seed=1, sequence_length=8, blend=([prefix], None), split="1,0,0", tokenizer=Tokenizer(), fim_rate=0.5,
        fim_spm_rate=0.5, fim_extra_tokens=tokens, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )  # fmt: skip
    dataset = binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.GPTFIMDataset, [10, 0, 0], lambda: True, config
    ).build()[0]
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(1, 1, 1), len(dataset)))
    assert len(order.where(0, range(5), 10)[0].step)
    with pytest.raises(ConfigError, match="fim_rate: the order does not say which tokens are inputs"):
        count_exposures(order, {prefix: [0]}, 10)
