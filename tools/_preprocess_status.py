"""What people are told of machines, what each did; and of a job that they look at from elsewhere, how far it is."""

from __future__ import annotations

from collections.abc import Mapping

from binidx.format.sidecars.dataset_manifest import Machine
from binidx.prepare.preprocess.preprocess import JobStatus

from ._face import human_seconds
from ._table import table


def describe_status(status: JobStatus) -> str:
    """`s3://corpus/en: 12 of 40 parts, 31% of the text; ...`, and the machines."""
    if status.finished:
        return "\n".join([f"{status.output}: finished, {status.parts:,} parts", *describe_machines(status.machines)])
    share = status.done_bytes / status.total_bytes if status.total_bytes else 0.0
    words = [f"{status.output}: {status.parts_done:,} of {status.parts:,} parts, {share:.0%} of the text"]
    if status.bytes_per_second is not None:
        words.append(f"{status.bytes_per_second / 1e6:,.1f} MB/s")
    if status.seconds_left is not None:
        words.append(f"{human_seconds(status.seconds_left)} left at that pace")
    if status.last_part_seconds is not None:
        words.append(f"the last part {human_seconds(status.last_part_seconds)} ago")
    return "\n".join(["; ".join(words), *describe_machines(status.machines, least=1)])


def describe_machines(machines: Mapping[str, Machine], least: int = 2) -> list[str]:
    """A line each, where there are as many as `least`."""
    if len(machines) < least:
        return []
    rows = [
        (
            name or "(not told)",
            f"{each.parts:,}",
            f"{each.documents:,}",
            f"{each.tokens:,}",
            "" if each.bytes_per_second is None else f"{each.bytes_per_second / 1e6:,.1f}",
        )
        for name, each in machines.items()
    ]
    return table(("machine", "parts", "documents", "tokens", "MB/s"), rows).splitlines()
