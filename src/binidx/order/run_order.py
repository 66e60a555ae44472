"""The order of a GPT run, asked from either end: what was in a step, and who saw a document.

    order = RunOrder.of(Run.load("run.json"))
    order.table(range(41_200, 41_201), rank=17)      the samples of a step, their documents and spans
    order.where(0, [12_345_678], stop_step=41_200)   every step, rank and slot that saw a document

All of it is arithmetic on the indices; tokens are read only on request.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.split import Split
from binidx.errors import ConfigError
from binidx.loader.readings import ReadingOrder, Readings
from binidx.loader.run import Run
from binidx.order.samples import Contents, Origins, contents_of, documents_in, origins_of, read_text, sources_of
from binidx.order.where import samples_with

if TYPE_CHECKING:
    from binidx.order.arrow import pa

Numbers = NDArray[np.int64]
Docs = Literal["ends", "spans"] | None

CONTENTS: Mapping[Docs, Callable[[Any, Numbers], Origins]] = {
    "ends": documents_in,
    "spans": contents_of,
    None: origins_of,
}
"""How much a table tells of the documents in its samples -> what finds it."""


@dataclass(frozen=True)
class RunOrder:
    """What a run reads.

    Args:
        dataset: of its train split, as the builder gave it.
        reading: who reads which of its samples when.
    """

    dataset: Any
    reading: ReadingOrder

    @classmethod
    def of(cls, run: Run) -> RunOrder:
        """The order of a run as it was described, its indices loaded whole, or built."""
        return cls(run.build()[0], run.reading_order)

    @classmethod
    def open(cls, run: Run) -> RunOrder:
        """The same, at the price of what is asked: of indices that are cached, only the ranges that an answer needs.

        A step of a run over 300 million documents in a bucket is traced in some thousand small requests, and again
        without any. `where` reads its way through the arrays of whole indices, some megabytes at a time.
        What is not cached is built as it would be for training, and a run in stages is opened as a whole.

        Raises:
            ConfigError: the run has no train split.
        """
        if run.stages is not None:
            return cls.of(run)
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, run.sizes, lambda: True, run.config, access="ranges", splits=[Split.train]
        )
        train = builder.build()[0]
        if train is None or isinstance(train, list):
            raise ConfigError("run: has no train split to take samples from")
        return cls(train, ReadingOrder(run.schedule, len(train), run.dataloader_type, run.data_sharding))

    @functools.cached_property
    def sources(self) -> list[GPTDataset]:
        return sources_of(self.dataset)

    @property
    def prefixes(self) -> list[str]:
        """Of the sources, in their order."""
        return [str(source.dataset_path) for source in self.sources]

    @property
    def num_ranks(self) -> int:
        return self.reading.schedule.data_parallel_size

    def num_steps(self) -> int | None:
        """Whole steps until the loaders end; None: they do not."""
        return self.reading.num_steps()

    def num_rows(self, steps: range) -> int:
        """Samples of these steps, over all ranks."""
        return self.reading.schedule.samples_before(steps.stop) - self.reading.schedule.samples_before(steps.start)

    def trace(self, steps: range, rank: int | None = None) -> tuple[Readings, Contents]:
        """The samples of some steps, of one rank or all, and what is in them.

        Raises:
            IndexError: a step that the run does not have.
        """
        readings = self.reading.readings(steps, rank)
        return readings, contents_of(self.dataset, readings.sample)

    def where(self, source: int, documents: Sequence[int], stop_step: int) -> tuple[Readings, Contents]:
        """Every reading, in the steps before `stop_step`, of a sample with a token of one of these documents.

        Raises:
            IndexError: there is no such source or document.
        """
        samples = samples_with(self.dataset, source, documents)
        stop = self.reading.schedule.samples_before(stop_step)
        readings = self.reading.served_at(samples, stop)
        return readings, contents_of(self.dataset, readings.sample)

    def table(self, steps: range, rank: int | None = None, *, docs: Docs = "ends", tokens: bool = False) -> pa.Table:
        """`trace` as an Arrow table; see `order.arrow` for its columns.

        Args:
            docs: "ends", the documents of each sample and where it begins and ends in them; "spans", each piece with
                its length, at five times the price; None, without.
            tokens: with those stored, pads too.
        """
        from binidx.order.arrow import to_table

        readings = self.reading.readings(steps, rank)
        contents = CONTENTS[docs](self.dataset, readings.sample)
        return to_table(readings, contents, self.prefixes, self.read(readings.sample) if tokens else None)

    def read(self, samples: Numbers) -> list[NDArray[Any]]:
        """The stored tokens of samples: S of them and the one after, fewer where one is cut short."""
        return [text.astype(self.token_dtype) for text in read_text(self.dataset, samples)]

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """What holds the tokens of all sources."""
        return np.result_type(*(source.dataset.index.dtype for source in self.sources))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of everything the order depends on, and of the data it is an order of."""
        depends = {
            "dataset": self.dataset.unique_description_hash,
            "data": [source.dataset.identity for source in self.sources],
            "reading": asdict(self.reading),
        }
        return hashlib.blake2b(json.dumps(cast(Any, depends)).encode(), digest_size=16).hexdigest()
