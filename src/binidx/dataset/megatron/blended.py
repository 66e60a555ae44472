"""Blend of several datasets in proportion to their weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import SEVERAL, OrderedDataset, current_build, index_array, number_samples
from binidx.dataset.token_dataset import Assemble, TokenDataset
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, redacted
from binidx.forks import cached_property
from binidx.html_table import format_html_table
from binidx.index.blend import ARRAYS, normalize
from binidx.index.cache.index_files import recorded_name
from binidx.order.blended_order import BlendedOrder
from binidx.order.opener import Opener
from binidx.order.order_protocols import Order
from binidx.order.requests import BlendRequest, Request
from binidx.storage.interfaces import RangeReader

MAX_DATASETS = 32767
SHOWN = 3
"""Datasets that a `repr` names."""


class BlendedDataset(OrderedDataset):
    """Samples of several datasets, each drawn from the dataset that is furthest behind its weight.

    A sample is the dataset's own, with `dataset_id` (int16) before its other keys.

    Args:
        datasets: datasets of one class and one split.
        weights: one per dataset, all floats or all ints, above 0.
        size: number of samples; None is `weights[d]` samples of each dataset d.
        config: options of the run. The indices are cached in `path_to_cache`, and nowhere if it is None, since the
            datasets may be in several stores.

    Attributes:
        order: spans of the tokens of each sample: see `binidx.order.order_protocols.Order`.
        dataset_index: dataset of each sample, shape (size,), int16.
        dataset_sample_index: position of each sample in its dataset, shape (size,), int64.

    Raises:
        ConfigError: the datasets or weights cannot be blended.
        BlendError: the blend needs more samples of a dataset than it has.

    Example:
        >>> blend = binidx.megatron.BlendedDataset([en, code], [0.7, 0.3], 1000, config)
        >>> blend[0]["dataset_id"]
        np.int16(0)

    Source: Megatron Core, `BlendedDataset`; batches are ours.
    """

    RECORDED_NAME: ClassVar[str] = "BlendedDataset"

    dataset_index, dataset_sample_index = map(index_array, ARRAYS)

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float] | Sequence[int],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        check_blendable(datasets, weights, size)
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.size = size
        self.config = config
        self.build_context, self.index_digests = current_build(), {}
        blend = BlendRequest(
            request_parts(self.datasets, config),
            [*weights],
            size,
            self.split.name,
            config.cache_directory,
            recorded_name(type(self)),
            config.mid_level_dataset_surplus,
            self._open_index,
        )
        self.weights = blend.shares
        self.request = self.request_order(blend)
        self._opened_order = self.opener.open(self.request)

    def _open_index(self, request: BlendRequest, parts: Sequence[Order], opener: Opener) -> BlendedOrder:
        """Return the order of the blend, whose arrays `_load_or_build` returns."""
        self.blend_request, self.part_lengths = request, [*map(len, parts)]
        self.unique_identifiers = request.identifiers
        self._order = order = request.order_of(parts, dict(zip(ARRAYS, self._load_or_build(), strict=True)))
        self.check()
        return order

    def _load_or_build(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        arrays = self.blend_request.load_or_build(self.part_lengths, self.opener)
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def check(self) -> None:
        """Raise BlendError unless the order serves the samples of the datasets that it has to serve."""
        self.blend_request.check_rows(self._order)

    @property
    def parts(self) -> Sequence[MegatronDataset]:
        return self.datasets

    @cached_property
    def _samples(self) -> TokenDataset | None:
        """Reader of samples; None if a class of the user reads them by itself."""
        order = self.order
        if self.datasets[0].reads_by_itself:
            return None
        return TokenDataset(order, [dataset.dataset for dataset in self.datasets], self._assembles)

    @property
    def _assembles(self) -> Sequence[Assemble]:
        """Function of each source of the order that makes its samples."""
        return [dataset.assemble_function for dataset in self.datasets]

    def __repr__(self) -> str:
        shares = zip(self.datasets, normalize(list(self.weights)), strict=False)
        parts = [f"{redacted(dataset.dataset_path or '')} {share:.1%}" for dataset, share in islice(shares, SHOWN)]
        parts += [f"{len(self.datasets) - SHOWN:,} more"] if len(self.datasets) > SHOWN else []
        samples = f"{len(self):,} samples x {self.config.sequence_length:,}"
        return f"{type(self).__name__}({', '.join(parts)}, {self.split.name}, {samples})"

    def _repr_html_(self) -> str:
        shares = zip(self.datasets, normalize(list(self.weights)), strict=False)
        counts = zip(shares, self.part_lengths, strict=False)
        rows = [(redacted(part.dataset_path or ""), share, count) for (part, share), count in counts]
        samples = f"{len(self):,} samples of {self.config.sequence_length:,} tokens"
        title = f"{type(self).__name__}, {self.split.name}: {samples}"
        return format_html_table(title, rows, ("dataset", "share", "samples built"))

    def __getitem__(self, idx: Any) -> Any:
        """Return a sample, or the list of the samples of a slice or of a list of numbers, which are read at once."""
        if isinstance(idx, SEVERAL):
            return list(self.__getitems__(number_samples(idx, len(self))))
        return self._read_one(idx)

    def _read_one(self, idx: int) -> Sample:
        if self.order is not self._order or self._order.has_views or self._order.windows is not None:
            return self._read_batch([idx])[0]
        dataset_id = self.dataset_index[idx]
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][int(self.dataset_sample_index[idx])]}

    def __getitems__(self, idxs: Sequence[int]) -> Sequence[Sample]:
        """Return the samples of a batch; the tokens of all datasets are read at once."""
        return self._read_batch(idxs)

    def _read_batch(self, idxs: Sequence[int]) -> Sequence[Sample]:
        if self._samples is None:
            ids = self.dataset_index[np.asarray(idxs, np.int64)]
            samples = self._read_by_dataset(ids, idxs)
        else:
            sources, samples = self._samples.read_with_sources(idxs)
            ids = sources.astype(np.int16)
        if isinstance(samples, Samples):
            return Samples(len(ids), samples.columns, samples.shared, {"dataset_id": ids})
        return [{"dataset_id": d, **sample} for d, sample in zip(ids, samples, strict=True)]

    def _read_by_dataset(self, ids: NDArray[np.int16], idxs: Sequence[int]) -> Sequence[Sample]:
        """Return the samples that the datasets' own methods read."""
        numbers, batch = self.dataset_sample_index[list(idxs)], list[Sample]([{}] * len(ids))
        for dataset_id in np.unique(ids).tolist():
            rows = np.flatnonzero(ids == dataset_id)
            samples = self.datasets[dataset_id].__getitems__(numbers[rows].tolist())
            for row, sample in zip(rows.tolist(), samples, strict=True):
                batch[row] = sample
        return batch

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return only the tokens of samples, int32, shape (B, S + 1), as `GPTDataset.read_tokens` does.

        Args:
            idxs: positions in the blend, B of them.

        Returns:
            Tokens of sample `idxs[i]` in row i; the last column is the label of the last token.

        Raises:
            ConfigError: the datasets are not GPT datasets with integer tokens of up to 32 bits.
        """
        if self._samples is None:
            raise ConfigError(f"{type(self.datasets[0]).__name__}: cannot serve tokens alone (only GPT datasets can)")
        return self._samples.read_text(idxs)

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored bytes of all datasets.

        Returns:
            Those of each dataset, in order.
        """
        return [reader for dataset in self.datasets for reader in dataset.token_readers()]


