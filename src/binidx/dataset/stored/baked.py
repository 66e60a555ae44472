"""Dataset of a baked run: its samples, stored in the order in which the run consumes them.

A process reads the description, the index of the first part for the dtype of the tokens, and of the other parts only
tokens, each part from its first use on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, choose_pad_token
from binidx.dataset.megatron.ordered_dataset import SEVERAL, make_opener, number_samples
from binidx.dataset.stored.options import check_options, describe_options
from binidx.dataset.token_dataset import TokenDataset, locate_stored
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, redacted
from binidx.format.tokens import PlainTokens, StoredTokens
from binidx.html_table import format_html_table
from binidx.order.order_protocols import Numbers
from binidx.order.stored.baked_order import Baked, BakedOrder, BakedRequest, StoredRequest
from binidx.order.stored.planned_order import PlannedOrder
from binidx.storage.cache.memory import ForwardCache
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope
from binidx.storage.requests.remote_object import MAX_REQUEST


class StoredRunDataset(TokenDataset):
    """Base of datasets of the samples of a run by position: sample i was served after i consumed samples.

    Args:
        directory: URI of the stored run: a bake, or a read plan.
        config: config of the run.
        request: request of the order of the stored positions.

    Raises:
        ConfigError: the config makes other samples.
    """

    order: BakedOrder | PlannedOrder

    describe_options = staticmethod(describe_options)

    def __init__(self, directory: str, config: GPTDatasetConfig, request: StoredRequest) -> None:
        self.directory, self.config = directory, config
        order: Any = make_opener(config).open(request)
        self.stored: Baked = order.stored
        check_stored(config, self.stored, request.file.uri)
        if self.stored.options is not None:
            check_options(self.stored.options, config, request.file.uri)
        pad = choose_pad_token(config.tokenizer, bool(config.allow_ambiguous_pad_tokens))
        assemble = GPTAssemble.of(config, pad, masks_ends=order.ends_documents)
        super().__init__(order, [source.dataset for source in order.sources], [assemble] * len(order.sources))

    def __repr__(self) -> str:
        positions = f"positions {self.stored.first:,} to {self.stored.stop:,}"
        return f"{type(self).__name__}({redacted(self.directory)}, {positions} x {self.config.sequence_length:,})"

    def _repr_html_(self) -> str:
        rows = [("first position", self.stored.first), ("positions", len(self) - self.stored.first)]
        title = f"{type(self).__name__}: {redacted(self.directory)}"
        return format_html_table(title, [*rows, ("tokens a sample", self.config.sequence_length)])

    def __getitem__(self, idx: Any) -> Any:
        """Return a sample, or the list of the samples of a slice or of a list of positions, which are read at once."""
        if isinstance(idx, SEVERAL):
            return list(self.__getitems__(number_samples(idx, len(self))))
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[Any]) -> Sequence[Sample]:
        """Return the samples at these positions, read at once.

        Raises:
            IndexError: a position is not stored.
        """
        positions = self._check_stored(idxs)
        # Before the samples: a plan keeps the rows of the last read.
        ids = self.order.find_ids(positions) if self.stored.blended else None
        samples = super().__getitems__(idxs)
        if ids is not None:
            assert isinstance(samples, Samples)  # as GPTAssemble makes them
            samples.numbers = {"dataset_id": ids.astype(np.int16)}
        return samples

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return only the tokens of the samples at these positions, as `GPTDataset.read_tokens` does."""
        return self.read_text(self._check_stored(idxs).tolist())

    def _check_stored(self, idxs: Sequence[int]) -> Numbers:
        positions, first, stop = np.asarray(idxs, np.int64), self.stored.first, self.stored.stop
        if len(positions) and not (first <= positions.min() and positions.max() < stop):
            raise IndexError(f"{self.directory}: positions {list(idxs)} not stored (found {first} to {stop})")
        return positions

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield where the tokens of samples are stored; see `locate_stored`."""
        return locate_stored(self.order, self.tokens, samples)

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored tokens.

        Returns:
            One reader for each source, of all its files; a file is opened at its first read.
        """
        return [tokens.bin_reader for tokens in self.tokens if isinstance(tokens, StoredTokens)]


def check_stored(config: GPTDatasetConfig, stored: Baked, uri: str) -> None:
    """Raise ConfigError unless a config makes the samples of a stored run.

    Args:
        config: config of the run.
        stored: description of the stored run.
        uri: of the description.
    """
    if config.moves_text:
        raise ConfigError("fim_rate: found fill in the middle, which a stored order lacks; train from the run")
    needed = (config.sequence_length, config.add_extra_token_to_sequence)
    found = (stored.sequence_length, stored.add_extra_token)
    if needed != found:
        raise ConfigError(f"{uri}: sequence_length and extra token (found {found}, need {needed}); write it again")


class BakedDataset(StoredRunDataset):
    """Dataset of a run that `binidx prepare bake` has stored in the order of its steps.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError.

    Args:
        directory: URI of the baked run.
        config: config of the run. Its blend is not opened; sequence_length, extra token and masks must be the run's.

    Raises:
        ConfigError: the config asks for another order: another seed, weight or sequence_length, for example. The places
            of its data are not compared, as a bake has their tokens; a bake of before 0.2 records no options.
        FormatError: the description is invalid, or a part contradicts it.
        ObjectNotFoundError: the description or a part is missing: the bake has not finished.

    Example:
        >>> dataset = binidx.BakedDataset("s3://corpus/baked", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "BakedDataset"

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        config.check_bakeable()
        folder = Location(directory, config.storage_options)
        super().__init__(directory, config, BakedRequest(folder))
        self.dtype, self.reader = self.tokens[0].dtype, self.token_readers()[0]
        self.sample_bytes = self.stored.stored_length * self.dtype.itemsize
        self.is_uncached = folder.local_path is None and folder.settings.cache_dir is None

    def read_forward(self, num_ahead: int, scope: Scope) -> BakedDataset:
        """Return this dataset for reads in the order of its samples: whole extents are fetched ahead.

        Args:
            num_ahead: number of extents to fetch ahead, each of `MAX_REQUEST` bytes.
            scope: cancels the extents in flight.
        """
        forward = copy.copy(self)
        reader = ForwardCache(self.reader, chunk_bytes=MAX_REQUEST, num_ahead=num_ahead, scope=scope)
        forward.tokens = [PlainTokens(self.directory, self.dtype, reader)]
        return forward
