"""Order of a run as the questions about it need it: steps to samples, samples to documents, and back.

    steps ── readings ──► samples ── contents ──► documents            trace
    steps ◄── reads_of ── samples ◄── samples_with ── documents        where, exposures

`RunOrder` answers for `.bin` and `.idx`, `PackedRunOrder` for packed files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from binidx.jobs.parts import PerProcess
from binidx.order.order_protocols import Numbers, Source
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import SampleContents
from binidx.run.provenance.joined_sources import JoinedSources


class Steps(Protocol):
    """Steps of a run or of a history of runs, and the order of each."""

    @property
    def first_step(self) -> int: ...

    @property
    def joined(self) -> JoinedSources:
        """The datasets of all runs, those of the same data as one."""

    def num_steps(self) -> int | None:
        """Return the first step after the run; None if it has no end."""

    def orders(self, steps: range) -> Iterator[tuple[Reading, range]]:
        """Yield the order of each run that has some of these steps, and those steps."""


class OpenedRun(Steps, Protocol):
    """The run that a file describes, and those before it."""

    @property
    def consumed_samples(self) -> int:
        """Number of samples that were read before the first step."""

    def select_sources(self, name: str | None = None) -> Mapping[str, Source]:
        """Return the datasets by their prefix: that of a name, or all; ConfigError if there is none."""

    def samples_named(self, name: str) -> Numbers:
        """Return the stored samples with a name; none where samples have no names."""


class Reading(Steps, Protocol):
    """Order of one run over all ranks."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def sources(self) -> Sequence[Source]:
        """Datasets in which documents are numbered; `SampleContents.source` numbers them."""

    @property
    def sequence_length(self) -> int:
        """Number of input tokens of a sample."""

    def input_length(self, source: int) -> int:
        """Return the number of input tokens of a sample of a source; ConfigError if samples move tokens."""

    @property
    def storage_options(self) -> Mapping[str, Any] | None: ...

    @property
    def knows_earlier(self) -> bool:
        """True if the order has the samples that were read before the first step."""

    @property
    def pass_steps(self) -> int:
        """Number of steps of one pass over the data."""

    def num_rows(self, steps: range) -> int: ...

    def largest(self, steps: range) -> Mapping[str, int]: ...

    def per_process(self) -> PerProcess[Any]: ...

    def table(
        self, steps: range, rank: int | None = None, *, docs: Any = ..., tokens: Any = ..., trained: Any = ...
    ) -> Any:
        """Return the reads of some steps as an Arrow table."""

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of some steps, of one rank or all."""

    def trained(self, steps: Numbers) -> NDArray[Any]:
        """Return whether the samples of each step are trained, and not only read."""

    def contents(self, samples: Numbers) -> SampleContents:
        """Return the documents of samples; a source is -1 if they are not known."""

    def sources_of(self, samples: Numbers) -> Numbers:
        """Return the source of each sample, without its documents where that is faster; -1 if it is not known."""

    def samples_with(self, source: int, documents: Sequence[int] | Numbers) -> Numbers:
        """Return the samples with a token of one of these documents of a source, ascending."""

    def reads_of(self, samples: Numbers, stop_step: int, *, earlier: bool = True) -> SampleReads:
        """Return all reads of samples in the steps before `stop_step`."""

    def read(self, samples: Numbers) -> Any:
        """Return the stored tokens of each sample, as arrays."""

    def label(self, contents: Any, place: int) -> dict[str, Any]:
        """Return the columns of a row about one of the samples: its source, epoch, and where it is stored."""
