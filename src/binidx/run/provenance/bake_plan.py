"""Plan a bake: which samples it stores, and in which parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from binidx.dataset.baked import Baked, check_bakeable
from binidx.errors import ConfigError, trims_traceback
from binidx.order.blended_order import list_members
from binidx.order.document_packing import PackedOrder
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps

PART_BYTES = 1 << 30
"""Approximate size of the tokens of a part."""


@trims_traceback
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
    check_steps(steps, order.num_steps(), first_step=order.first_step)
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
