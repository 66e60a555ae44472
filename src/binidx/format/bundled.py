"""The bundle of a set of prefixes in a directory of the store: one request instead of one for each small `.idx`.

    {directory}/{digest of the prefixes}-binidx-idx.bundle

Read at the same time as the lists that say which of it still holds, and through the `index_dir`, once for a node.
Written by who had to open one of its files alone, from what it read. Writers race without harm: the last bundle
stands whole, and what it has of replaced files is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from binidx.errors import FormatError, StorageError
from binidx.format.bundle import Bundle, File, choose, format_bundle, parse_bundle
from binidx.storage.backends import open_object
from binidx.storage.look_up import says_no
from binidx.storage.publish import create_object, join_uri
from binidx.storage.transfer import read_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundlePlace:
    """Where the bundle of a run lies.

    Args:
        directory: URI; made where the store knows directories.
        writes: whether this process may write it.
    """

    directory: str
    writes: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def read(self, prefixes: Sequence[str]) -> Bundle | None:
        """None, and why in the log, where there is none to be had."""
        uri = self.uri(prefixes)
        try:
            return parse_bundle(read_whole(open_object(uri, storage_options=self.storage_options, cache="disk")), uri)
        except FormatError as error:
            logger.warning("%s: unusable, opening each .idx: %s", uri, error)
        except StorageError as error:
            logger.log(logging.DEBUG if says_no(error) else logging.WARNING, "%s: opening each .idx: %s", uri, error)
        return None

    def complete(self, prefixes: Sequence[str], files: Mapping[str, File], lacking: Collection[str]) -> None:
        """Write the bundle of these files if some `lacking` one belongs in it; what cannot be written is logged.

        Args:
            files: by prefix, identity and bytes of its `.idx`; None: not read as that object.
        """
        chosen = choose({prefix: identity for prefix, (identity, data) in files.items() if data is not None})
        if not {*lacking} & {*chosen}:
            return
        uri = self.uri(prefixes)
        try:
            with create_object(uri, self.storage_options, durable=False) as out:
                for piece in format_bundle(files, chosen):
                    out.write(piece)
        except (OSError, NotImplementedError) as error:
            logger.warning("%s: not written, every start asks for each .idx: %s", uri, error)

    def uri(self, prefixes: Sequence[str]) -> str:
        names = "\n".join(sorted({*prefixes}))
        return join_uri(self.directory, f"{xxhash.xxh3_128_hexdigest(names.encode())}-binidx-idx.bundle")
