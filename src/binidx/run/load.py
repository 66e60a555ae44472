"""A dataset of GPT samples in one call, and the config and builder that the call stands for."""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blend_arguments import parse_blend
from binidx.dataset.builder import BlendedMegatronDatasetBuilder, open_low_level_datasets
from binidx.dataset.config import MASK_FLAGS, GPTDatasetConfig, SpecialTokens, Split, split_range
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.planned import PlannedDataset
from binidx.dataset.torch_bridge import is_first_rank
from binidx.errors import ConfigError, redacted_text
from binidx.format.indexed_dataset import IndexedDataset
from binidx.jobs.parts import ONE_THREAD
from binidx.loader.dataset_protocols import DatasetView
from binidx.order.order_options import format_order
from binidx.prepare.tokenizers.describe import describe_tokenizer

if TYPE_CHECKING:
    from binidx.loader.torch_loader import PretrainingLoader
    from binidx.run.display.sample_text import ShownSample

logger = logging.getLogger(__name__)

SHOWN = ("random_seed", "sequence_length", "blend", "split", "tokenizer", *MASK_FLAGS)
"""Fields of a config that `as_code` prints also where they have their defaults."""


def load_dataset(
    blend: Any,
    sequence_length: int,
    *,
    which: str = "train",
    split: str | Sequence[float] | None = None,
    num_samples: int | None = None,
    random_seed: int = 1234,
    tokenizer: Any = None,
    **options: Any,
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
            pads, or `eod_mask_loss`, `reset_position_ids` or `reset_attention_mask` is set, which need an EOD.
        options: further fields of `GPTDatasetConfig`, such as `storage_options` and `path_to_cache`. With `read_plan`,
            the first start writes a read plan into `path_to_cache` while it trains, and later ones read no index.

    Returns:
        A dataset; `loader(batch_size=8)` makes its loader, and `as_code()` returns the config and builder in full.

    Raises:
        ConfigError: an unknown or contradicting option, or a split without a share.
        ObjectNotFoundError: a file is missing.

    Example:
        >>> train = binidx.load_dataset("s3://corpus/en", sequence_length=4096)
        >>> for batch in train.loader(batch_size=8):
        ...     loss = model(batch["tokens"], batch["labels"], batch["loss_mask"])

    Source: ours; samples and order are Megatron Core's.
    """
    if which not in Split.__members__:
        raise ConfigError(f"which: found {which!r}, needs 'train', 'valid' or 'test'")
    if unknown := sorted(options.keys() - {field.name for field in fields(GPTDatasetConfig) if field.init}):
        raise ConfigError(f"load_dataset: unknown option {', '.join(unknown)}; help(binidx.GPTDatasetConfig) has all")
    given = tokenizer
    if tokenizer is None:
        tokenizer = SpecialTokens()
    elif isinstance(tokenizer, str | os.PathLike):
        given = os.fspath(tokenizer)
        tokenizer = describe_tokenizer(given)
    shares: Any = "1,0,0" if split is None else split
    parsed = parse_blend("blend", blend)
    config = GPTDatasetConfig(random_seed, sequence_length, parsed, split=shares, tokenizer=tokenizer, **options)
    if config.split_matrix is None or config.split_matrix[Split[which].value] is None:
        raise ConfigError(f"split: {config.split!r} has no {which}; give one such as split='99,1,0'")
    return LoadedDataset(config, Split[which], num_samples, given)


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
        prefixes, weights = config.blend or ([], None)
        opened: dict[str, IndexedDataset] = {}
        if num_samples is None and weights is not None:
            opened = open_low_level_datasets(GPTDataset, config, prefixes)
            num_samples = samples_of_epoch([opened[prefix] for prefix in prefixes], config, split)
        self.sizes = [num_samples if other is split else 0 for other in Split]
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, self.sizes, lambda: True, config, splits=[split], opened=opened
        )
        built: Any = builder.build()[split.value]
        super().__init__(built)
        if config.read_plan and not isinstance(built, PlannedDataset) and is_first_rank():
            threading.Thread(
                target=_write_plan, args=(built, num_samples), name="binidx-read-plan", daemon=True
            ).start()

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return the tokens of samples alone, int32, shape (B, S + 1), as `GPTDataset.read_tokens`."""
        wrapped: Any = self.wrapped
        tokens: NDArray[np.int32] = wrapped.read_tokens(idxs)
        return tokens

    def loader(self, batch_size: int, *, consumed_samples: int = 0, **options: Any) -> PretrainingLoader:
        """Return a loader of the batches of this rank; see `build_pretraining_data_loader`.

        Args:
            batch_size: samples of a batch of this rank.
            consumed_samples: samples served before, over all ranks.
            options: further arguments of `build_pretraining_data_loader`, such as `data_parallel_rank` and
                `data_parallel_size`, which several processes need, and `num_workers`.

        Returns:
            A DataLoader with a state.
        """
        from binidx.loader.torch_loader import build_pretraining_data_loader

        if not isinstance(batch_size, SupportsIndex) or operator.index(batch_size) < 1:
            raise ConfigError(f"batch_size: found {batch_size!r}, need a whole number of at least 1")
        loader = build_pretraining_data_loader(self.wrapped, consumed_samples, batch_size, **options)
        assert loader is not None
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
        """Return the fields of the config that matter, as code."""
        values = {field.name: (getattr(self.config, field.name), field) for field in fields(self.config) if field.init}
        named = {
            name: repr(value) for name, (value, field) in values.items() if name in SHOWN or value != field.default
        }
        if isinstance(self._tokenizer, str):
            named["tokenizer"] = f"binidx.describe_tokenizer({self._tokenizer!r})"
        else:
            own = isinstance(self.config.tokenizer, SpecialTokens)
            named["tokenizer"] = f"binidx.{self.config.tokenizer!r}" if own else "tokenizer"
        if self.config.order is not None:
            named["order"] = repr(format_order(self.config.order))
        if self.config.storage_options is not None:
            named["storage_options"] = "storage_options"  # may hold secrets
        return named


def _write_plan(dataset: Any, num_samples: int | None) -> None:
    """Write the read plan of a dataset for later starts, and log the outcome."""
    from binidx.run.provenance.read_planning import prepare_read_plan

    try:
        logger.info("%s: the next start reads no index", prepare_read_plan(dataset, num_samples, ONE_THREAD))
    except Exception as error:
        logger.warning("read_plan: not written: %s", redacted_text(str(error)))


def samples_of_epoch(datasets: Sequence[IndexedDataset], config: GPTDatasetConfig, split: Split) -> int:
    """Return the number of samples that the tokens of a split fill, over all datasets of a blend.

    Args:
        datasets: the stored sequences of each prefix.
        config: options of the run.
        split: the split.
    """
    shares = (config.split_matrix or [])[split.value] or (0.0, 0.0)
    counts = [dataset.index.tokens_of(split_range(shares, len(dataset))) for dataset in datasets]
    return max(1, sum(counts) // config.sequence_length)
