"""A dataset of GPT samples in one call, and the config and builder that the call stands for."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from numbers import Number
from typing import TYPE_CHECKING, Any, SupportsIndex, Unpack

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import read_tokenizers, warn_of_tokenizers
from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.config import GPTDatasetConfig, SpecialTokens, Split, find_token
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.served import list_parts
from binidx.dataset.torch_bridge import GPTBatch, choose_topology, count_known_processes, is_first_rank
from binidx.errors import ConfigError, check_option_names, redacted, redacted_text, trims_traceback
from binidx.format.indexed_dataset import IndexedDataset
from binidx.jobs.parts import Workers
from binidx.loader.dataset_protocols import DatasetView
from binidx.run.run_file import Run
from binidx.storage.location import Location
from binidx.storage.settings import OURS
from binidx.tokenizers.describe import describe_tokenizer
from binidx.tokenizers.spec import TokenizerSpec

if TYPE_CHECKING:
    from binidx.loader.torch_loader import PretrainingLoader
    from binidx.run.display.sample_text import ShownSample
    from binidx.run.load_options import LoadOptions

logger = logging.getLogger(__name__)

OTHER_OPTIONS = {
    "mmap": "did you mean mmap_bin_files?",
    "shuffle": "samples are shuffled by random_seed",
    **dict.fromkeys(("batch_size", "consumed_samples", "num_workers", "mesh", "device"), "give it to loader()"),
}
"""Option of other libraries, or of the loader -> the hint."""
MOST_COMPARED = 100
"""Most datasets whose manifests `load_dataset` reads, at once, to compare tokenizers; `binidx plan` has no bound."""


@trims_traceback
def load_dataset(
    blend: Any,
    sequence_length: int,
    *,
    which: str = "train",
    split: str | Sequence[float] | None = None,
    num_samples: int | None = None,
    random_seed: int = 1234,
    tokenizer: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedDataset:
    """Open tokens in any store as a map-style dataset of GPT samples.

    Args:
        blend: prefix of a `.bin`/`.idx` pair, as text or Path; several in a list; a dict of prefixes and weights, or a
            list of (prefix, weight).
        sequence_length: S, tokens of a sample.
        which: "train", "valid" or "test".
        split: shares of train, valid and test, such as "99,1,0"; None: all is train.
        num_samples: the least number of samples, over as many epochs as that takes. None: one epoch; of a blend with
            weights, as many samples as the tokens of its data fill.
        random_seed: seed of the order; Megatron-LM's default.
        tokenizer: URI of a tokenizer (as `describe_tokenizer(URI)`), `SpecialTokens`, or any object that a config
            accepts. Only its EOD and its pad are used. None: neither is known, which is right unless the data contains
            pads. Where `eod_mask_loss`, `reset_position_ids` or `reset_attention_mask` needs an EOD and none is given,
            it is that of the datasets' manifests.
        cache_dir: directory of the disk cache of fetched bytes, on this node or shared by nodes. None: that of
            `storage_options`, else BINIDX_CACHE_DIR, else no disk cache.
        index_dir: directory of this node for `.idx` files and arrays of indices, without a disk cache. None: that of
            `storage_options`, else BINIDX_INDEX_DIR, else one of this user in the temporary directory.
        options: further fields of `GPTDatasetConfig`, such as `storage_options` and `path_to_cache`. With `read_plan`,
            the first start writes a read plan into `path_to_cache` while it trains, and later ones read no index.

    Returns:
        A dataset; `loader(batch_size=8)` makes its loader, and `as_code()` returns the config and builder in full.

    Raises:
        ConfigError: an unknown or contradicting option, a split without a share, or no EOD where one is needed.
        ObjectNotFoundError: a file is missing.

    Example:
        >>> train = binidx.load_dataset("s3://corpus/en", sequence_length=4096)
        >>> for batch in train.loader(batch_size=8):
        ...     loss = model(batch["tokens"], batch["labels"], batch["loss_mask"])

    Source: ours; samples and order are Megatron Core's.
    """
    if which not in Split.__members__:
        raise ConfigError(f"which: found {which!r}, needs 'train', 'valid' or 'test'")
    known = [field.name for field in fields(GPTDatasetConfig) if field.init]
    own = ("which", "num_samples", "cache_dir", "index_dir")
    check_option_names("load_dataset", options, [*known, *own], "help(binidx.GPTDatasetConfig) has all", OTHER_OPTIONS)
    if not isinstance(num_samples, SupportsIndex | None) or (num_samples is not None and num_samples < 1):
        raise ConfigError(f"num_samples: found {num_samples!r}, needs a whole number of at least 1")
    if isinstance(tokenizer, Number | Mapping | list | tuple):
        way = f"binidx.SpecialTokens(eod={tokenizer if isinstance(tokenizer, int) else 'ID'})"
        raise ConfigError(f"tokenizer: found {tokenizer!r}, needs {way} or a URI")
    given = tokenizer
    if tokenizer is None:
        tokenizer = SpecialTokens()
    elif isinstance(tokenizer, str | os.PathLike):
        given = os.fspath(tokenizer)
        tokenizer = describe_tokenizer(given)
    places = {"cache_dir": cache_dir, "index_dir": index_dir}
    if places := {name: place and Location.text_of(name, place) for name, place in places.items() if place is not None}:
        if len(places) == 2:
            raise ConfigError("cache_dir, index_dir: found both, need one: a disk cache holds the index files, too")
        stored = options.get("storage_options") or {}
        options["storage_options"] = {**stored, OURS: {**(stored.get(OURS) or {}), **places}}
    shares: Any = "1,0,0" if split is None else split
    config = GPTDatasetConfig(random_seed, sequence_length, blend, split=shares, tokenizer=tokenizer, **options)
    if config.mock:
        raise ConfigError("blend: found None; needs 's3://corpus/en', a list of such, or weights by prefix")
    if config.split_matrix is None or config.split_matrix[Split[which].value] is None:
        raise ConfigError(f"split: {config.split!r} has no {which}; give one such as split='99,1,0'")
    prefixes = [Location(prefix, config.storage_options) for prefix in (config.blend or ([], None))[0]]
    tokenizers = cache(lambda: read_tokenizers(prefixes))
    if config.needs_eod and find_token(config.tokenizer, "eod") is None:
        config.tokenizer = replace(config.tokenizer, eod=find_eod(config, tokenizers))
    if is_first_rank() and (given is not None or len(prefixes) > 1) and len(prefixes) <= MOST_COMPARED:
        spec = tokenizer if isinstance(tokenizer, TokenizerSpec) else None
        warn_of_tokenizers(tokenizers, "the given EOD", spec, find_token(config.tokenizer, "eod"))
    return LoadedDataset(config, Split[which], num_samples, given)


def _with_options() -> inspect.Signature:
    """Return the signature of `load_dataset` with every option and its default, as interactive shells show it."""
    own = {name: each for name, each in inspect.signature(load_dataset).parameters.items() if name != "options"}
    options = inspect.signature(GPTDatasetConfig).parameters
    named = [each.replace(kind=each.KEYWORD_ONLY) for name, each in options.items() if name not in own]
    return inspect.Signature([*own.values(), *named], return_annotation="LoadedDataset")


vars(load_dataset)["__signature__"] = _with_options()


def find_eod(config: GPTDatasetConfig, read: Callable[[], Mapping[str, Mapping[str, Any]]]) -> int:
    """Return the EOD that the manifests of a blend name; `read` returns their tokenizers, as `read_tokenizers`.

    Raises:
        ConfigError: the tokenizer is the user's own, a dataset has no manifest with an EOD, or they differ.
    """
    flags = ", ".join(name for name in GPTDatasetConfig.EOD_FLAGS if getattr(config, name))
    way = "tokenizer=binidx.SpecialTokens(eod=ID) names it"
    if not isinstance(config.tokenizer, SpecialTokens | TokenizerSpec):
        raise ConfigError(f"{flags}: needs an EOD, {type(config.tokenizer).__name__} has none; {way}")
    eods = {prefix: tokenizer.get("eod") for prefix, tokenizer in read().items()}
    prefix, eod = next(iter(eods.items()))
    if other := next((other for other, found in eods.items() if found != eod or found is None), None):
        found = "no manifest with one" if eods[other] is None else f"{eods[other]}, {prefix} has {eod}"
        raise ConfigError(f"{flags}: needs an EOD (found {found}: {other}); {way}")
    assert eod is not None
    logger.info("%s: the EOD is %d, as the manifest of %s has it", flags, eod, redacted(prefix))
    return int(eod)


class LoadedDataset(DatasetView):
    """GPT samples of one split: a map-style dataset of torch. Made by `load_dataset`.

    Args:
        config: options of the samples.
        split: the split.
        num_samples: the least number of samples; None as for `load_dataset`.
        tokenizer: as the user gave it to `load_dataset`, for `as_code`.

    Attributes:
        wrapped: the `GPTDataset`, the `BlendedDataset` of several, or the `PlannedDataset` of a read plan.
        config, sizes: of the builder; `binidx.Run(dataset.config, dataset.sizes, 8)` is the run that the tools read.
    """

    def __init__(self, config: GPTDatasetConfig, split: Split, num_samples: int | None, tokenizer: Any) -> None:
        self.config, self.split, self._tokenizer = config, split, tokenizer
        opened: dict[str, IndexedDataset] = {}
        if num_samples is None and config.blend and config.blend[1] is not None:
            opened, num_tokens = BlendedMegatronDatasetBuilder.open_counted(GPTDataset, config, split)
            num_samples = max(1, num_tokens // config.sequence_length)
        self.sizes = [num_samples if other is split else 0 for other in Split]
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, self.sizes, lambda: True, config, splits=[split], opened=opened
        )
        built: Any = builder.build()[split.value]
        super().__init__(built)
        if not len(self):
            needed = f"sequence_length + 1 = {config.sequence_length + 1:,}"
            raise ConfigError(
                f"{built}: no sample (found no document, or fewer tokens than {needed}); give more data, a smaller "
                "sequence_length, or num_samples, which repeats the documents"
            )
        if config.read_plan and list_parts(built) and is_first_rank():  # no read plan was there
            threading.Thread(
                target=_write_plan, args=(built, num_samples), name="binidx-read-plan", daemon=True
            ).start()

    @trims_traceback
    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return the tokens of samples alone, int32, shape (B, S + 1), as `GPTDataset.read_tokens`."""
        wrapped: Any = self.wrapped
        tokens: NDArray[np.int32] = wrapped.read_tokens(idxs)
        return tokens

    @trims_traceback
    def loader(
        self, batch_size: int, *, consumed_samples: int = 0, mesh: Any = None, **options: Any
    ) -> PretrainingLoader[GPTBatch]:
        """Return a loader of the batches of this rank; see `build_pretraining_data_loader`.

        Args:
            batch_size: samples of a batch of this rank.
            consumed_samples: samples served before, over all ranks.
            mesh: `DeviceMesh` of one dimension, of the ranks that read samples of their own, as mesh["dp"]. None: the
                data-parallel ranks of Megatron's `parallel_state` if it is initialized, else all processes of the
                group; which, is logged.
            options: further arguments of `build_pretraining_data_loader`, such as `num_workers`; `data_parallel_rank`
                and `data_parallel_size` replace `mesh`.

        Returns:
            A DataLoader with a state.

        Raises:
            ConfigError: ranks form groups, as those of a mesh of several dimensions, and neither `mesh` nor a rank is
                given.
        """
        from binidx.loader.torch_loader import build_pretraining_data_loader

        if not isinstance(batch_size, SupportsIndex) or operator.index(batch_size) < 1:
            raise ConfigError(f"batch_size: found {batch_size!r}, need a whole number of at least 1")
        names = ("data_parallel_rank", "data_parallel_size")
        if given := [name for name in names if options.get(name) is not None]:
            if mesh is not None:
                raise ConfigError(f"mesh, {', '.join(given)}: found both, need one of them")
        elif topology := choose_topology(mesh):
            options |= zip(names, topology, strict=True)
            if (count := count_known_processes()) > 1 and not topology.rank:
                text = "loader: data_parallel_size is %d, of %d processes; mesh= names other ranks"
                logger.info(text, topology.size, count)
        loader = build_pretraining_data_loader(self.wrapped, consumed_samples, batch_size, **options)
        assert loader is not None
        if not given:
            loader.chosen_by = "processes" if mesh is None else "mesh"
        return loader

    def show(self, idx: int, tokenizer: str | None = None) -> ShownSample:
        """Return a sample as text; see `show_sample`.

        Args:
            idx: number of the sample.
            tokenizer: any that `describe_tokenizer` takes; None: that of `load_dataset` if it was a URI, else that in
                the manifest beside the data.

        Returns:
            Text in a terminal, HTML in a notebook.
        """
        from binidx.run.display.sample_text import show_sample

        own = self._tokenizer if isinstance(self._tokenizer, str) else None
        return show_sample(self.wrapped, idx, tokenizer or own)

    def as_run(self, **options: Any) -> Run:
        """Return the run that reads this dataset, which the commands take.

        Args:
            options: further arguments of `Run`, such as `micro_batch_size` (1 by default) and `data_parallel_size`.

        Returns:
            The run; it needs the train split.

        Raises:
            ConfigError: another split, or an invalid option.
        """
        if self.split is not Split.train:
            raise ConfigError(f"which: found {self.split.name}, a run reads train")
        return Run(self.config, self.sizes, **{"micro_batch_size": 1, **options})

    def as_code(self) -> str:
        """Return the Python code that builds the same dataset, with Megatron's names.

        Returns:
            Lines that define `config` and the dataset; `tokenizer` and `storage_options` are the caller's, if given.
        """
        lines = [f"    {name}={text}," for name, text in self._fields().items()]
        build = f"binidx.GPTDataset, {self.sizes}, lambda: True, config"
        built = [
            f"{self.split.name} = binidx.BlendedMegatronDatasetBuilder(",
            f"    {build}",
            f").build()[{self.split.value}]",
        ]
        return redacted_text("\n".join(["config = binidx.GPTDatasetConfig(", *lines, ")", *built]))

    def _fields(self) -> dict[str, str]:
        """Return the fields of the config that differ from their defaults, or have none in Megatron Core, as code."""
        values = {field.name: (getattr(self.config, field.name), field) for field in fields(self.config) if field.init}
        named = {
            name: repr(value)
            for name, (value, field) in values.items()
            if name in GPTDatasetConfig.EOD_FLAGS or value != field.default
        }
        if isinstance(self._tokenizer, str):
            eod = f", eod={self.config.tokenizer.eod}" if self.config.needs_eod else ""
            named["tokenizer"] = f"binidx.describe_tokenizer({self._tokenizer!r}{eod})"
        else:
            own = isinstance(self.config.tokenizer, SpecialTokens)
            named["tokenizer"] = f"binidx.{self.config.tokenizer!r}" if own else "tokenizer"
        if self.config.order is not None:
            named["order"] = repr(self.config.order.to_json())
        if self.config.storage_options is not None:
            places = {**self.config.storage_options.get(OURS, {})}
            only = places.keys() <= {"cache_dir", "index_dir"} and {OURS} == self.config.storage_options.keys()
            named["storage_options"] = repr({OURS: places}) if only else "storage_options"  # others may hold secrets
        return named


def _write_plan(dataset: Any, num_samples: int | None) -> None:
    """Write the read plan of a dataset for later starts, and log the outcome."""
    from binidx.run.stored.read_planning import prepare_read_plan

    try:
        logger.info("%s: the next start reads no index", prepare_read_plan(dataset, num_samples, Workers(count=1)))
    except Exception as error:
        logger.warning("read_plan: not written: %s", redacted_text(str(error)))
