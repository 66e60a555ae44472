"""Interfaces of orders: the tokens of sample i as spans of stored sequences. No order reads tokens.

sample 904 of a blend ─ locate ─►  sample 17 of source 2 ─ spans ─►  (2, sequence, first token, number of tokens)
                      ◄─────────────────────── find ───────────────────────  (2, sequence)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.format.tokens import Tokens
from binidx.index.documents import Documents

Numbers = NDArray[np.int64]
"""Numbers of samples, sequences or documents."""
Spans = NDArray[np.int64]
"""(source, sequence, first token, number of tokens) of each span, shape (n, 4)."""

Bounds = NDArray[np.int64]
"""Sample i has the spans bounds[i] up to bounds[i + 1], shape (B + 1,)."""


class Source(Protocol):
    """Sequences of one dataset, which an order numbers."""

    @property
    def name(self) -> str:
        """Prefix of the dataset, as the user wrote it."""

    @property
    def prefix(self) -> str:
        """Prefix of the dataset, as it is opened."""

    @property
    def dataset(self) -> Tokens:
        """The sequences; opened at the first use if the order reads ranges of its index."""

    @property
    def sequences(self) -> Documents:
        """Numbers of the sequences of the split, shape (num_in_split,); a range if they are many and consecutive."""


class Order(Protocol):
    """Samples as spans of stored sequences. Sample numbers are 0 to len - 1. Workers unpickle it.

    An order of several sources, or over another order, is a `ComposedOrder`, too. `binidx.testing.check_order` checks
    an implementation.

    Two orders with equal identities begin with the same samples: the longer one continues the shorter one.
    """

    @property
    def identity(self) -> Any:
        """Values that the order depends on, as JSON; states and bakes hash them."""

    @property
    def sources(self) -> Sequence[Source]:
        """The datasets that the first column of `spans` numbers."""

    @property
    def num_epochs(self) -> int:
        """Number of passes over a source that have begun at the end of the order; the largest of all sources."""

    def __len__(self) -> int: ...

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, and its number in that source's own order; each of shape (B,).

        In a `ComposedOrder` the number counts the samples of the member of that source. Any other order has one source
        and is its member: it returns source 0 and `samples` unchanged. Kinds that draw random numbers for a sample seed
        them by the number in the source.
        """

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        """Return the spans of samples, in the order of their tokens, and the bounds of each sample.

        Args:
            samples: shape (B,).

        Returns:
            Columns (source, sequence, first token, number of tokens), shape (n, 4), int64; and bounds, shape (B + 1,):
            sample i has the spans bounds[i] up to bounds[i + 1].
        """

    def find(self, source: int, sequences: Numbers) -> Numbers:
        """Return the samples with at least one token of some sequences, ascending.

        Args:
            source: number of the source.
            sequences: numbers in that source, ascending, shape (n,).
        """

    def epochs(self, samples: Numbers) -> Numbers:
        """Return the number of complete passes over the source before each sample begins, shape (B,)."""


class SpanIndex(Protocol):
    """Arrays of an index that C translates from sample numbers to spans: whole, mapped or read by ranges."""

    def spans(self, served: Sequence[int] | Numbers) -> tuple[Numbers, Bounds]:
        """Return (sequence, first token, number of tokens) of spans, shape (n, 3), and the bounds of each sample.

        Args:
            served: numbers of samples, shape (B,).
        """

    def ends(self, served: Sequence[int] | Numbers) -> tuple[Bounds, NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the sequences of samples without the lengths of their spans, which costs less than `spans`.

        Args:
            served: numbers of samples, shape (B,).

        Returns:
            The bounds of the spans of each sample, shape (B + 1,); the sequence of each span, shape (n,); for each
            sample its first token in its first sequence, and the one after its last token in its last sequence, (B,).
        """


@runtime_checkable
class ComposedOrder(Protocol):
    """Capability of an order whose samples are those of other orders, each of one source.

    Samples are read through `locate` and the members: without this capability an order must have one source.
    """

    @property
    def members(self) -> Sequence[Order]:
        """The order of each source, in the order of `sources`."""

    def list_sources(self) -> NDArray[np.int16]:
        """Return the source of every sample, shape (num_samples,)."""


class DocumentRule(Protocol):
    """Rule that chooses the documents of which an index is built: a frozen value; an `OrderOption` may be one."""

    @property
    def uncounted(self) -> str:
        """Part of these documents that `binidx plan` does not count: see `Request.uncounted`."""

    def index_fields(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return all on which the choice depends, as JSON values: they enter the name of the cache of each source.

        Args:
            options: storage options.

        Returns:
            Values by name. Without any, the rule is not applied: the index is Megatron's, of all documents.
        """

    def choose_sequences(self, source: Source, options: Mapping[str, Any] | None) -> Documents:
        """Return the sequences of a source of which the index is built.

        Args:
            source: `sequences` are those of the split, and `index_of(source.dataset)` has the bounds of the documents.
            options: storage options.

        Returns:
            Numbers of sequences in the dataset, shape (n,): a range, or an array of integers that int32 holds. They may
            repeat, and stand in any order: an epoch is all of them.
        """
