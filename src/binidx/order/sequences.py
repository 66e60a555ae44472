"""Order of stored sequences, one a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from binidx.order.order_protocols import Bounds, Numbers, Spans
from binidx.order.source_order import SourceOrder


class SequenceOrder(SourceOrder):
    """Sample i is sequence i, whole.

    Args:
        source: the sequences.
    """

    @property
    def identity(self) -> Any:
        return {"class": "SequenceOrder", "data": self.source.dataset.identity}

    @property
    def num_epochs(self) -> int:
        return 1

    def __len__(self) -> int:
        return len(self.source.dataset)

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        spans = np.zeros((len(samples), 4), np.int64)
        spans[:, 1], spans[:, 3] = samples, self.source.dataset.sequence_lengths[samples]
        return spans, np.arange(len(samples) + 1)

    def candidates(self, sequences: Numbers) -> Numbers:
        return sequences

    def epochs(self, samples: Numbers) -> Numbers:
        return np.zeros_like(samples)
