"""Indices in a `path_to_cache` that runs need: by name or, where names depend on data, by their descriptions."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass

from binidx.format.prefix_listing import IdxBundle
from binidx.order.requests import find_blend
from binidx.order.staged.staged_order import COUNTS_NAME
from binidx.run.run_file import Run
from binidx.storage.location import Location


@dataclass(frozen=True)
class NeededIndices:
    """Indices and bundles that some runs need; no data is read.

    Args:
        names: of indices, as `IndexFiles.name`, and of bundles.
        texts: an index is needed, too, if its description has one of these.
    """

    names: Set[str]
    texts: Set[str]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> NeededIndices:
        """Return the indices of runs: by name, or all of a run's prefixes for stages, orders and unweighted blends."""
        names, texts = set[str](), set[str]()
        for run in [phase for whole in runs for phase in whole.phases]:
            config = run.config
            requests = [request for split in run.requests().values() for request in split]
            blends = [blend.index_name() for blend in map(find_blend, requests) if blend is not None]
            names |= {source.index_name().files.name for request in requests for source in request.sources}
            names |= {name.files.name for name in blends if name is not None}
            given = [config.blend, *(config.blend_per_split or ()), *(stage.blend for stage in run.stages or ())]
            of_blends = [[*dict.fromkeys(blend[0])] for blend in given if blend]
            for prefixes in (*of_blends, [prefix for blend in of_blends for prefix in blend]):
                names.add(IdxBundle(Location.of(".")).file(prefixes).uri.rpartition("/")[2])
            if run.stages is not None or config.order is not None or None in blends:
                written = [config.as_written(prefix) for prefixes in of_blends for prefix in prefixes]
                texts |= {json.dumps(str(text)) for text in (*written, *([COUNTS_NAME] if run.stages else []))}
        return cls(names, texts)

    def has(self, name: str, description: str) -> bool:
        """Return whether an index of this name and description is needed."""
        return name in self.names or any(text in description for text in self.texts)
