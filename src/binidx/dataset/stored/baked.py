"""Base of the datasets of stored runs, with the options that these record; and the dataset of a baked run.

A process reads the description of a bake, the index of the first part for the dtype of the tokens, and of the other
parts only tokens, each part from its first use on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import described_fields, words_of
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, Split, WrittenPaths, choose_pad_token
from binidx.dataset.megatron.ordered_dataset import SEVERAL, make_opener, number_samples
from binidx.dataset.token_dataset import TokenDataset, locate_stored
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, redacted, redacted_text
from binidx.format.tokens import PlainTokens, StoredTokens
from binidx.html_table import format_html_table
from binidx.order.order_options import find_kind
from binidx.order.order_protocols import Numbers
from binidx.order.stored.baked_order import Baked, BakedOrder, BakedRequest, StoredRequest
from binidx.order.stored.planned_order import PlannedOrder
from binidx.storage.cache.memory import ForwardCache
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope
from binidx.storage.requests.remote_object import MAX_REQUEST

IN_ANOTHER_FORM = {"split", "order", "tokenizer"}
"""Fields that names of plans have as bookends, and as the text of the order; the tokenizer in no form, since it has no
text that is the same in each process, and moves no token of stored data."""


def hashed_fields(config: GPTDatasetConfig, split: Split) -> tuple[list[str], set[str]]:
    """Return the fields of a config in the names of early plans, and those of them that today's names lack.

    Early names have all fields but those of places and of the start. Today's lack those that move no token of the split
    in the kinds that have plans. Both have all fields of a subclass, whatever they affect, as stored plans do.
    """
    known = described_fields(GPTDatasetConfig)
    ways = {name for name, option in known.items() if words_of(option) & {"place", "start"}} | IN_ANOTHER_FORM
    lacking = {name for name, option in known.items() if "order" not in words_of(option, split.name)}
    return [option.name for option in fields(config) if option.init and option.name not in ways], lacking


def hashed_options(config: GPTDatasetConfig, split: Split) -> dict[str, Any]:
    """Return the fields of early names of plans but kind and number of samples: what decides on the order of a split.

    Args:
        config: options of the run.
        split: the split.

    Returns:
        Values by name; without `order` if its class has no name, so that no text stands for it.
    """
    early: dict[str, Any] = {name: getattr(config, name) for name in hashed_fields(config, split)[0]}
    blend = config.blend if config.blend_per_split is None else config.blend_per_split[split.value]
    is_named = config.order is None or find_kind(config.order) is not None
    order = config.order.pinned(config.storage_options).to_json() if config.order and is_named else None
    bookends = config.split_matrix and config.split_matrix[split.value]
    prefixes, weights = blend or ([], None)
    early |= {"prefixes": [*map(config.as_written, prefixes)], "weights": weights}
    return early | {"bookends": bookends, **({"order": order} if is_named else {}), "split": split.name}


def describe_options(config: GPTDatasetConfig, split: Split) -> dict[str, Any]:
    """Return what a stored run records of its config: the options that move a token, with absolute prefixes.

    Args:
        config: config of the run.
        split: the split that is stored.

    Returns:
        JSON values by name.
    """
    opened, lacking = replace(config, written_paths=WrittenPaths()), hashed_fields(config, split)[1]
    options = {name: value for name, value in hashed_options(opened, split).items() if name not in lacking}
    options["prefixes"] = [Location(prefix, config.storage_options).absolute for prefix in options["prefixes"]]
    described: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return described


def check_options(found: Mapping[str, Any], config: GPTDatasetConfig, uri: str) -> None:
    """Raise ConfigError unless a config asks for the order of a stored run.

    Fields that only one of both has are not compared: they are those of another version, or of a subclass.

    Args:
        found: `options` of the stored run.
        config: options of the run.
        uri: of the description.
    """
    needed = describe_options(config, Split[found["split"]])
    if wrong := [*_differences(found, needed)]:
        way = "give the config of the run that was stored, or store this one in another directory"
        raise ConfigError(redacted_text(f"{uri}: is of another order: {'; '.join(wrong)}; {way}"))


def _differences(found: Mapping[str, Any], needed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each field whose values differ; of lists that are equally long for the first such item."""
    for name in sorted(found.keys() & needed.keys()):
        one, other = found[name], needed[name]
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(one, other, strict=False)
            one, other = next((pair for pair in pairs if pair[0] != pair[1]), (f"{len(one):,}", f"{len(other):,}"))
        if one != other:
            way = ": if it is the same data, mount or link it where it was and name that" if name == "prefixes" else ""
            yield f"{name} (found {one}, the config has {other}){way}"


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
