"""Run or dataset that the pages show, and the loss curve beside it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.explore.loss_curve import LossCurve
from binidx.format.indexed_dataset import IndexedDataset
from binidx.order.order_protocols import Source
from binidx.order.source_order import StoredSource
from binidx.packed.packed_run import PackedRunOrder, load_packed_run
from binidx.run.display.sample_rows import known_origins
from binidx.run.display.sample_text import TokenText
from binidx.run.display.timeline import Timeline, build_timeline
from binidx.run.history import RunHistory, Runs
from binidx.run.provenance.accounts import account
from binidx.run.run_file import Run
from binidx.run.run_kind import is_packed_run
from binidx.run.run_order import RunOrder
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_exists

NO_DATASET = "the dataset of the file, which names its tokenizer, is not known; give --tokenizer"
"""Reason for which the tokens of a sample of no known source have no text."""

DIGEST_LENGTH = 16
"""Hex digits of the digest in the addresses of pages."""


@dataclass(frozen=True)
class Explored:
    """Run or dataset that the pages show.

    Args:
        name: path or URI, as the user typed it.
        sources: the datasets; of a history those of all runs, each once.
        digest: of everything on which its pages depend, besides losses and tokenizer.
        order: the order of a run, or of the last one of a history; None: a dataset alone.
        options: fsspec's options of the stores.
        tokenizer: tokenizer that the user named; None: those of the manifests.
        losses: loss curve; None: none was given.
        other: order of another run, to compare; None: none was given.
        history: the runs that led to this one, and itself; None: a dataset alone.
    """

    name: str
    sources: Sequence[Source]
    digest: str
    order: RunOrder | None = None
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    tokenizer: str | None = None
    losses: LossCurve | None = None
    other: RunOrder | None = None
    history: Runs | None = None
    texts: dict[int, TokenText] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(
        cls,
        name: str,
        options: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        losses: Sequence[str] = (),
        compare: str | None = None,
        first_number: int = 0,
    ) -> Explored:
        """Open the file of a run, or the dataset under a prefix.

        Args:
            name: path or URI of the file, or prefix of the dataset.
            options: fsspec's options of the stores.
            tokenizer: any that `describe_tokenizer` takes; None: those in the manifests of the sources.
            losses: a CSV file or TensorBoard's with the loss of each step, or the folder of the losses of samples, one
                for all runs of the history or one for each.
            compare: path or URI of the file of another run, whose documents can be compared.
            first_number: number that the losses of steps give step 0; Megatron's is 1.

        Raises:
            ConfigError: neither a run nor a dataset, or losses of a dataset.
            BinidxError: a file is missing or malformed.
        """
        if not name.endswith(".json") and IndexedDataset.exists(name, storage_options=options):
            if losses:
                raise ConfigError("loss: a dataset has no steps; name the file of a run")
            dataset = _open_in_ranges(Location(name, options))
            source = StoredSource(name, dataset, range(len(dataset)))
            identity = json.dumps([dataset.opened["idx"], dataset.index.num_tokens], sort_keys=True)
            digest = hashlib.blake2b(identity.encode(), digest_size=DIGEST_LENGTH // 2).hexdigest()
            return cls(name, [source], digest, None, options, tokenizer)
        if is_packed_run(Location(name, options)):
            if losses or compare:
                raise ConfigError("loss, compare: found a run over packed files, which has neither; leave them out")
            packed = load_packed_run(name, options)
            digest = packed.fingerprint[:DIGEST_LENGTH]
            return cls(name, packed.sources, digest, packed, options, tokenizer, history=packed)
        history = RunHistory.of(Run.load(name, options))
        places = [Location.of(each, options) for each in losses]
        curve = LossCurve.read(places, history, name, first_number) if places else None
        other = RunOrder.open(Run.load(compare, options)) if compare else None
        digest, sources = history.fingerprint[:DIGEST_LENGTH], [*history.sources.values()]
        return cls(name, sources, digest, history.last, options, tokenizer, curve, other, history)

    @property
    def steps(self) -> range:
        """Steps of the history, to the end of the run; of a run without end to that of an epoch."""
        if self.order is None or self.history is None:
            return range(0)
        count = self.order.num_steps()
        return range(self.history.first_step, self.order.pass_steps if count is None else count)

    @property
    def runs(self) -> Runs:
        """The runs; ConfigError of a dataset alone, which has none."""
        if self.history is None:
            need = "the file of a run over .bin and .idx"
            raise ConfigError(f"{self.name}: found a dataset, which has no steps, needs {need}")
        return self.history

    def order_at(self, step: int) -> RunOrder:
        """Return the order of the run of the history that has a step; IndexError if none has it."""
        order, _ = next(iter(self.runs.orders(range(step, step + 1))))
        return order

    @property
    def numbers(self) -> Mapping[str, int]:
        """Prefix of a dataset, as any run has it -> its number in `sources`."""
        own = {source.name: number for number, source in reversed([*enumerate(self.sources)])}
        return {prefix: own[name] for prefix, name in self.runs.joined.names.items()}

    def numbers_of(self, order: RunOrder) -> list[int]:
        """Return the numbers here of the sources of one of the runs, and -1 at the end, of a sample of no source."""
        numbers = self.numbers
        return [*(numbers[source.prefix] for source in order.sources), -1]

    def prefix(self, source: int) -> Location:
        """Return the location of a source."""
        return Location(self.sources[source].prefix, self.options)

    def text(self, source: int) -> TokenText:
        """Return the text of the tokens of a source; of an unknown one, -1, by the tokenizer that the user named."""
        text = self.texts.get(source) or self._open_text(source)
        if text.decode is not None:  # a store that did not answer may do so for the next page
            self.texts[source] = text
        return text

    def _open_text(self, source: int) -> TokenText:
        if source < 0 and not self.tokenizer:
            return TokenText(reason=NO_DATASET)
        prefix = Location(self.name, self.options) if source < 0 else self.prefix(source)
        return TokenText.open(prefix, self.tokenizer)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - a command explores one run to its end; so below
    def timeline(self, steps: range, num_bins: int) -> Timeline:
        """Return the course of the history over some steps."""
        if isinstance(self.history, PackedRunOrder):
            return build_packed_timeline(self.history, steps)
        return build_timeline(self.runs, steps, num_bins)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def accounts(self, repeats: bool = False) -> list[dict[str, Any]]:
        """Return the use of each source, or set of packed files, in all steps, as `binidx account` prints it."""
        if isinstance(self.history, PackedRunOrder):
            return self.history.account(self.steps.stop)
        return [asdict(row) for row in account(self.runs, self.steps.stop, repeats=repeats, by_name=True)]

    def warm(self) -> None:
        """Import and open what the first page of samples needs: the reader of lineage, and the tokenizer."""
        if self.sources:
            known_origins(self.prefix(0), [0])
            self.text(0)

    __hash__ = object.__hash__


def _open_in_ranges(prefix: Location) -> IndexedDataset:
    """Return a dataset of whose index parts are read as needed, and not checked; a virtual merge is opened whole."""
    if not object_exists(prefix + ".idx"):
        return IndexedDataset(prefix.uri, storage_options=prefix.options)
    return IndexedDataset.open_unchecked(prefix)


PACKED_BINS = 24
"""Bins of the timeline of packed files; draws are followed to the bounds of each."""


def build_packed_timeline(order: PackedRunOrder, steps: range) -> Timeline:
    """Return the course of a run over some steps; a sample is a block."""
    count = min(PACKED_BINS, len(steps))
    bounds = steps.start + np.arange(count + 1) * len(steps) // count
    packed = order.packed
    read = np.array([packed.count_blocks(step) for step in bounds.tolist()])
    total = np.array([each.num_files * each.num_blocks for each in packed.sets])
    weights = np.array(packed.weights or [1 / len(packed.sets)] * len(packed.sets))
    planned = None if packed.schedules else np.repeat([weights], count, axis=0)
    sizes = np.full(count, packed.schedule.global_batch_size)
    lengths = np.full(count, order.files[0].block_size - 1 if order.files else 0)
    shared = planned, read / total, sizes, lengths, np.zeros(count, np.int64)
    return Timeline(packed.names, bounds, np.diff(read, axis=0), *shared, [], [])
