"""Dataset of a run with a read plan: its samples, read from the run's own tokens without any index.

position ─ rows of the plan ─►  byte ranges of each `.bin` ─ one vectored read ─►  rows of the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, choose_pad_token
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, redacted
from binidx.format.bin_file import strip_bin_suffix
from binidx.format.idx import DType
from binidx.format.virtual import named_location
from binidx.native.gpt_samples import GPTRows
from binidx.order.order_protocols import Numbers
from binidx.order.read_plan import PlannedFile, PlannedPieces, PlannedRows, read_plan
from binidx.order.source_order import join_ranges
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_of, layered, open_stored
from binidx.storage.ranges import read_many
from binidx.storage.requests.remote_object import recorded_object
from binidx.storage.stores.identity import same_identity


class PlannedDataset:
    """Dataset of a run whose read plan `binidx read-plan` has written.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError. No `.idx` and no index is opened: a process reads
    the description of the plan, the rows that it needs, and the tokens, in the version of which the plan was made. It
    opens each file at its first use.

    The state of a loader over it is that of a loader over the run's own dataset, if that has the "single" sampler.

    Args:
        directory: URI of the read plan.
        config: config of the run. It names the data that may be read; sequence_length, extra token and masks must be
            the run's.

    Raises:
        ConfigError: the config has another sequence_length or extra token, or does not name a prefix of the plan.
        FormatError: the description is invalid. On read: rows are damaged.
        ObjectNotFoundError: the description is missing: the plan is not finished.
        ObjectChangedError: on read, a file with tokens is another one than that of which the plan was made.
            ObjectNotFoundError: it is missing.

    Example:
        >>> dataset = binidx.PlannedDataset("s3://corpus/plan", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "PlannedDataset"

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        self.directory, self.config = Location(directory, config.storage_options), config
        self.plan, self.plan_digest = read_plan(self._file)
        check_plannable(config)
        needed = (config.sequence_length, config.add_extra_token_to_sequence)
        found = (self.plan.sequence_length, self.plan.add_extra_token)
        if needed != found:
            raise ConfigError(
                f"{self._file}: sequence_length and extra token (found {found}, need {needed}); write the plan again"
            )
        self.readers  # noqa: B018 - checks that the config names them

    @property
    def _file(self) -> Location:
        return self.directory / "readplan.json"

    def __len__(self) -> int:
        return self.plan.stop

    def __repr__(self) -> str:
        positions = f"positions {self.plan.first:,} to {self.plan.stop:,}"
        return f"PlannedDataset({redacted(self.directory.uri)}, {positions} x {self.config.sequence_length:,})"

    def __getitem__(self, idx: int) -> Sample:
        sample: Sample = self.__getitems__([idx])[0]
        return sample

    def __getitems__(self, idxs: Sequence[int]) -> Samples:
        """Return the samples at these positions: their rows are read at once, and then their tokens.

        Raises:
            IndexError: a position is not stored.
        """
        positions = np.asarray(idxs, np.int64)
        if len(positions) and not (self.plan.first <= positions.min() and positions.max() < self.plan.stop):
            stored = f"{self.plan.first} to {self.plan.stop}"
            raise IndexError(f"{self.directory}: positions {list(idxs)} not stored (found {stored})")
        rows = GPTRows(self._assemble.recipe, len(positions))
        pieces = self._rows.read(positions)
        self._fill(rows, pieces)
        samples = self._assemble.finish(rows)
        assert isinstance(samples, Samples)  # as GPTAssemble makes them
        ids = {"dataset_id": pieces.sources.astype(np.int16)} if self.plan.blended else {}
        return Samples(len(positions), samples.columns, samples.shared, ids)

    def _fill(self, rows: GPTRows, pieces: PlannedPieces) -> None:
        """Read the tokens of all sources at once, and write them to the rows of the batch."""
        parts, reads = [], []
        for source in np.unique(pieces.sources).tolist():
            places = np.flatnonzero(pieces.sources == source)
            first, stop = pieces.bounds[places], pieces.bounds[places + 1]
            dtype, own = np.dtype(self.plan.sources[source].dtype), join_ranges(first, stop)
            parts.append((dtype, np.concatenate([[0], np.cumsum(stop - first)]), places.tolist()))
            reads.append((self.readers[source], _ranges(pieces, own, dtype.itemsize)))
        try:
            views = read_many(reads)
        except (ObjectChangedError, ObjectNotFoundError) as error:
            again = "is of the data as it was; bring that back, or write the plan again with binidx read-plan"
            raise type(error)(f"{error}; the read plan {self.directory} {again}") from error
        for (dtype, bounds, own_rows), own_views in zip(parts, views, strict=True):
            code = DType.code_from_dtype(dtype)
            rows.fill(own_views, bounds, own_rows, dtype_code=code, item_bytes=dtype.itemsize)

    @cached_property
    def _assemble(self) -> GPTAssemble:
        pad = choose_pad_token(self.config.tokenizer, bool(self.config.allow_ambiguous_pad_tokens))
        return GPTAssemble.of(self.config, pad, masks_ends=self.plan.masks_ends)

    @cached_property
    def _rows(self) -> PlannedRows:
        return PlannedRows(self.directory, self.plan, self.plan_digest)

    @cached_property
    def readers(self) -> list[RangeReader]:
        """Readers of the plain tokens of each source, whose files are opened at the first read."""
        blends = [self.config.blend, *(self.config.blend_per_split or ())]
        named = {prefix for blend in blends if blend for prefix in blend[0]}

        def read_lazily(file: PlannedFile) -> LazyReader:
            is_named = strip_bin_suffix(file.uri) in named
            location = Location(file.uri, self.config.storage_options) if is_named else None
            location = location or named_location(file.uri, self._file)
            return LazyReader(file.uri, file.size, partial(open_planned, location, file, self.config.mmap_bin_files))

        return [
            JoinedReader(source.prefix, [*map(read_lazily, source.files)], [file.num_bytes for file in source.files])
            for source in self.plan.sources
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in UNPICKLED}

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the tokens.

        Returns:
            One reader for each source; its files may not be open yet.
        """
        return self.readers

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values: that of the run's own dataset, if it has the
        "single" sampler."""
        return self.plan.order


UNPICKLED = ("_assemble", "_rows", "readers")
"""Attributes that are made again."""


def check_plannable(config: GPTDatasetConfig) -> None:
    """Raise ConfigError for samples that depend on more than the places of their tokens."""
    if isinstance(config, GPTFIMDatasetConfig):
        raise ConfigError(
            "fim_rate: found fill in the middle, a read plan has no numbers to seed it; train without one"
        )


def open_planned(location: Location, file: PlannedFile, mmap: bool) -> RangeReader:
    """Open a file with tokens in the version of which a plan was made; a remote one without a HEAD where possible.

    Args:
        location: of the file.
        file: what the plan has of it.
        mmap: map a local file.

    Raises:
        ObjectChangedError: it is another version, as far as that is known before it is read.
        ObjectNotFoundError: the settings require checksums, and there were none.
    """
    local, verify, codec = location.local_path is not None, location.settings.verify, codec_of(location.uri)
    if verify and codec == "raw" and file.sums is None:
        raise ObjectNotFoundError(f"{location}{SUFFIX}: not there when the plan was written; BINIDX_VERIFY=1 needs it")
    stored = _open_version(location, file.identity, mmap)
    checks = bool(verify) if local else verify is not False
    sums = _open_version(location + SUFFIX, file.sums, mmap) if file.sums and checks else None
    return layered(stored, location, sums=sums, codec=codec)


def _open_version(location: Location, identity: Any, mmap: bool) -> RangeReader:
    found = None if location.local_path is not None else recorded_object(location.uri, identity)
    stored = open_stored(location, mmap=mmap, found=found)
    if not same_identity(identity, stored.identity):
        raise ObjectChangedError(f"{location}: found {dict(stored.identity)}, need {dict(identity)}")
    return stored


def _ranges(pieces: PlannedPieces, numbers: Numbers, item_bytes: int) -> list[Range]:
    starts = pieces.starts[numbers]
    stops = starts + pieces.num_tokens[numbers] * item_bytes
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
