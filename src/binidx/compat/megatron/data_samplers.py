"""Stand-in for `megatron.training.datasets.data_samplers`, and the older `megatron.legacy.data.data_samplers`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from binidx.compat.megatron.serve import DEFAULTS, find_installed_release
from binidx.dataset.config import Split as Split
from binidx.dataset.megatron_releases import RELEASES, Rule
from binidx.loader import samplers
from binidx.loader import torch_loader as loaders
from binidx.loader.dataset_protocols import compare_releases, find_megatron_samples, is_full_validation
from binidx.loader.samplers import HybridCPMegatronPretrainingSampler as HybridCPMegatronPretrainingSampler
from binidx.loader.samplers import MegatronFullValidationSampler as MegatronFullValidationSampler

logger = logging.getLogger(__name__)


class MegatronPretrainingSampler(samplers.MegatronPretrainingSampler):
    """binidx's sampler with two attributes that subclasses of Megatron's sampler use."""

    micro_batch_times_data_parallel_size = samplers.PretrainingSampler.samples_per_step

    def get_start_end_idx(self) -> tuple[int, int]:
        """Return start and stop of this rank's micro-batch among the samples that all ranks read together."""
        start = self.data_parallel_rank * self.micro_batch_size
        return start, start + self.micro_batch_size


class MegatronPretrainingRandomSampler(samplers.MegatronPretrainingRandomSampler):
    """binidx's sampler with two attributes that subclasses of Megatron's sampler use."""

    micro_batch_times_data_parallel_size = samplers.PretrainingSampler.samples_per_step

    @property
    def last_batch_size(self) -> int:
        """Number of samples of an epoch after its last whole step."""
        return self.total_samples % self.samples_per_step


class RandomSeedDataset(samplers.RandomSeedDataset, Dataset[Any]):
    """binidx's dataset as a torch Dataset."""


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """Return binidx's data loader for the settings in Megatron's globals: `get_args()` and `mpu`.

    With `--dataloader-type external` the dataset is returned as it is. Flags alone decide what a batch is, as different
    versions of Megatron have different ones:

        hybrid_context_parallel    this rank's samples of a whole global batch, as a list; not with a packing scheduler
        another of `is_listed`     a micro-batch, as a list: the scheduler draws the micro-batches of a step itself
        none of them               a micro-batch, stacked

    Args:
        dataset: map-style dataset. None has no loader; nor has one without samples, if Megatron's main is installed.
        consumed_samples: samples served before, over all ranks.
    """
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    is_empty = isinstance(dataset, Sized) and not len(dataset)
    if dataset is None or (is_empty and Rule.empty_is_none in RELEASES[find_installed_release()]):
        return None
    if args.dataloader_type == "external":
        return dataset
    if consumed_samples and DEFAULTS.get("megatron_samples") is None and (release := find_megatron_samples(dataset)):
        logger.warning(
            "resuming at sample %d with samples of Megatron %s; a run that began with those of another release needs "
            "--megatron-samples=RELEASE. Rules that differ from main's: %s",
            *(consumed_samples, release, ", ".join(compare_releases(dataset, "main")) or "none"),
        )
    topology = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    micro, whole = batch_sizes(dataset, args)
    workers: dict[str, Any] = {"num_workers": args.num_workers, "worker_init_fn": worker_init(args)}
    if is_listed(args):
        workers["collate_fn"] = list
    is_whole = getattr(args, "hybrid_context_parallel", False) and not is_scheduled(args)
    if is_whole and args.dataloader_type == "single" and not is_full_validation(dataset):
        sampler = HybridCPMegatronPretrainingSampler(len(dataset), consumed_samples, micro, whole, *topology)
        options = {"pin_memory": torch.cuda.is_available(), "persistent_workers": args.num_workers > 0, **workers}
        return loaders.PretrainingLoader(dataset, batch_sampler=sampler, **options)
    sharded = getattr(args, "data_sharding", True)
    if args.dataloader_type == "cyclic" and not sharded and len(dataset) % (micro * topology[1]):
        logger.warning(
            "%d samples do not fill steps of %d: the rest is dropped on all ranks; some Megatron versions serve it on "
            "some ranks, and their epochs differ",
            len(dataset),
            micro * topology[1],
        )
    return loaders.build_pretraining_data_loader(
        dataset,
        consumed_samples,
        micro,
        *topology,
        dataloader_type=args.dataloader_type,
        data_sharding=sharded,
        **workers,
    )


def is_listed(args: Any) -> bool:
    """Return whether micro-batches are lists of samples: for datasets or schedulers of samples of any length.

    Source: Megatron-LM, `build_pretraining_data_loader` of main after its pull request 6742 (095c3613), and of its dev
    branch (d48bd6be), whose flag is `dynamic_context_parallel`; before, main has `hybrid_context_parallel` alone.
    """
    given: dict[str, Any] = vars(args)
    varlen = given.get("use_varlen_dataset") and not given.get("varlen_sbhd_validation")
    flags = (given.get(name) for name in ("hybrid_context_parallel", "dynamic_context_parallel"))
    return bool(varlen or is_scheduled(args) or any(flags))


def is_scheduled(args: Any) -> bool:
    """Return whether a packing scheduler draws the micro-batches of a step."""
    return vars(args).get("sequence_packing_scheduler") is not None


SIZES = ("micro_batch_size", "global_batch_size")


def batch_sizes(dataset: Any, args: Any) -> tuple[int, int]:
    """Return the samples of a micro-batch and of a global batch; for valid and test the `eval_` sizes, if set.

    Args:
        dataset: the dataset of a split.
        args: Megatron's `get_args()`.
    """
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    evaluation: dict[str, int] = vars(args) if split in (Split.valid, Split.test) else {}
    micro, whole = (evaluation.get(f"eval_{name}") or getattr(args, name) for name in SIZES)
    return int(micro), int(whole)


def worker_init(args: Any, devices: str = "/dev/nvidia") -> Callable[[int], None] | None:
    """Return the function that begins a worker: it closes the files of GPUs, whose memory a worker would hold when its
    trainer has ended, and installs Megatron's handler of its exit signal if that is wanted. None without workers.

    Args:
        args: Megatron's `get_args()`.
        devices: beginning of the paths of GPUs.
    """
    if not args.num_workers:
        return None
    return partial(_begin_worker, devices, args.exit_signal if getattr(args, "exit_signal_handler", False) else None)


def _begin_worker(devices: str, exit_signal: Any, worker: int) -> None:
    _close_files(devices)
    if exit_signal is not None:
        from megatron.training.dist_signal_handler import DistributedSignalHandler

        DistributedSignalHandler(exit_signal).__enter__()


def _close_files(prefix: str) -> None:
    """Close the open files of this process whose paths begin with a prefix, where the system lists them."""
    opened = "/proc/self/fd"
    for number in os.listdir(opened) if os.path.isdir(opened) else ():
        with contextlib.suppress(OSError):  # the one of the list itself is closed already
            if os.readlink(f"{opened}/{number}").startswith(prefix):
                os.close(int(number))
