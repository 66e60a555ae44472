"""A run that grows: which requests share one order, so that the arrays that are there serve the new one too.

Of one split, seed and sequence length S, everything is a function of two values of the `EpochPlan`:

    num_epochs E              the documents are written out E times, then shuffled all together
    separate_final_epoch      ... the first E - 1 together, the last by itself, where the last serves under 80 %

The samples that were asked for decide these two and nothing else: all arrays have room for every sample of E epochs. So
with T tokens an epoch, x the extra token, c samples an epoch and b samples before the last:

    samples asked    (E-1)T/S ................................ ET/S
    order            | E, separate      | E, together          |
                                b + int(0.80 c)

Within a stretch the arrays are the same to the last bit. Across its ends no sample keeps its place: the generator has
drawn another number of times before it shuffles them. (The document index of E epochs together is the beginning
of that of E + 1 with a separate last one, the shuffle index is not.) What a blend draws first does not depend on how
much it draws in all, so a longer blend begins with the shorter one, as long as its weights are the same.

Arrays that another index of the same directory holds: copied by the store, and found without a listing.

    {key}-binidx-orders.json     key: of the data, the split and every option that arrays depend on, but for samples
                                 the names of the indices of that key, and the order of each: `growth`

The record only saves work. Builders that write it at the same time may lose an entry; whatever it names is used under
its own manifest, and checked as a whole under the new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import BinidxError, FormatError, StorageError
from binidx.index.cache.index_files import DESCRIPTION, IndexFiles
from binidx.index.cache.manifest import Manifest, Origin, fields_key, mismatches
from binidx.index.document_sample import SEPARATE_BELOW, EpochPlan
from binidx.json_models import JsonFile
from binidx.storage.open import open_stored
from binidx.storage.writing.concatenate import SourcePiece, open_join

MOST_ORDERS = 16


"""How many orders of the same data a directory remembers."""


@dataclass(frozen=True)
class OrderKey:
    """What decides the arrays of one split, seed and sequence length, and the requests that lead to it.

    fewest, most: samples asked for, both included.
    """

    num_epochs: int
    separate_final_epoch: bool
    fewest: int
    most: int

    @property
    def fields(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs, "separate_final_epoch": self.separate_final_epoch}

    def __str__(self) -> str:
        return in_words(self.fields)


@dataclass(frozen=True)
class Known:
    """An index in a directory: its name there, its order, and the most samples that this order serves."""

    name: str
    order: dict[str, Any]
    most: int

    def __post_init__(self) -> None:
        if not self.order.keys() >= {"num_epochs", "separate_final_epoch"}:
            raise ValueError(f"order: found {', '.join(self.order) or 'nothing'}, needs the fields of an order")


@dataclass(frozen=True)
class KnownFile:
    """The fields of the file."""

    indices: list[Known]


KNOWN_FILE = JsonFile(KnownFile, open=True)


def order_of(plan: EpochPlan, sequence_length: int, *, add_extra_token: bool) -> OrderKey:
    """The order of a plan, and every `num_samples` that would lead to the same."""
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


def in_words(order: dict[str, Any]) -> str:
    """For people who plan a run."""
    epochs = order["num_epochs"]
    if epochs == 1:
        return "1 epoch"
    last = ", the last shuffled by itself" if order["separate_final_epoch"] else ", shuffled together"
    return f"{epochs} epochs{last}"


def twins(known: Sequence[Known], order: OrderKey, name: str) -> list[str]:
    """The names of indices that hold the same arrays."""
    return [each.name for each in known if each.order == order.fields and each.name != name]


def change_in_words(known: Sequence[Known], order: OrderKey, name: str) -> str:
    """What it means for a run that only indices of other orders are there; empty where there are none.

    Args:
        name: of the index, `{hash}-{class}-{split}`. Splits may be of the same data, and one does not grow out of
            another.
    """
    mine = name.partition("-")[2]
    others = [each for each in known if each.order != order.fields and each.name.partition("-")[2] == mine]
    if not others:
        return ""
    last = others[-1]
    return (
        f"this run reads {order}; the index before it {in_words(last.order)}, up to {last.most} samples. Documents are "
        "shuffled over all their epochs, so each sample gets another place: a run that resumes across this change sees "
        f"some samples again and others never. The order of now holds for {order.fewest} to {order.most} samples"
    )


def with_index(known: Sequence[Known], name: str, order: OrderKey) -> list[Known]:
    """The record with one more index, the newest last."""
    rest = [each for each in known if each.name != name]
    return [*rest, Known(name, order.fields, order.most)][-MOST_ORDERS:]


def format_known(known: Sequence[Known]) -> bytes:
    return json.dumps({"indices": [vars(each) for each in known]}, indent=1).encode()


def parse_known(data: bytes) -> list[Known]:
    """What `format_known` wrote; nothing where it is anything else, since all that a record does is save work."""
    try:
        return KNOWN_FILE.decode(data, "").indices
    except FormatError:
        return []


ORDERS = "binidx-orders.json"


logger = logging.getLogger(__name__)


def copy_twin(
    files: IndexFiles,
    description: str,
    fingerprint: Mapping[str, Any],
    origin: Origin,
    order: OrderKey,
    names: Sequence[str],
) -> bool:
    """Publish under `files` what an index of the same order holds; False where there is none, or it cannot be had.

    Where there are only indices of other orders, the log says what that means.
    """
    known = _known(files, fingerprint, origin)
    for name in twins(known, order, files.name):
        try:
            manifest = _manifest_of(files.named(name), fingerprint, origin, order)
            if manifest is None:
                continue
            for each in names:
                _copy(files.named(name), files, each, manifest)
            files.write(DESCRIPTION, description.encode())
            files.publish_manifest(_without_identities(manifest, origin))
        except (BinidxError, KeyError, OSError, NotImplementedError) as error:
            logger.info("%s: cannot be taken over from %s: %s", files.uri("*.npy"), name, error)
            continue
        logger.info("%s: the arrays of %s, which reads %s too", files.uri("*.npy"), name, order)
        remember(files, fingerprint, origin, order)
        return True
    if words := change_in_words(known, order, files.name):
        logger.warning("%s: %s", files.uri("*.npy"), words)
    return False


def remember(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin, order: OrderKey) -> None:
    """Put an index that was published into the record of its key; a failure costs a copy some day."""
    known = with_index(_known(files, fingerprint, origin), files.name, order)
    with contextlib.suppress(BinidxError, OSError, NotImplementedError):
        _record(files, fingerprint, origin).write(ORDERS, format_known(known))


def _record(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin) -> IndexFiles:
    return files.named(fields_key(fingerprint, origin.content()))


def _known(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin) -> list[Known]:
    try:
        return parse_known(_record(files, fingerprint, origin).read_small(ORDERS) or b"")
    except StorageError:
        return []


def _manifest_of(twin: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin, order: OrderKey) -> Manifest | None:
    """The manifest of an index that holds what is wanted; None where it does not, whatever the record says."""
    manifest = twin.read_manifest()
    if manifest is None or manifest.order != order.fields or mismatches(manifest, fingerprint, origin):
        return None
    return manifest


def _copy(source: IndexFiles, target: IndexFiles, name: str, manifest: Manifest) -> None:
    """One array, moved by the store itself where it can."""
    reader = open_stored(source.array_uri(name), storage_options=source.storage_options)
    if reader.size != (needed := manifest.arrays[name].bytes):
        raise FormatError(f"{source.array_uri(name)}: {reader.size} bytes, needed {needed}")
    join = open_join(
        target.array_uri(name), [SourcePiece(reader, 0, reader.size)], source.storage_options, target.storage_options
    )
    try:
        join.fill(lambda _: None)
        join.publish(lambda: None)
    finally:
        join.abandon()


def _without_identities(manifest: Manifest, origin: Origin) -> Manifest:
    """The same arrays, as other objects of another name."""
    arrays = {name: replace(stored, identity=None) for name, stored in manifest.arrays.items()}
    return replace(manifest, data=origin.data(), arrays=arrays)
