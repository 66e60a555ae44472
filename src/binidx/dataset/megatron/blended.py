"""Blend of several datasets in proportion to their weights."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Split, normalize
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import SEVERAL, OrderedDataset, index_array, number_samples
from binidx.dataset.token_dataset import TokenDataset
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import BlendError, ConfigError, redacted
from binidx.html_table import format_html_table
from binidx.index.blend import BlendIndex, build_blend_index, build_exhaustive_blend_index, check_blend_index
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext, IndexCache
from binidx.index.cache.index_files import Arrays, IndexFiles, recorded_name
from binidx.order.blended_order import BlendedOrder
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location

ARRAYS = ("dataset_index", "dataset_sample_index")
MAX_DATASETS = 32767
COUNTED_AT_ONCE = 1 << 20
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
        context: options of the build of the indices (not in Megatron Core).

    Attributes:
        order: which tokens make a sample, as a value: see `binidx.order.order_protocols.Order`.
        dataset_index: dataset of each sample, shape (size,), int16.
        dataset_sample_index: position of each sample in its dataset, shape (size,), int64.

    Raises:
        ConfigError: the datasets or weights cannot be blended.
        BlendError: the blend needs more samples of a dataset than it has.

    Example:
        >>> blend = binidx.BlendedDataset([en, code], [0.7, 0.3], 1000, config)
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
        *,
        context: BuildContext = DEFAULT_CONTEXT,
    ) -> None:
        check_blendable(datasets, weights, size)
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(list(weights))
        self.size = size
        self.config = config
        self._open(context)
        self._check_sizes()

    def _open(self, context: BuildContext) -> None:
        """Load or build the index arrays."""
        self.build_context, self.unique_identifiers = context, self._identifiers()
        self.index_digests = {}
        self._order = self._served = self._make_order(dict(zip(ARRAYS, self._load_or_build(), strict=True)))

    def _make_order(self, arrays: Arrays) -> BlendedOrder:
        return BlendedOrder([dataset._served for dataset in self.datasets], arrays, self._order_fields())

    def _order_fields(self) -> dict[str, Any]:
        """Return the fields of the identity of the order besides those of the datasets."""
        return {"class": recorded_name(type(self)), "weights": self.weights, "all": self.size is None}

    @property
    def parts(self) -> Sequence[MegatronDataset]:
        return self.datasets

    @cached_property
    def _samples(self) -> TokenDataset | None:
        """Reader of samples; None if a class of the user reads them by itself."""
        order = self.order
        if self.datasets[0].reads_by_itself:
            return None
        assembles = [dataset.assemble_function for dataset in self.datasets]
        return TokenDataset(order, [dataset.dataset for dataset in self.datasets], assembles)

    def __repr__(self) -> str:
        shares = zip(self.datasets, normalize(list(self.weights)), strict=False)
        parts = [f"{redacted(dataset.dataset_path or '')} {share:.1%}" for dataset, share in islice(shares, SHOWN)]
        parts += [f"{len(self.datasets) - SHOWN:,} more"] if len(self.datasets) > SHOWN else []
        samples = f"{len(self):,} samples x {self.config.sequence_length:,}"
        return f"{type(self).__name__}({', '.join(parts)}, {self.split.name}, {samples})"

    def _repr_html_(self) -> str:
        shares = zip(self.datasets, normalize(list(self.weights)), strict=False)
        rows = [(redacted(part.dataset_path or ""), share, len(part)) for part, share in shares]
        samples = f"{len(self):,} samples of {self.config.sequence_length:,} tokens"
        title = f"{type(self).__name__}, {self.split.name}: {samples}"
        return format_html_table(title, rows, ("dataset", "share", "samples built"))

    def __getitem__(self, idx: Any) -> Any:
        """Return a sample, or the list of the samples of a slice or of a list of numbers, which are read at once."""
        if isinstance(idx, SEVERAL):
            return list(self.__getitems__(number_samples(idx, len(self))))
        if self.order is not self._order:
            return self.__getitems__([idx])[0]
        dataset_id = self.dataset_index[idx]
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][int(self.dataset_sample_index[idx])]}

    def __getitems__(self, idxs: Sequence[int]) -> Sequence[Sample]:
        """Return the samples of a batch; the tokens of all datasets are read at once."""
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

    def _identifiers(self) -> OrderedDict[str, Any]:
        datasets = [dataset.unique_identifiers for dataset in self.datasets]
        return blend_identifiers(recorded_name(type(self)), datasets, self.split, self.weights, self.size)

    def _load_or_build(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        if self.config.path_to_cache is None:
            arrays = build_in_memory(self._build)
        else:
            cache = self._cache(self.config.path_to_cache)
            arrays = cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def _fingerprint(self) -> dict[str, Any]:
        """Return the inputs of the index arrays that `unique_description` does not contain: none."""
        return {}

    def _cache(self, directory: str) -> IndexCache:
        name = f"{self.unique_description_hash}-{recorded_name(type(self))}-{self.split.name}"
        trusted = self._check_foreign if self.config.trust_cache else None
        files = IndexFiles(Location(directory, self.config.storage_options), name)
        return IndexCache(files, trusted=trusted, context=self.build_context, digests=self.index_digests)

    def _build(self, writer: ArrayWriter) -> None:
        build_blend_arrays(writer, self.weights, self.size, self.config.num_dataset_builder_threads)

    def _check_foreign(self, arrays: Arrays) -> None:
        check_blend_index(arrays, list(map(len, self.datasets)), self.size)

    def _check_sizes(self) -> None:
        served = samples_per_dataset(self.dataset_index, len(self.datasets))
        for number, (dataset, count) in enumerate(zip(self.datasets, served, strict=True)):
            if count > len(dataset):
                raise BlendError(
                    f"{self.split.name} blend, dataset {number} ({dataset.dataset_path}): has {len(dataset)} samples, "
                    f"the blend needs {count}; raise mid_level_dataset_surplus from "
                    f"{self.config.mid_level_dataset_surplus}, say ten-fold"
                )


def blend_identifiers(
    name: str, datasets: Sequence[Any], split: Split, weights: Sequence[float], size: int | None
) -> OrderedDict[str, Any]:
    """Return the identifiers that Megatron hashes for the name of a blend's cache.

    Args:
        name: recorded name of the class of the blend.
        datasets: identifiers of each dataset.
        split: the split.
        weights: one per dataset.
        size: number of samples; None is all samples of the datasets.
    """
    return OrderedDict(
        [("class", name), ("datasets", datasets), ("split", split.name), ("weights", weights), ("size", size)]
    )


@contextlib.contextmanager
def blend_arrays(writer: ArrayWriter, weights: Sequence[float], size: int | None) -> Iterator[BlendIndex]:
    """Yield the two index arrays of a blend, each straight in its file, to be filled in the block.

    Args:
        writer: writes the arrays.
        weights: numbers of samples of the datasets if `size` is None.
        size: number of samples; None is all of them.
    """
    shape = (sum(map(int, weights)) if size is None else size,)
    with writer.array(ARRAYS[0], shape, np.int16) as ids, writer.array(ARRAYS[1], shape, np.int64) as samples:
        yield ids, samples


def build_blend_arrays(writer: ArrayWriter, weights: Sequence[float], size: int | None, threads: int) -> None:
    """Build the two index arrays of a blend.

    Args:
        writer: writes the arrays.
        weights: share of each dataset; without a size, its number of samples.
        size: number of samples; None is all samples of the datasets.
        threads: number of threads.
    """
    with blend_arrays(writer, weights, size) as out:
        if size is None:
            build_exhaustive_blend_index(np.asarray(weights, dtype=np.int64), num_threads=threads, out=out)
        else:
            build_blend_index(np.asarray(weights, np.float64), size, num_threads=threads, out=out)


def samples_per_dataset(dataset_index: NDArray[np.int16], num_datasets: int) -> list[int]:
    """Return the number of samples of each dataset.

    It counts in blocks, because NumPy copies what it counts to int64: 8 GB for a billion samples.

    Args:
        dataset_index: dataset of each sample, shape (size,).
        num_datasets: number of datasets of the blend.
    """
    served = np.zeros(num_datasets, np.int64)
    for rows in row_blocks(0, len(dataset_index), COUNTED_AT_ONCE):
        served += np.bincount(dataset_index[rows], minlength=num_datasets)
    return list(served.tolist())


def row_blocks(first: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of up to `size` rows that cover the rows from `first` to before `stop`."""
    return (slice(begin, min(begin + size, stop)) for begin in range(first, stop, size))


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
