"""Order of a baked run, whose samples are stored one after the other: sample i is a range that follows from i.

DIR/baked.json                       description; written first
DIR/{first:012d}.bin .idx            samples from position `first` on, a sequence each: S tokens and the next one
DIR/{first:012d}-dataset_id.npy      of a blend: the dataset of each sample
DIR/complete.json                    the same as baked.json; written when all parts exist
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.index.cache.index_files import parse_npy
from binidx.json_models import Count, JsonFile, Positive, tolerate_all
from binidx.order.order_protocols import Bounds, Numbers, Source, Spans
from binidx.order.source_order import SourceOrder
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document, read_whole
from binidx.storage.stores.registry import join_uri

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Baked:
    """Contents of `baked.json`.

    Attributes:
        fingerprint: identity of the order that was baked; the states of loaders contain it.
        first, stop: positions of the run that are stored.
        samples_per_part: number of samples in each part (pair of files) but the last.
        sequence_length: number of tokens fed per sample, S.
        add_extra_token: whether the token after each sample is stored, too.
        blended: whether the samples have a dataset_id.
    """

    fingerprint: str
    first: Count
    stop: Count
    samples_per_part: Positive
    sequence_length: Positive
    add_extra_token: bool
    blended: bool

    def parts(self) -> list[range]:
        """Return the positions of each part."""
        firsts = range(self.first, self.stop, self.samples_per_part)
        return [range(first, min(first + self.samples_per_part, self.stop)) for first in firsts]

    @property
    def stored_length(self) -> int:
        """Number of stored tokens of each sample."""
        return self.sequence_length + self.add_extra_token

    def format(self) -> bytes:
        return (json.dumps({**BAKED_FILE.tags, **asdict(self)}, indent=1) + "\n").encode()


BAKED_FILE = JsonFile(
    Baked, {"binidx": "baked", "version": 1}, hint="needs a file written by binidx bake", tolerates=tolerate_all
)


def read_baked(file: Location) -> Baked:
    """Read a `baked.json`; raise FormatError if the file is none."""
    return BAKED_FILE.decode(read_document(BAKED_FILE, file), file.uri)


def part_prefix(directory: str, part: range) -> str:
    return join_uri(directory, f"{part.start:012d}")


class BakedOrder(SourceOrder):
    """Samples of a run by position, one after the other in one sequence: sample i was served after i consumed samples.

    Positions before the first stored one are no samples.

    Args:
        source: the tokens of all parts as one sequence.
        directory: of the baked run.
        baked: its description.
    """

    def __init__(self, source: Source, directory: Location, baked: Baked) -> None:
        super().__init__(source)
        self.directory, self.stored, self.parts = directory, baked, baked.parts()
        self._ids: dict[int, NDArray[np.int16]] = {}

    @property
    def identity(self) -> str:
        return self.stored.fingerprint

    def __len__(self) -> int:
        return self.stored.stop

    def candidates(self, sequences: Numbers) -> Numbers:
        return np.arange(self.stored.first, self.stored.stop)

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        spans, length = np.zeros((len(samples), 4), np.int64), self.stored.stored_length
        spans[:, 2], spans[:, 3] = (samples - self.stored.first) * length, length
        return spans, np.arange(len(samples) + 1)

    def find_ids(self, samples: Numbers) -> Numbers:
        """Return the dataset_id of samples of a blend, shape (B,)."""
        part, number = np.divmod(samples - self.stored.first, self.stored.samples_per_part)
        ids = np.empty(len(samples), np.int64)
        for own in np.unique(part).tolist():
            ids[part == own] = self._ids_of(own)[number[part == own]]
        return ids

    def _ids_of(self, number: int) -> NDArray[np.int16]:
        """Return the dataset_id of each sample of a part, which is read at its first use."""
        if (ids := self._ids.get(number)) is None:
            file = Location(part_prefix(self.directory.uri, self.parts[number]), self.directory.options)
            reader = open_object(file + "-dataset_id.npy", cache=False)
            ids = self._ids[number] = parse_npy(read_whole(reader))
            if len(ids) != len(self.parts[number]):
                raise FormatError(
                    f"{reader.uri}: {len(ids)} dataset ids, need {len(self.parts[number])}; bake it again"
                )
        return ids