def request_parts(datasets: Sequence[MegatronDataset], config: BlendedMegatronDatasetConfig) -> list[Request]:
    """Return the requests of which a blend of datasets is drawn.

    Args:
        datasets: the datasets.
        config: of the blend. A dataset whose own config asks for another order keeps that order.
    """
    option = config.order_option
    return [part.opened if part.config.order_option == option else part.request for part in datasets]


def check_blendable(
    datasets: Sequence[MegatronDataset], weights: Sequence[float] | Sequence[int], size: int | None
) -> None:
    """Raise ConfigError unless the datasets are of one kind and split, and the weights fit them."""
    if not 0 < len(datasets) < MAX_DATASETS or len(datasets) != len(weights):
        raise ConfigError(
            f"blend: found {len(datasets)} datasets and {len(weights)} weights, needs 1 to {MAX_DATASETS - 1}, one each"
        )
    kinds = {(type(dataset), dataset.index_split) for dataset in datasets}
    if len(kinds) > 1:
        raise ConfigError(f"blend: found {sorted(f'{kind.__name__} {split.name}' for kind, split in kinds)}, needs one")
    for dataset, weight in zip(datasets, weights, strict=True):
        if not weight > 0:
            raise ConfigError(
                f"{dataset.dataset_path}: weight {weight} in the {dataset.index_split.name} blend, needs above 0; "
                "a dataset with no sample in this split has to leave the blend"
            )
    if len({type(weight) for weight in weights}) > 1 or (size is None and any(w != int(w) for w in weights)):
        raise ConfigError(
            f"blend: found weights {list(weights)}, needs all floats, or all whole numbers without a size"
        )
