"""An index that stands in a cache without our manifest: Megatron's own. It says nothing of the data that it is of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError, IndexBuildError, ObjectNotFoundError, StorageError
from binidx.index.cache.building import Arrays
from binidx.index.cache.index_files import DESCRIPTION, MANIFEST, IndexFiles, parse_npy
from binidx.index.documents import Documents
from binidx.native.locate import Orders, Sequences
from binidx.storage.writing.publish import object_exists

logger = logging.getLogger(__name__)


Check = Callable[[Arrays], None]


"""Raises ValueError for arrays that are no index of this dataset."""


SAMPLES_CHECKED = 1000


BLOCK = 1 << 20


WAY_OUT = "remove the files, or leave trust_cache out to build it anew"


def load_foreign(files: IndexFiles, names: Sequence[str], check: Check) -> Arrays | None:
    """The arrays as they stand, after `check`; None where one is missing.

    Raises:
        FormatError: they are no index of this dataset. (What was to be trusted is not quietly replaced.)
    """
    try:
        arrays = {name: parse_npy(files.read(f"{name}.npy", cache="disk")) for name in names}
        check(arrays)
    except ObjectNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise FormatError(f"{files.uri('*.npy')}: trust_cache finds {error}; {WAY_OUT}") from error
    logger.warning("%s: taken as it is (trust_cache): nothing proves which data it was built of", files.uri("*.npy"))
    return arrays


def tell_of_foreign(files: IndexFiles) -> None:
    """Say that an index which another program left is about to be replaced."""
    try:
        ours = object_exists(files.uri(MANIFEST), files.storage_options)
        if ours or not object_exists(files.uri(DESCRIPTION), files.storage_options):
            return
    except StorageError:
        return
    logger.warning(
        "%s: no manifest of ours says which data they are of, so they are built anew and replaced; "
        "trust_cache='megatron' takes what Megatron left as it is",
        files.uri("*.npy"),
    )


def check_gpt_index(
    arrays: Arrays, sequences: Sequences, documents: Documents, sequence_length: int, extra: bool
) -> None:
    """Whether these can be the indices of such a split: shapes, dtypes, ranges, and the tokens of a thousand samples.

    Proves that no sample leads outside the data (which the C core checks again for each), and that samples have the
    right length; not that the order is the one we would build.

    Raises:
        ValueError: they cannot.
    """
    document_index, sample_index, shuffle_index = (
        arrays[name] for name in ("document_index", "sample_index", "shuffle_index")
    )
    _need("document_index", document_index, (np.int32,), 1)
    _need("sample_index", sample_index, (np.int32, np.int64), 2)
    _need("shuffle_index", shuffle_index, (np.uint32, np.int64), 1)
    if sample_index.shape != (len(shuffle_index) + 1, 2):
        raise ValueError(f"sample_index of shape {sample_index.shape} beside {len(shuffle_index)} samples")
    if len(documents) == 0 or len(document_index) % len(documents):
        raise ValueError(f"{len(document_index)} entries of document_index, needs a multiple of {len(documents)}")
    _need_within("document_index", document_index, min(documents), max(documents))
    if len(shuffle_index):
        _need_within("shuffle_index", shuffle_index, 0, len(shuffle_index) - 1)
    _need_within("sample_index's positions", sample_index[:, 0], 0, len(document_index) - 1)
    orders = Orders(shuffle_index, sample_index, document_index, sequences, add_extra_token=extra)
    _check_samples(orders, sequences, sequence_length + extra)


def check_blend_index(arrays: Arrays, sizes: Sequence[int], size: int | None) -> None:
    """Whether these can be the indices of a blend of datasets of these sizes."""
    datasets, samples = arrays["dataset_index"], arrays["dataset_sample_index"]
    _need("dataset_index", datasets, (np.int16,), 1)
    _need("dataset_sample_index", samples, (np.int64,), 1)
    if len(datasets) != len(samples) or (size is not None and len(datasets) != size):
        raise ValueError(
            f"{len(datasets)} and {len(samples)} samples, needs {size or 'as many of one as of the other'}"
        )
    limits = np.array(sizes, np.int64)
    for first in range(0, len(datasets), BLOCK):
        which, mine = datasets[first : first + BLOCK], samples[first : first + BLOCK]
        _need_within("dataset_index", which, 0, len(sizes) - 1)
        wrong = (mine < 0) | (mine >= limits[which])
        if wrong.any():
            number, found = which[wrong][0], mine[wrong][0]
            raise ValueError(f"sample {found} of dataset {number}, needs 0 to {sizes[number] - 1}")


def _need(name: str, array: NDArray[np.generic], dtypes: Sequence[type], dimensions: int) -> None:
    if array.dtype not in dtypes or array.ndim != dimensions:
        needed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name} of {array.ndim}-D {array.dtype}, needs {dimensions}-D {needed}")


def _need_within(name: str, values: NDArray[np.generic], low: int, high: int) -> None:
    found = int(values.min()), int(values.max())
    if found[0] < low or found[1] > high:
        raise ValueError(f"{name} from {found[0]} to {found[1]}, needs {low} to {high}")


def _check_samples(orders: Orders, sequences: Sequences, tokens: int) -> None:
    """Some samples, evenly spread: each holds `tokens` of whole sequences; the last may be cut short."""
    served = orders.arrays[0]
    some = np.unique(np.linspace(0, len(served) - 1, min(len(served), SAMPLES_CHECKED)).astype(np.int64))
    if not len(some):
        return
    try:
        spans, bounds = orders.spans(some.tolist())
    except IndexBuildError as error:
        raise ValueError(str(error)) from error
    if (right := sequences.locate(spans)[1]) < len(spans):
        sequence, first, count = spans[right].tolist()
        raise ValueError(f"{count} tokens from {first} of sequence {sequence}, which has fewer")
    found = np.add.reduceat(spans[:, 2], bounds[:-1])
    wrong = (found != tokens) & (served[some] != len(served) - 1)
    if wrong.any():
        raise ValueError(f"a sample of {found[wrong][0]} tokens, needs {tokens}")
