"""Histories of random resumes, forks, phases, schedules and topologies against loaders that are run step by step."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER
from helpers.spike_model import limits_of, mixture_losses, neighbours
from helpers.traceable_runs import write_source

import binidx
from binidx import RunOrder
from binidx.loader.samplers import build_sampler
from binidx.run.display.timeline import build_timeline
from binidx.run.history import RunHistory
from binidx.run.provenance.accounts import account
from binidx.run.provenance.exposures import count_exposures
from binidx.run.provenance.spikes import RunLosses, find_spikes


@dataclass(frozen=True)
class Served:
    """A sample that a loader served: its step, rank and slot, source, and the documents of its tokens."""

    step: int
    rank: int
    slot: int
    sample: int
    source: str
    documents: frozenset[int]
    trained: bool
    inputs: tuple[int, ...] = field(default=(), compare=False)


def serve(run: binidx.Run, consumed: int, stop: int | None) -> tuple[list[Served], int]:
    """Train a run as Megatron does, up to a step; return what it served, and its counter of consumed samples."""
    served: list[Served] = []
    global_size = run.global_batch_size or run.micro_batch_size * run.data_parallel_size
    transitions, block = run.phase_transition_iterations, run.micro_batch_size * run.data_parallel_size
    step, total = run.first_step, consumed
    while stop is None or step < stop:
        # A process begins, and its datasets.
        position, sizes, ends = total - run.earlier_samples, run.sizes, [stop]
        if transitions:
            marks = sorted({0, *(each * global_size for each in transitions), run.sizes[0] or 0})
            if step * global_size >= marks[-1]:
                break
            last = max(each for each in (0, *transitions) if each <= step)
            position = (step - last) * global_size
            low = max(mark for mark in marks if mark <= step * global_size)
            sizes = [min(mark for mark in marks if mark > low) - low, 0, 0]
            ends += [min((each for each in transitions if each > step), default=None)]
        end = min((each for each in ends if each is not None), default=None)
        dataset: Any = replace(run, sizes=sizes, phase_transition_iterations=(), previous=None).build()[0]
        topology = [(run.micro_batch_size, rank, run.data_parallel_size) for rank in range(run.data_parallel_size)]
        loaders = []
        for each in topology:
            full = position >= len(dataset) and run.dataloader_type == "single"
            loaders.append(iter(()) if full else batches(run, dataset, position, each))
        while end is None or step < end:
            size = global_size - (global_size % block if run.decrease_batch_size_if_needed else 0)
            schedule: Any = run.step_batch_size_schedule or ()
            for threshold, batch in schedule:
                size = batch if total >= threshold else size
            drawn = [[next(loader, None) for _ in range(size // block)] for loader in loaders]
            if any(batch is None for batches in drawn for batch in batches) or len(served) > 4000:
                return served, total
            for rank, own in enumerate(drawn):
                for slot, sample in enumerate(sample for batch in own for sample in batch or ()):
                    tokens = dataset.read_tokens([sample])[0].tolist()
                    source = dataset.order.sources[int(dataset.order.locate(np.array([sample]))[0][0])].name
                    documents = frozenset(token // 1000 for token in tokens if token >= 0)
                    trained = step + 1 not in run.iterations_to_skip
                    inputs = tuple(token for token in tokens[:16] if token >= 0)
                    served.append(Served(step, rank, slot, sample, source, documents, trained, inputs))
            step, total = step + 1, total + size
    return served, total


def batches(run: binidx.Run, dataset: Any, position: int, topology: tuple[int, int, int]) -> Any:
    while True:
        sampler = build_sampler(run.dataloader_type, dataset, position, *topology, run.data_sharding)
        yield from sampler
        if run.dataloader_type == "single":
            return
        position = sampler.consumed_samples


def random_run(choose: random.Random, prefixes: list[str], first_step: int, total: int, **fields: Any) -> binidx.Run:
    """A run from a step on, of a random blend, topology and schedule."""
    micro, ranks = choose.randrange(1, 3), choose.choice([1, 2, 3])
    block, blend = micro * ranks, choose.sample(prefixes, choose.randrange(1, len(prefixes) + 1))
    config = binidx.GPTDatasetConfig(
        choose.randrange(3), 16, (blend, [choose.random() + 0.1 for _ in blend]), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    options: dict[str, Any] = {"global_batch_size": block * choose.randrange(1, 4), "first_step": first_step}
    kind = choose.choice(["constant", "decrease", "steps", "phases"])
    if kind == "decrease":
        options |= {"global_batch_size": block * 2 + choose.randrange(block), "decrease_batch_size_if_needed": True}
    if kind == "steps":
        firsts = [0, *sorted(choose.sample(range(1, total + 120), 2))]
        schedule = [(first, block * choose.randrange(1, 5)) for first in firsts]
        options |= {"global_batch_size": None, "step_batch_size_schedule": schedule}
    size = options["global_batch_size"] or block
    train = choose.randrange(40, 200)
    if kind == "phases":
        options["phase_transition_iterations"] = [first_step + 2, first_step + 5]
        options["earlier_samples"], train = total, (first_step + choose.randrange(6, 12)) * size
    else:
        # Without phases a run may continue with its dataset, or begin another one.
        options["consumed_samples"] = 0 if choose.random() < 0.5 else block * choose.randrange(4)
        options["earlier_samples"] = total - options["consumed_samples"]
        options["dataloader_type"] = choose.choice(["single", "single", "cyclic"])
        options["data_sharding"] = choose.random() < 0.5
    options["iterations_to_skip"] = choose.sample(range(1, first_step + 12), min(3, first_step + 5))
    return binidx.Run(config, [train, 0, 0], micro, ranks, **{**options, **fields})


def random_history(directory: Path, seed: int) -> tuple[binidx.Run, list[Served]]:
    """A saved chain of runs, and what they served up to the end."""
    choose = random.Random(seed)
    prefixes = [write_source(directory / f"s{number}", choose, choose.random() < 0.5) for number in range(3)]
    kept, step, total = list[Served](), 0, 0
    count = choose.randrange(1, 5)
    for number in range(count):
        previous = f"{directory}/run{number - 1}.json" if number else None
        run = random_run(choose, prefixes, step, total, previous=previous)
        run.save(f"{directory}/run{number}.json")
        whole, _ = serve(run, total, None if number + 1 < count else step + 12)
        steps = sorted({each.step for each in whole})
        if not steps or number + 1 == count:
            return binidx.Run.load(f"{directory}/run{number}.json"), kept + whole
        # The next run begins after some step, which this one need not have ended with.
        fork = choose.randrange(step, min(steps[-1] + 1, step + 12) + 1)
        fork = max(fork, step + (number == 0))
        own, total = serve(run, total, fork)
        kept, step = kept + own, fork
    raise AssertionError


def check_history(directory: Path, seed: int) -> None:
    run, needed = random_history(directory, seed)
    history = RunHistory.of(run, whole=seed % 2 == 0)
    stop = max((each.step for each in needed), default=run.first_step - 1) + 1
    if (end := history.num_steps()) is not None:
        assert end >= stop
    found, reads = list[Served](), defaultdict[str, list[Any]](list)
    for order, steps in history.orders(range(history.first_step, stop)):
        readings, contents = order.trace(steps)
        trained, spans = order.reading.schedule.trains(readings.step), contents
        for row, (step, rank, slot, _, sample) in enumerate(
            zip(*(column.tolist() for column in readings), strict=True)
        ):
            documents = spans.document[spans.bounds[row] : spans.bounds[row + 1]]
            documents = documents[spans.length[spans.bounds[row] : spans.bounds[row + 1]] > 0]
            source = order.prefixes[contents.source[row]]
            found.append(Served(step, rank, slot, sample, source, frozenset(documents.tolist()), bool(trained[row])))
        for source in range(len(order.sources)):
            own, _ = order.where(source, [3], steps.stop, earlier=False)
            reads[order.prefixes[source]] += zip(own.step.tolist(), own.rank.tolist(), own.slot.tolist(), strict=True)
    assert found == sorted(needed, key=lambda each: (each.step, each.rank, each.slot))
    for source, places in reads.items():
        here = [each for each in needed if each.source == source and 3 in each.documents]
        assert sorted(places) == sorted((each.step, each.rank, each.slot) for each in here)
    check_exposures(history, needed, stop, seed)
    check_spikes(directory, history, needed, stop, seed)
    counted = Counter(each.source for each in needed)
    trained_of = Counter(each.source for each in needed if each.trained)
    before = history.runs[0].consumed_samples
    for each in account(history, stop):
        if not before:
            assert (each.samples_read, each.samples_trained) == (counted[each.source], trained_of[each.source])
    check_timeline(history, range(history.first_step + seed % 3, stop), needed)


def check_timeline(history: RunHistory, steps: range, needed: list[Served]) -> None:
    if not steps:
        return
    timeline, samples = build_timeline(history, steps, 4), defaultdict[tuple[str, int], int](int)
    for each in needed:
        samples[each.source, int(np.searchsorted(timeline.bounds, each.step, "right")) - 1] += 1
    for number, name in enumerate(timeline.names):
        assert timeline.counts[:, number].tolist() == [samples[name, place] for place in range(len(timeline.counts))]
    accounts = {each.source: each.epochs_read for each in account(history, steps.stop)}
    assert dict(zip(timeline.names, timeline.epochs[-1].tolist(), strict=True)) == accounts
    for seam in timeline.seams:
        read = [
            {each.source: each.epochs_read for each in account(history, step)}.get(timeline.names[seam.source], 0)
            for step in (seam.step, seam.step + 1)
        ]
        assert read[0] < seam.epoch + 1e-9
        assert read[1] > seam.epoch - 1e-9
    firsts = [order.first_step for order, _ in history.orders(range(history.first_step, steps.stop))]
    assert [start.step for start in timeline.starts] == [step for step in firsts[1:] if step > steps.start]


def check_exposures(history: RunHistory, needed: list[Served], stop: int, seed: int) -> None:
    """Compare exposures of all documents before a step with the tokens that were served."""
    before = random.Random(seed).randrange(history.first_step, stop + 1)
    numbers = {name: range(len(source.dataset.document_indices) - 1) for name, source in history.sources.items()}
    counts, steps = Counter[tuple[str, int, str]](), defaultdict[tuple[str, int], list[int]](list)
    for each in needed:
        for document in {token // 1000 for token in each.inputs} if each.step < before else ():
            key = each.source, document
            steps[key].append(each.step)
            counts[*key, "trained"] += each.trained
            counts[*key, "times"] += each.inputs.count(document * 1000)
            counts[*key, "tokens"] += sum(token // 1000 == document for token in each.inputs)
    found = count_exposures(history, numbers, before, earlier=False)
    for name, own in found.items():
        for place, document in enumerate(numbers[name]):
            key, seen = (name, document), steps[name, document]
            row = own.samples[place], own.samples_trained[place], own.first_step[place], own.last_step[place]
            assert row == (len(seen), counts[*key, "trained"], min(seen, default=-1), max(seen, default=-1))
            assert (own.times_started[place], own.tokens[place]) == (counts[*key, "times"], counts[*key, "tokens"])


def check_spikes(directory: Path, history: RunHistory, needed: list[Served], stop: int, seed: int) -> None:
    """Compare spikes of losses that each run recorded, also in steps that were given up, with those of the formula."""
    rng, files = np.random.default_rng(seed), [name or f"{directory}/last" for name in history.files]
    if len({*files}) < len(files):  # phases, of which each begins with position 0
        return
    recorded, loss_of = dict[int, Any](), dict[tuple[int, int, int], float]()
    for number, run in enumerate(history.runs):
        order = RunOrder.of(replace(run, stop_step=None))
        last = stop if number + 1 == len(files) else (order.num_steps() or stop)
        reads = order.reading.readings(range(run.first_step, max(run.first_step, min(last, stop + 5))))
        losses = (3 + 0.1 * rng.standard_normal(len(reads.step)) + 4 * (rng.random(len(reads.step)) < 0.02)).astype(
            "f4"
        )
        rows = np.argsort(reads.position)
        recorded[number] = reads.position[rows], losses[rows]
        ends = [later.first_step for later in history.runs[number + 1 : number + 2]] or [stop]
        for step, rank, slot, loss in zip(reads.step, reads.rank, reads.slot, losses, strict=True):
            if step < ends[0]:
                loss_of[int(step), int(rank), int(slot)] = float(loss)
    ends = [*(run.first_step for run in history.runs[1:]), None]
    runs = [RunLosses.of(history.order_of(history.runs[n]), *recorded[n], ends[n]) for n in range(len(files))]
    served = defaultdict[int, list[Served]](list)
    for each in needed:
        served[each.step].append(each)
    hashes = [history.order_of(history.runs[number]).description_hash for number in range(len(files))]
    seams = [
        run.first_step for number, run in enumerate(history.runs) if number and hashes[number] != hashes[number - 1]
    ]
    found, expected = [*find_spikes(runs, window=12, threshold=3)], list[tuple[int, int]]()
    for first, end in pairwise([0, *seams, stop + 1]):
        steps = [step for step in served if first <= step < end]
        own = [each for step in steps for each in served[step]]
        names = sorted({each.source for each in own})
        sources = np.array([names.index(each.source) for each in own], np.int64)
        losses = np.array([loss_of[each.step, each.rank, each.slot] for each in own])
        rows = {step: np.flatnonzero([each.step == step for each in own]) for step in steps}
        means = {step: float(losses[rows[step]].mean()) for step in steps}
        limits = limits_of(means, mixture_losses(rows, sources, losses), 12, 3) if steps else {}
        expected += neighbours(steps, [*limits])
        for spike in (spike for spike in found if spike.step in limits):
            assert spike.loss == pytest.approx(
                max(means[step] for step in steps if spike.step <= step <= spike.last_step)
            )
            window = steps[: steps.index(spike.step)][-12:]
            for step, rank, slot, loss, excess in zip(
                *(spike.reads.step, spike.reads.rank, spike.reads.slot, spike.losses, spike.excess), strict=True
            ):
                place = int(step), int(rank), int(slot)
                source = next(each.source for each in served[place[0]] if (each.rank, each.slot) == place[1:])
                before = [losses[row] for each in window for row in rows[each] if own[row].source == source]
                assert loss == loss_of[place]
                assert not before or excess == pytest.approx(loss - np.mean(before), abs=1e-5)
    assert [(spike.step, spike.last_step) for spike in found] == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_history_is_what_its_loaders_served(seed: int, tmp_path: Path) -> None:
    check_history(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 320))
def test_many_histories_are_what_their_loaders_served(seed: int, tmp_path: Path) -> None:
    check_history(tmp_path, seed)
