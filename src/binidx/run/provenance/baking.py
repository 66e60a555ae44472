"""Bake a run: write its tokens again in the order in which they are consumed, for `dataset/baked.py`.

For runs whose thousands of nodes read one bucket: a micro-batch is one range, while shuffled documents take five to
nine ranges per sample. Costs one more copy of the tokens that are read, (S + 1) / S of their size.

The work is cut into parts that are written atomically and in any order. Existing parts are kept, so an interrupted bake
resumes, and several machines may share it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from binidx.dataset.baked import Baked, check_bakeable, part_prefix, read_baked
from binidx.errors import ConfigError, ObjectExistsError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.order.blended_order import list_members
from binidx.order.document_packing import PackedOrder
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps
from binidx.storage.location import Location
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import create_object, put_if_absent

PART_BYTES = 1 << 30
"""Approximate size of the tokens of a part."""

READ_SAMPLES = 256
"""Number of samples that each thread reads at once."""


def plan_bake(order: RunOrder, steps: range) -> Baked:
    """Return the description of a bake of these steps.

    Args:
        order: the order of the run.
        steps: steps to bake.

    Returns:
        The description, which `bake` publishes beside the parts.

    Raises:
        IndexError: a step is beyond the end of the run.
        ConfigError: there are no steps, or the bounds of documents matter to the samples, which a bake does not store.
    """
    check_planned(order, steps, "bake")
    config = order.config
    if any(isinstance(member, PackedOrder) for member in list_members(order.order)):
        raise ConfigError("order: found packed documents, whose samples have several lengths; a bake stores one length")
    check_bakeable(config)
    stored = (config.sequence_length + config.add_extra_token_to_sequence) * np.dtype(order.token_dtype).itemsize
    return Baked(**describe_samples(order, steps, max(1, PART_BYTES // stored)))


def check_planned(order: RunOrder, steps: range, purpose: str) -> None:
    """Raise IndexError or ConfigError unless a run has these steps, at least one."""
    check_steps(steps, order.num_steps())
    if not steps:
        raise ConfigError(f"steps: found {steps.start} to {steps.stop}, need one to {purpose}")


def describe_samples(order: RunOrder, steps: range, samples_per_part: int) -> dict[str, Any]:
    """Return the fields of a `Baked` of some steps of a run.

    Args:
        order: the order of the run.
        steps: the steps.
        samples_per_part: number of samples in each part but the last.
    """
    return {
        "fingerprint": order.fingerprint,
        "first": order.reading.schedule.samples_before(steps.start),
        "stop": order.reading.schedule.samples_before(steps.stop),
        "samples_per_part": samples_per_part,
        "sequence_length": order.config.sequence_length,
        "add_extra_token": order.config.add_extra_token_to_sequence,
        "blended": order.is_blended,
    }


def bake(
    order: RunOrder,
    directory: str,
    baked: Baked,
    *,
    threads: int = 2,
    shard: int = 0,
    num_shards: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    watch: Callable[[int], object] = lambda num_samples: None,
) -> int:
    """Write the samples of a run again in the order in which it reads them; keep the parts that exist.

    Args:
        order: the order of the run.
        directory: path or URI of the target.
        baked: the result of `plan_bake`, the same for all machines that share the work.
        threads: number of threads, each of which writes a part.
        shard, num_shards: this machine's share: every num_shards-th part, from part `shard` on.
        storage_options: options of the target's store.
        watch: called with the number of samples after each read, and for each part that exists.

    Returns:
        The number of parts written.

    Raises:
        ObjectExistsError: the directory holds a bake of another run.
        ConfigError: a sample is truncated, as only a partial last validation sample is.

    Source: ours.
    """
    # The description comes before any part, so that no directory holds parts of two runs.
    file = Location.of(directory, storage_options) / "baked.json"
    if not put_if_absent(file, baked.format()) and read_baked(file) != baked:
        raise ObjectExistsError(
            f"{file}: another run was baked here, or other steps of it; bake into another directory"
        )

    def write(part: range) -> bool:
        prefix = part_prefix(directory, part)
        if IndexedDataset.exists(prefix, storage_options=storage_options):
            watch(len(part))
            return False
        samples = order.reading.samples_at(np.asarray(part, np.int64))
        if baked.blended:
            ids = io.BytesIO()
            np.save(ids, order.order.locate(samples)[0].astype(np.int16))
            with create_object(Location(f"{prefix}-dataset_id.npy", storage_options)) as out:
                out.write(ids.getvalue())
        with IndexedDatasetBuilder(f"{prefix}.bin", order.token_dtype, storage_options=storage_options) as builder:
            for first in range(0, len(samples), READ_SAMPLES):
                texts = order.read(samples[first : first + READ_SAMPLES])
                for text in texts:
                    if len(text) != baked.stored_length:
                        raise ConfigError(f"{prefix}: a sample of {len(text)} tokens, needs {baked.stored_length}")
                    builder.add_document(text, [len(text)])
                watch(len(texts))
            builder.finalize(f"{prefix}.idx")
        return True

    with OPENS.executor(threads) as pool:
        return sum(pool.map(write, baked.parts()[shard::num_shards]))
