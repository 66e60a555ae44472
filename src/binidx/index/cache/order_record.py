"""Record of the orders of indices over the same data: a run that grows past its epochs gets another order.

Of one split, seed and sequence length S, everything is a function of two values of the `EpochPlan`:

    num_epochs E              the documents are written out E times, then shuffled all together
    separate_final_epoch      ... the first E - 1 together, the last by itself, where the last serves under 80 %

The requested samples decide these two and nothing else: all arrays are long enough for every sample of E epochs. So
with T tokens an epoch, x the extra token, c samples an epoch and b samples before the last:

    requested samples    (E-1)T/S ................................ ET/S
    order                | E, separate      | E, together          |
                                    b + int(0.80 c)

Between two of these bounds the arrays are the same to the last bit. Across a bound no sample keeps its place: the
generator has drawn another number of times before it shuffles them. (The document index of E epochs together is the
beginning of that of E + 1 with a separate last one, the shuffle index is not.) A longer blend begins with the shorter
one, as long as its weights are the same.

So that the log can warn of such a change, a record is found without a listing:

    {key}-binidx-orders.json     key: of the data, the split and every option that arrays depend on, but for samples;
                                 content: the names of the indices of that key, and the order of each

Builders that write it at the same time may lose an entry, which costs a warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import BinidxError, FormatError
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import hash_fields
from binidx.index.document_sample import SEPARATE_BELOW, EpochPlan
from binidx.json_models import JsonFile

ORDERS = "binidx-orders.json"
MOST_ORDERS = 16
"""Largest number of indices in one record."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrderKey:
    """Order of one split, seed and sequence length, and the numbers of requested samples that lead to this order.

    fewest, most: bounds of these numbers, both included.
    """

    num_epochs: int
    separate_final_epoch: bool
    fewest: int
    most: int

    @property
    def fields(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs, "separate_final_epoch": self.separate_final_epoch}

    def __str__(self) -> str:
        return describe_order(self.fields)


@dataclass(frozen=True)
class Known:
    """Recorded index: its name in the directory, its order, and the most samples that this order serves."""

    name: str
    order: dict[str, Any]
    most: int

    def __post_init__(self) -> None:
        if not self.order.keys() >= {"num_epochs", "separate_final_epoch"}:
            raise ValueError(f"order: found {', '.join(self.order) or 'nothing'}, need the fields of an order")


@dataclass(frozen=True)
class KnownFile:
    """Content of the file of a record."""

    indices: list[Known]


KNOWN_FILE = JsonFile(KnownFile, open=True)


def get_order_key(plan: EpochPlan, sequence_length: int, *, add_extra_token: bool) -> OrderKey:
    """Return the order of a plan, and the bounds of `num_samples` that lead to the same order.

    Args:
        plan: of the epochs.
        sequence_length: tokens of a sample.
        add_extra_token: whether a sample has one more token, its last label.
    """
    per_epoch = max(plan.tokens_per_epoch - add_extra_token, 0) // sequence_length
    before = plan.num_samples_sans_final_epoch
    threshold = before + int(SEPARATE_BELOW * per_epoch)
    # Requests of E epochs: those whose tokens do not fit into E - 1, and do into E.
    fewest = max(0, (plan.num_tokens - plan.tokens_per_epoch - add_extra_token) // sequence_length + 1)
    most = max(0, (plan.num_tokens - add_extra_token) // sequence_length)
    if plan.num_epochs == 1:
        fewest = 0
    elif plan.separate_final_epoch:
        most = min(most, threshold - 1)
    else:
        fewest = max(fewest, threshold)
    return OrderKey(plan.num_epochs, plan.separate_final_epoch, fewest, most)


def describe_order(order: Mapping[str, Any]) -> str:
    epochs = order["num_epochs"]
    if epochs == 1:
        return "1 epoch"
    last = ", the last shuffled by itself" if order["separate_final_epoch"] else ", shuffled together"
    return f"{epochs} epochs{last}"


def describe_change(known: Sequence[Known], order: OrderKey, name: str) -> str:
    """Return what a change of order means for a run if all recorded indices have other orders; else an empty text.

    The text is empty if no index is recorded, or if one of them has the same order: then nothing is reordered.

    Args:
        name: of the new index, `{hash}-{class}-{split}`. Indices of other classes and splits are left out.
    """
    kind = name.partition("-")[2]
    alike = [index for index in known if index.name.partition("-")[2] == kind]
    if not alike or any(index.order == order.fields for index in alike):
        return ""
    last = alike[-1]
    return (
        f"this run reads {order}; the index before it {describe_order(last.order)}, up to {last.most} samples. "
        "Documents are shuffled over all their epochs, so each sample gets another place: a run that resumes across "
        "this change serves some samples again and others never. This order is valid for "
        f"{order.fewest} to {order.most} samples; another number of samples reorders the data"
    )


def add_index(known: Sequence[Known], name: str, order: OrderKey) -> list[Known]:
    """Return the record with one more index, the newest last.

    Args:
        known: the record.
        name: of the new index, `{hash}-{class}-{split}`; an older entry of this name is replaced.
        order: order of the new index.
    """
    others = [index for index in known if index.name != name]
    return [*others, Known(name, order.fields, order.most)][-MOST_ORDERS:]


def format_known(known: Sequence[Known], record: bytes = b"") -> bytes:
    """Return the bytes of a record; fields that a newer version wrote to the earlier `record` are kept."""
    values = KNOWN_FILE.parse(record, "") if parse_known(record) else {}
    written = {index["name"]: index for index in values.get("indices", ())}
    indices = [{**written.get(index.name, {}), **vars(index)} for index in known]
    return KNOWN_FILE.encode({**values, "indices": indices}, indent=1)


def parse_known(data: bytes) -> list[Known]:
    """Return the indices of a record; an empty list if it is damaged."""
    try:
        return KNOWN_FILE.decode(data, "").indices
    except FormatError:
        return []


def record_order(
    files: IndexFiles, fingerprint: Mapping[str, Any], content: Mapping[str, Any], order: OrderKey, warns: bool,
    published: bool,
) -> None:  # fmt: skip
    """Add a built index to the record if it is published; log a warning if all recorded indices have other orders.

    If the record cannot be read or written, a later warning may be missing.

    Args:
        files: of the index.
        fingerprint: options of the index.
        content: the deciding fields of its data.
        order: order of the index.
        warns: whether to log the warning.
        published: whether the index is in the cache.
    """
    record = IndexFiles(files.directory, hash_fields(fingerprint, content))
    with contextlib.suppress(BinidxError, OSError, NotImplementedError):
        data = record.read_small(ORDERS) or b""
        known = parse_known(data)
        if warns and (text := describe_change(known, order, files.name)):
            logger.warning("%s: %s", files.file("*.npy"), text)
        if published:
            record.write(ORDERS, format_known(add_index(known, files.name, order), data))
