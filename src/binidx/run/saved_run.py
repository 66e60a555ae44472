"""File of the run that reads a dataset, or that a loader reads: the sizes and the steps that led to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from binidx.dataset.config import Split
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.served import list_parts
from binidx.errors import ConfigError, trims_traceback
from binidx.loader.dataset_protocols import DatasetView
from binidx.loader.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from binidx.order.requests import find_blend
from binidx.run.run_file import Run


@runtime_checkable
class Loader(Protocol):
    """A DataLoader with one of our samplers."""

    dataset: Any
    batch_sampler: Any


@trims_traceback
def save_run(source: Any, uri: str, *, storage_options: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Write the file of the run that reads a dataset, or that a loader reads.

    Args:
        source: a GPT dataset or a blend of them, from `load_dataset` or a builder, or a loader of one.
        uri: path or URI of the file.
        storage_options: options of its store.
        options: further arguments of `Run`, such as `global_batch_size`; of a dataset also `micro_batch_size` (1) and
            `data_parallel_size`, which a loader has.

    Raises:
        ConfigError: another kind of dataset, another split than train, or one that its config does not describe.

    Example:
        >>> binidx.save_run(loader, "run.json", global_batch_size=1024)  # doctest: +SKIP
    """
    if isinstance(source, Run | str | os.PathLike):
        way = "its save(uri) writes it" if isinstance(source, Run) else "give binidx.load_dataset(PREFIX, LENGTH) of it"
        raise ConfigError(f"source: found a {type(source).__name__}, needs a dataset or a loader; {way}")
    if isinstance(source, Loader):
        sampler, names = source.batch_sampler, ("micro_batch_size", "data_parallel_size", "consumed_samples")
        if not isinstance(sampler, MegatronPretrainingSampler | MegatronPretrainingRandomSampler):
            raise ConfigError(f"loader: found a {type(sampler).__name__}, a run needs a sampler of binidx")
        options = {name: getattr(sampler, name) for name in names} | options
        if isinstance(sampler, MegatronPretrainingRandomSampler):
            options |= {"dataloader_type": "cyclic", "data_sharding": sampler.data_sharding}
        source = source.dataset
    dataset = DatasetView.unwrap(source)
    parts = list_parts(dataset) or [dataset]
    blended = dataset not in parts
    if not all(type(part) is GPTDataset and part.index_split is Split.train for part in parts):
        needed = "a run reads the train split of GPTDataset itself, as its file names no class"
        raise ConfigError(f"dataset: found {dataset!r}, {needed}")
    # The size of a blend is the requested one, rounded up for each member.
    size = dataset.size if blended else dataset.num_samples
    requests = [size] if size is None or not blended else range(size, max(size - len(parts), 1) - 1, -1)
    for request in requests:
        [train] = Run(dataset.config, [request, 0, 0], micro_batch_size=1).requests()[Split.train]
        own: Any = find_blend(train) or train.sources[0]
        if own.description_hash() in (None, dataset.unique_description_hash):
            Run(dataset.config, [request, 0, 0], **{"micro_batch_size": 1, **options}).save(uri, storage_options)
            return
    raise ConfigError("dataset: has other weights, samples or prefixes than its config, from which a run builds it")
