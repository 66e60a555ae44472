"""Arrays that another index of the same directory holds: copied by the store, and found without a listing.

    {key}-binidx-orders.json     key: of the data, the split and every option that arrays depend on, but for samples
                                 the names of the indices of that key, and the order of each: `growth`

The record only saves work. Builders that write it at the same time may lose an entry; whatever it names is used under
its own manifest, and checked as a whole under the new one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from binidx.errors import BinidxError, FormatError, StorageError
from binidx.index.files import DESCRIPTION, IndexFiles
from binidx.index.growth import Known, Order, change_in_words, format_known, parse_known, twins, with_index
from binidx.index.manifest import Manifest, Origin, key_of, mismatches
from binidx.storage.backends import open_stored
from binidx.storage.join import open_join
from binidx.storage.join_plan import Piece

ORDERS = "binidx-orders.json"

logger = logging.getLogger(__name__)


def copy_twin(
    files: IndexFiles,
    description: str,
    fingerprint: Mapping[str, Any],
    origin: Origin,
    order: Order,
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


def remember(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin, order: Order) -> None:
    """Put an index that was published into the record of its key; a failure costs a copy some day."""
    known = with_index(_known(files, fingerprint, origin), files.name, order)
    with contextlib.suppress(BinidxError, OSError, NotImplementedError):
        _record(files, fingerprint, origin).write(ORDERS, format_known(known))


def _record(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin) -> IndexFiles:
    return files.named(key_of(fingerprint, origin.content()))


def _known(files: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin) -> list[Known]:
    try:
        return parse_known(_record(files, fingerprint, origin).read_small(ORDERS) or b"")
    except StorageError:
        return []


def _manifest_of(twin: IndexFiles, fingerprint: Mapping[str, Any], origin: Origin, order: Order) -> Manifest | None:
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
        target.array_uri(name), [Piece(reader, 0, reader.size)], source.storage_options, target.storage_options
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
