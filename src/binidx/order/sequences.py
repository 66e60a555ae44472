"""Orders whose samples are whole sequences: stored rows, rows of text, runs of sentences, documents with images.

sample i  ─ an array of the order ─►  sequences first .. stop - 1, each from its first token
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.cache.index_files import describe
from binidx.index.cache.manifest import describe_documents
from binidx.order.order_protocols import Bounds, Numbers, Source, Spans
from binidx.order.source_order import SourceOrder, find_positions, join_ranges, stretches


class SequenceRunsOrder(SourceOrder):
    """Base of orders whose samples are runs of neighbouring sequences; a subclass returns the runs."""

    @abstractmethod
    def runs(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first sequence of each sample, and the one after its last; each of shape (B,)."""

    def count_tokens(self, sequences: Numbers, bounds: Bounds) -> Numbers:
        """Return the number of tokens that are read of each sequence: all, unless a subclass cuts some.

        Args:
            sequences: shape (n,).
            bounds: sample b has the sequences bounds[b] up to bounds[b + 1], shape (B + 1,).
        """
        counts: Numbers = self.source.dataset.sequence_lengths[sequences].astype(np.int64)
        return counts

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        first, stop = self.runs(samples)
        bounds = np.concatenate([[0], np.cumsum(stop - first)])
        spans = np.zeros((int(bounds[-1]), 4), np.int64)
        spans[:, 1] = join_ranges(first, stop)
        spans[:, 3] = self.count_tokens(spans[:, 1], bounds)
        return spans, bounds


class RowOrder(SequenceRunsOrder):
    """Rows of a file, epoch after epoch; each epoch in the order of the file, or shuffled by itself.

    Args:
        source: the rows; those of the split are served.
        num_samples: number of samples; None is one epoch.
        seed: seed of the shuffles; None: the order of the file.
        kind: recorded name of the class of dataset, part of the identity.
        versions: further fields of the identity.
    """

    def __init__(
        self, source: Source, num_samples: int | None, seed: int | None, kind: str, versions: Mapping[str, str]
    ) -> None:
        super().__init__(source)
        self.num_samples, self.seed, self.kind, self.versions = num_samples, seed, kind, versions
        self._last_shuffle: tuple[int, NDArray[np.int64] | None] = -1, None

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "class": self.kind,
            **self.source.dataset.identity,
            "indices": describe_documents(self.source.sequences),
            "shuffled_by": self.seed,
            **self.versions,
        }

    @property
    def samples_per_epoch(self) -> int:
        return len(self.source.sequences)

    def __len__(self) -> int:
        return self.samples_per_epoch if self.num_samples is None else self.num_samples

    def runs(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        epoch, position = np.divmod(samples, self.samples_per_epoch)
        if self.seed is not None:
            for number in np.unique(epoch).tolist():
                in_epoch = epoch == number
                position[in_epoch] = self._shuffled(number)[position[in_epoch]]
        rows = np.asarray(self.source.sequences)[position].astype(np.int64)
        return rows, rows + 1

    def candidates(self, sequences: Numbers) -> Numbers:
        rows = np.flatnonzero(np.isin(np.asarray(self.source.sequences), sequences))
        served = [np.empty(0, np.int64)]
        for epoch in range(self.num_epochs):
            positions = rows if self.seed is None else np.flatnonzero(np.isin(self._shuffled(epoch), rows))
            served.append(epoch * self.samples_per_epoch + positions)
        samples = np.concatenate(served)
        return samples[samples < len(self)]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last_shuffle": (-1, None)}

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the rows in an epoch, shape (samples_per_epoch,); that of the last epoch is kept."""
        last, rows = self._last_shuffle
        if last != epoch or rows is None:
            assert self.seed is not None
            rows = np.random.RandomState([self.seed, epoch]).permutation(self.samples_per_epoch)
            self._last_shuffle = epoch, rows
        return rows


class SentenceOrder(SequenceRunsOrder):
    """Neighbouring sentences of one document, by an index; the order of BERT and T5 samples.

    All samples count as one epoch: the sentences of all passes are shuffled together.

    Args:
        source: the sentences.
        identifiers: values that Megatron hashes for the names of caches: the identity.

    Attributes:
        sample_index: (first sentence, end, target length in tokens) of each sample, shape (num_samples, 3); set by
            `set_arrays`.

    Source: Megatron Core, `MaskedWordPieceDataset`.
    """

    array_names = ("sample_index",)
    sample_index: NDArray[Any]

    def __init__(self, source: Source, identifiers: OrderedDict[str, Any]) -> None:
        super().__init__(source)
        self.identifiers = identifiers

    @property
    def identity(self) -> str:
        return describe(self.identifiers)

    def __len__(self) -> int:
        return len(self.sample_index)

    def runs(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        rows = self.sample_index[samples].astype(np.int64)
        return rows[:, 0], rows[:, 1]

    def target_lengths(self, samples: Numbers) -> Numbers:
        """Return the number of tokens for which each sample was drawn, shape (B,)."""
        lengths: Numbers = self.sample_index[samples, 2].astype(np.int64)
        return lengths

    def candidates(self, sequences: Numbers) -> Numbers:
        samples = [np.empty(0, np.int64)]
        for first, rows in stretches(self.sample_index):
            has_some = np.searchsorted(sequences, rows[:, 1]) > np.searchsorted(sequences, rows[:, 0])
            samples.append(first + np.flatnonzero(has_some))
        return np.concatenate(samples)


class DocumentOrder(SequenceRunsOrder):
    """Whole documents, one a sample; text beyond the length of a sample is left out.

    Args:
        source: the sequences, some of them text.
        identifiers: values that Megatron hashes for the names of caches: the identity.
        document_index: the document of each sample, shape (num_samples,).
        documents_per_epoch: number of documents of an epoch.
        capacity: most tokens of text in a sample.
        text_mode: mode of the sequences that are text.
    """

    array_names = ("document_index",)
    document_index: NDArray[np.int32]

    def __init__(
        self,
        source: Source,
        identifiers: OrderedDict[str, Any],
        document_index: NDArray[np.int32],
        documents_per_epoch: int,
        capacity: int,
        text_mode: int,
    ) -> None:
        super().__init__(source)
        self.identifiers, self.documents_per_epoch = identifiers, documents_per_epoch
        self.capacity, self.text_mode = capacity, text_mode
        self.set_arrays({"document_index": document_index})

    @property
    def identity(self) -> str:
        return describe(self.identifiers)

    @property
    def samples_per_epoch(self) -> int:
        return self.documents_per_epoch

    @property
    def _stored(self) -> IndexedDataset:
        assert isinstance(self.source.dataset, IndexedDataset)
        return self.source.dataset

    def __len__(self) -> int:
        return len(self.document_index)

    def runs(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        documents, bounds = self.document_index[samples], self._stored.document_indices
        return bounds[documents].astype(np.int64), bounds[documents + 1].astype(np.int64)

    def count_tokens(self, sequences: Numbers, bounds: Bounds) -> Numbers:
        lengths = super().count_tokens(sequences, bounds)
        is_text = self._stored.sequence_modes[sequences] == self.text_mode
        before = np.concatenate([[0], np.cumsum(lengths * is_text)])
        before = before[:-1] - np.repeat(before[bounds[:-1]], np.diff(bounds))
        return np.where(is_text, np.clip(self.capacity - before, 0, lengths), lengths)

    def candidates(self, sequences: Numbers) -> Numbers:
        documents = self._stored.document_indices.searchsorted(sequences, side="right") - 1
        return find_positions(self.document_index, np.unique(documents))
