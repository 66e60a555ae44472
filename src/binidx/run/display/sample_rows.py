"""Rows of samples, as JSON values: place in the run, source, documents, their origins and text."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from binidx.errors import MissingDriverError
from binidx.format.sidecars.lineage import read_origins
from binidx.order.reads import TokenReads
from binidx.run.global_order import SampleReads
from binidx.run.run_order import RunOrder
from binidx.storage.location import Location


def build_rows(
    order: RunOrder,
    readings: SampleReads,
    decode: Callable[[list[int]], str] | None = None,
    *,
    contents: TokenReads | None = None,
    lineage: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield one row per sample, as JSON values; with `decode`, also the text of each piece of a document.

    A sample whose documents are not known has no `docs`, and a text of its own.

    Args:
        order: order of the run.
        readings: step, rank and slot of each sample.
        decode: returns the text of ids.
        contents: documents of the same samples, if they are known already.
        lineage: whether to add the origins of documents.
    """
    contents = order.contents(readings.sample) if contents is None else contents
    tokens = order.read(readings.sample) if decode else None
    trained = order.reading.schedule.trains(readings.step)
    origins = sample_origins(order, contents) if lineage else {}
    for place in range(len(readings.step)):
        source, docs = int(contents.source[place]), []
        for piece in range(*contents.bounds[place : place + 2].tolist()):
            columns = contents.document, contents.start, contents.length, contents.target, contents.inputs
            number, start, length, target, inputs = (int(column[piece]) for column in columns)
            doc: dict[str, Any] = {"doc": number, "start": start, "len": length, "dst": target}
            if length and not inputs:
                doc["only_label"] = True
            if origin := origins.get((source, number)):
                doc["origin"] = origin
            if decode and tokens is not None:
                doc["text"] = decode(tokens[place][target : target + length].tolist())
            docs.append(doc)
        row: dict[str, Any] = {
            name: int(column[place]) for name, column in zip(readings._fields, readings, strict=True)
        }
        row["trained"] = bool(trained[place])
        if row["step"] < 0:  # of a sample before `consumed_samples`
            row |= dict.fromkeys(("step", "rank", "slot", "trained"))
        row |= order.label(row["sample"], source, int(contents.epoch[place]))
        if source >= 0:
            row["docs"] = docs
        elif decode and tokens is not None:
            row["text"] = decode(tokens[place].tolist())
        yield row


def sample_origins(order: RunOrder, contents: TokenReads) -> dict[tuple[int, int], dict[str, Any]]:
    """Return (source, document) -> origin of the documents in these samples, for sources with lineage."""
    source_of_piece = contents.piece_source
    origins: dict[tuple[int, int], dict[str, Any]] = {}
    for number in np.unique(source_of_piece).tolist():
        source, documents = order.sources[number], contents.document[source_of_piece == number].tolist()
        rows = known_origins(Location(source.prefix, order.storage_options), documents)
        origins |= {(number, document): origin for document, origin in rows.items()}
    return origins


def known_origins(prefix: Location, documents: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return document -> origin; none if pyarrow, which reads the lineage, is missing, of which it warns.

    Args:
        prefix: of the dataset.
        documents: numbers of documents.
    """
    try:
        return read_origins(prefix, documents)
    except MissingDriverError as error:
        _warn_once(f"origins of documents are left out: {error}")
        return {}


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
