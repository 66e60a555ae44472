"""Dataset of a run with a read plan: its samples, from the run's own tokens and without any index.

position ─ rows of the plan ─►  byte ranges of each `.bin` ─ one vectored read ─►  rows of the batch

Source: ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import ClassVar

import xxhash

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.stored.baked import StoredRunDataset, hashed_fields, hashed_options
from binidx.dataset.token_dataset import SourceRows, SourceTokens
from binidx.dataset.torch_bridge import is_first_rank
from binidx.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, redacted
from binidx.order.stored.planned_order import PlannedRequest, ReadPlan, check_local
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS

logger = logging.getLogger(__name__)


class PlannedDataset(StoredRunDataset):
    """Dataset of a run whose read plan `binidx prepare read-plan` has written.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError. No `.idx` and no index is opened: a process reads
    the description of the plan, the rows that it needs, and the tokens, in the version of which the plan was made. It
    opens each file at its first use.

    The state of a loader over it is that of a loader over the run's own dataset, if that has the "single" sampler.

    Args:
        directory: URI of the read plan.
        config: config of the run. It names the data that may be read; all that moves a token must be the run's.

    Attributes:
        order_identity: identity of the samples and their order, in JSON values: that of the run's own dataset, if its
            sampler is "single".

    Raises:
        ConfigError: the config asks for another order: another seed, blend or sequence_length, for example.
        FormatError: the description is invalid. On read: rows are damaged.
        ObjectNotFoundError: the description is missing: the plan is not finished. Or a file with tokens is: one on a
            disk when the plan is opened, a remote one on read.
        ObjectChangedError: a file with tokens is another one than that of which the plan was made: one on a disk when
            the plan is opened, a remote one on read, since looking it up would take a request for each file.

    Example:
        >>> dataset = binidx.PlannedDataset("s3://corpus/plan", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "PlannedDataset"
    stored: ReadPlan

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        folder = Location(directory, config.storage_options)
        super().__init__(directory, config, PlannedRequest(folder, config.prefixes))
        self.order_identity = self.order.identity
        with self._remedy():
            OPENS.map(check_local, [file for source in self.stored.sources for file in source.files])

    @staticmethod
    def locate(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> list[Location]:
        """Return where the plan of a split is that belongs to a config: its place, then that of early versions.

        The list is empty without a `path_to_cache`, for a list of validation sets, and for an order without a name.

        Args:
            kind: recorded name of the class of the datasets.
            config: config of the run.
            split: the split of the plan.
            num_samples: the least number of samples of the split; None is one epoch.
        """
        is_list = config.multiple_validation_sets and split is Split.valid
        early = {**hashed_options(config, split), "kind": kind, "num_samples": num_samples}
        if (cache := config.cache_directory) is None or not early["prefixes"] or is_list or "order" not in early:
            return []
        now = early.keys() - hashed_fields(config, split)[1]
        both = [json.dumps({name: early[name] for name in kept}, sort_keys=True, default=str) for kept in (now, early)]
        return [cache / f"{xxhash.xxh3_128_hexdigest(text.encode())}-{split.name}-read-plan" for text in both]

    def _read(self, parts: Sequence[SourceRows]) -> list[SourceTokens]:
        with self._remedy():
            return super()._read(parts)

    @contextlib.contextmanager
    def _remedy(self) -> Iterator[None]:
        """Add what to do to the error of a block that finds other data than those of the plan."""
        try:
            yield
        except (ObjectChangedError, ObjectNotFoundError) as error:
            way = "bring that back, or delete it and write the plan again with binidx prepare read-plan"
            raise type(error)(f"{error}; the read plan {self.directory} is of the data as it was; {way}") from error


def open_plan(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> PlannedDataset | None:
    """Open the plan of a split, with the arguments of `PlannedDataset.locate`.

    If there is none, its name is logged where the config asks for plans; else one request has looked for it, and one of
    other data, as after a run was moved with its directory, is not used.
    """
    places = PlannedDataset.locate(kind, config, split, num_samples)
    for folder in places if config.read_plan else places[:1]:
        if object_exists(folder / ReadPlan.last_file):
            try:
                return PlannedDataset(folder.uri, config)
            except ConfigError as error:
                if config.read_plan:
                    raise
                logger.warning("%s; the run is built without it", error)
    if places and config.read_plan and is_first_rank():
        logger.warning(
            "%s: no read plan, so each .idx is read; binidx prepare read-plan writes it", redacted(places[0].uri)
        )
    return None
