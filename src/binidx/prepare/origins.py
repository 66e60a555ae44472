"""Where single documents came from: their rows of the lineage, and of that only the row groups that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from binidx.errors import FormatError
from binidx.format.sidecars import LINEAGE
from binidx.prepare.finished import Options
from binidx.prepare.lineage import invalid_named
from binidx.storage.backends import open_object
from binidx.storage.publish import object_exists


def read_origins(prefix: str, documents: Sequence[int], options: Options = None) -> dict[int, dict[str, Any]]:
    """document -> its source, row, byte, id and hash; nothing where the dataset has no lineage.

    Price: the footer, and a row group for each run of documents: 6 MB or so of a quarter of a million rows.

    Raises:
        FormatError: there is no such row, or it is no lineage.
        MissingDriverError: there is lineage, and no pyarrow.
    """
    uri = prefix + LINEAGE
    if not len(documents) or not object_exists(uri, options):
        return {}
    from binidx.prepare.preprocess.lineage import SCHEMA, open_rows

    wanted = np.unique(np.array(documents, np.int64))
    with invalid_named(uri):
        found = open_rows(open_object(uri, storage_options=options, cache=False))
        about, rows = found.metadata, dict[int, dict[str, Any]]()
        if wanted[-1] >= about.num_rows:
            raise FormatError(f"{uri}: {about.num_rows} rows, needed one for document {wanted[-1]}")
        firsts = np.cumsum([0, *(about.row_group(number).num_rows for number in range(about.num_row_groups))])
        for group in np.unique(np.searchsorted(firsts, wanted, "right") - 1).tolist():
            here = wanted[(wanted >= firsts[group]) & (wanted < firsts[group + 1])]
            table = found.read_row_group(group).take(here - firsts[group]).cast(SCHEMA)
            rows.update(zip(here.tolist(), table.to_pylist(), strict=True))
    return rows


def origin_text(origin: dict[str, Any]) -> str:
    """`s3://text/en.jsonl row 17, byte 2034, id "a"`."""
    byte = f", byte {origin['byte']:,}" if origin["byte"] is not None else ""
    name = f', id "{origin["id"]}"' if origin["id"] is not None else ""
    return f"{origin['source']} row {origin['row']:,}{byte}{name}"
