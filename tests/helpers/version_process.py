"""Start of a run with the algorithms of another version of binidx: a process, since ALGORITHM is imported by name.

    python -m helpers.version_process ALGORITHM CHANGED RUN

CHANGED names an array that this version makes otherwise, "" none. Prints one JSON object: the number of indices that
the start built, and the digests of the arrays of the datasets of the train blend.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import binidx.index.cache.manifest

binidx.index.cache.manifest.ALGORITHM = int(sys.argv[1])

import numpy as np  # noqa: E402
import xxhash  # noqa: E402

from binidx.index.cache.index_cache import IndexCache, Outcome  # noqa: E402
from binidx.run.run_file import Run  # noqa: E402

ARRAYS = ("document_index", "sample_index", "shuffle_index")


def main(changed: str, run: str) -> None:
    build = IndexCache.build

    def build_otherwise(cache: IndexCache, description: str, fingerprint: Any, fill: Any) -> Any:
        def change(writer: Any) -> None:
            array = writer.array

            def changing(name: str, *args: Any, **how: Any) -> Any:
                return Changed(array(name, *args, **how)) if name == changed else array(name, *args, **how)

            writer.array = changing
            fill(writer)

        return build(cache, description, fingerprint, change)

    IndexCache.build = build_otherwise  # type: ignore[method-assign]
    outcomes: list[str] = []
    [train, *_] = Run.load(run).build(on_outcome=lambda outcome: outcomes.append(outcome.how))
    arrays = [np.ascontiguousarray(getattr(dataset, name)) for dataset in train.datasets for name in ARRAYS]
    digests = [xxhash.xxh3_64_hexdigest(array) for array in arrays]
    print(json.dumps({"built": outcomes.count(Outcome.BUILT), "digests": digests}))


class Changed:
    """Array in the writer whose two first elements are exchanged when it is filled."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __enter__(self) -> Any:
        self.filled = self.inner.__enter__()
        return self.filled

    def __exit__(self, *error: Any) -> Any:
        self.filled[[0, 1]] = self.filled[[1, 0]]
        return self.inner.__exit__(*error)


if __name__ == "__main__":
    main(*sys.argv[2:])
