"""Runs that resume from copies of their data, and what their loaders served: a token names its corpus and document."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gpt_data import Tokenizer

import binidx
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.run.history import RunHistory

CORPUS, DOCUMENT = 1_000_000, 1000
"""Token = number of the corpus from 1 on * CORPUS + document * DOCUMENT + place from 1 on."""

LENGTH, BATCH = 16, 4


def write_corpus(
    prefix: Path, number: int, *, seed: int | None = None, dtype: Any = np.int32, end: str = ".bin", **options: Any
) -> str:
    """Write a corpus; two of one seed, by default the number, have the same lengths."""
    rng = np.random.default_rng(number if seed is None else seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(f"{prefix}{end}", dtype, **options) as builder:
        for document in range(30):
            length = int(rng.integers(1, 40))
            builder.add_document(number * CORPUS + document * DOCUMENT + np.arange(1, length + 1), [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def copy_corpus(prefix: str, folder: Path) -> str:
    """Copy a corpus, with all files beside it."""
    folder.mkdir(exist_ok=True)
    for file in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(file, folder)
    return f"{folder}/{Path(prefix).name}"


def run_over(blend: Any, first_step: int = 0, num_samples: int = 120, **options: Any) -> binidx.Run:
    """A run over a blend on one rank, four samples a step, which by default continues with its samples."""
    order = options.pop("order", None)
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=LENGTH, blend=blend, split="1,0,0", tokenizer=Tokenizer(pad=1), order=order,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    options = {"first_step": first_step, "consumed_samples": first_step * BATCH, **options}
    return binidx.Run(config, [0 if options.get("stages") else num_samples, 0, 0], BATCH, **options)


@dataclass(frozen=True)
class Served:
    """A sample that a loader served: its step, the corpus and documents of its input tokens, and whether it trained."""

    step: int
    trained: bool
    tokens: tuple[int, ...]

    @property
    def corpus(self) -> int:
        return self.tokens[0] // CORPUS

    def tokens_of(self, corpus: int, document: int) -> list[int]:
        """Places of the tokens of a document that are inputs."""
        return [
            token % DOCUMENT for token in self.tokens if token // DOCUMENT == corpus * CORPUS // DOCUMENT + document
        ]


def save_history(folder: Path, *runs: binidx.Run, stop: int) -> tuple[str, list[Served]]:
    """Save runs that follow one another; return the file of the last, and what their loaders served before a step."""
    served, ends = list[Served](), [*(run.first_step for run in runs[1:]), stop]
    for number, (run, end) in enumerate(zip(runs, ends, strict=True)):
        previous = f"{folder}/run{number - 1}.json" if number else None
        replace(run, previous=previous).save(f"{folder}/run{number}.json")
        loader: Any = binidx.build_pretraining_data_loader(run.build()[0], run.consumed_samples, BATCH)
        for step, batch in zip(range(run.first_step, end), loader, strict=False):
            trained = step + 1 not in run.iterations_to_skip
            rows = ([token for token in row if token] for row in batch["tokens"].tolist())
            served += [Served(step, trained, tuple(row)) for row in rows]
    return f"{folder}/run{len(runs) - 1}.json", served


def open_history(file: str, **options: Any) -> RunHistory:
    """Open the history of a run's file."""
    return RunHistory.of(binidx.Run.load(file), **options)


def count_served(served: list[Served], corpus: int, document: int) -> tuple[int, ...]:
    """Times, samples, samples trained, tokens, first and last step of a document, as `Exposures` has them."""
    reads = [(each, places) for each in served if (places := each.tokens_of(corpus, document))]
    steps = [each.step for each, _ in reads] or [-1]
    times, tokens = sum(places.count(1) for _, places in reads), sum(len(places) for _, places in reads)
    return times, len(reads), sum(each.trained for each, _ in reads), tokens, min(steps), max(steps)


def account_served(served: list[Served]) -> dict[int, tuple[int, int, int, int]]:
    """Samples, tokens, samples trained and tokens trained of each corpus."""
    counts = [Counter[int]() for _ in range(4)]
    for each in served:
        for counter, count in zip(counts, (1, len(each.tokens)) * 2, strict=True):
            counter[each.corpus] += count if each.trained or counter in counts[:2] else 0
    return {
        corpus: (counts[0][corpus], counts[1][corpus], counts[2][corpus], counts[3][corpus]) for corpus in counts[0]
    }
