"""Parts without objects: what they find is in their results, which the caller combines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from binidx import errors
from binidx.jobs.parts import JobFolder, JobStage, PartType, Values, Workers, run_stages
from binidx.storage.location import Location
from binidx.storage.threads import REQUESTS
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import delete_object


def make_recorded_parts(
    make: Callable[[PartType], Values],
    parts: Sequence[PartType],
    workers: Workers,
    records: Location | None,
    identity: Mapping[str, Any],
    watch: ProgressWatcher,
    *,
    remote_data: bool = False,
    is_final: Callable[[Values], bool] = lambda result: True,
) -> dict[str, Values]:
    """Make parts without objects, whose results the caller combines; `records` keep the results for a restart.

    A call without a shard removes the records at its end.

    Args:
        make, parts, workers, remote_data: as in `make_parts`.
        records: folder of the results; None: they are not kept.
        identity: all that decides the results, in JSON values.
        watch: gets the bytes of the parts.
        is_final: whether the record of a result is kept; another part is made again by the next call.

    Raises:
        ConfigError: a shard without `records`.
        ObjectExistsError: `records` are of another job.
    """
    shard, folder = workers.shard, None
    if records is None and shard is not None:
        raise errors.ConfigError("shard, records: a shard needs a folder for its findings; name one")
    if records is not None:
        folder = JobFolder(Location(records.absolute, records.options), identity)
    stage = JobStage("tokens", make, lambda _: parts)
    (results,), _ = run_stages([stage], folder, workers, watch, remote_data=remote_data)
    if folder is not None and shard is None:
        folder.remove(parts)
    elif folder is not None:
        again = [part for part in parts if part.name in results and not is_final(results[part.name])]
        REQUESTS.map(delete_object, map(folder.file, again))
    return results
