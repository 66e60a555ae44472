"""Dataset about to be written: what exists under its prefix, and the order in which its objects become visible.

All objects are written invisibly first. Then the old `.idx` is removed, `.bin` and sidecars appear, and the `.idx`
comes last. A reader therefore never combines an index with other tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike

from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset
from binidx.errors import ConfigError, ObjectExistsError
from binidx.format.bin_file import BinWriter, delete_objects, superseded_objects
from binidx.format.idx import get_idx_path
from binidx.format.idx_blocks import IndexColumns
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.source import absolute_uri
from binidx.format.virtual import SUFFIX as PARTS
from binidx.storage.codecs.segments import CODECS
from binidx.storage.writing.publish import create_object, object_exists, object_identity

BIN_SUFFIXES = tuple(f"bin{codec.suffix}" for codec in CODECS.values())


class DatasetTarget:
    """Prefix of a dataset to write, with its tokens stored by `codec`."""

    def __init__(self, prefix: str, codec: str, options: Options) -> None:
        self.prefix, self.codec, self.options = prefix, codec, options
        self.bin_suffix = f"bin{CODECS[codec].suffix}"
        self.bin_uri, self.idx_uri = self.uri(self.bin_suffix), get_idx_path(prefix)

    def uri(self, suffix: str) -> str:
        """Return the URI of an object by its suffix, such as "bin.zst"."""
        return f"{self.prefix}.{suffix}"

    def size(self) -> int:
        """Return the bytes of `.bin` and `.idx` together."""
        return sum(int(object_identity(uri, self.options)["size"]) for uri in (self.bin_uri, self.idx_uri))

    def check_free(self, published: dict[str, Any] | None = None, *, resumed: bool = False) -> None:
        """Check that nothing exists under the prefix but a lone `.bin` that an earlier run published.

        Args:
            published: identity of the `.bin` that an earlier run, of any source, verified.
            resumed: whether an earlier run of the same source exists.

        Raises:
            ObjectExistsError: something else exists.
        """
        found = [
            suffix for suffix in (*BIN_SUFFIXES, "idx", PARTS[1:]) if object_exists(self.uri(suffix), self.options)
        ]
        bins = [suffix for suffix in found if suffix in BIN_SUFFIXES]
        alone = len(found) == 1
        if not found or (alone and bins and (resumed or object_identity(self.uri(bins[0]), self.options) == published)):
            return
        if PARTS[1:] in found:
            what = f"a virtual merge ({self.uri(PARTS[1:])})"
        elif alone:
            what = f"a .{found[0]} without its other half"
        else:
            what = "another dataset" if self.bin_suffix in bins else f"a dataset with a .{bins[0]}"
        raise ObjectExistsError(f"{self.prefix}: holds {what}, needed a free name; --overwrite replaces it")

    def remove_existing(self) -> None:
        """Remove the old index first, then the list of a virtual merge, other forms of the tokens, and sidecars."""
        others = [self.prefix + suffix for suffix in (PARTS, *SIDECARS)]
        delete_objects([self.idx_uri, *superseded_objects(self.bin_uri), *others], self.options)


def open_target(
    prefix: Prefix, codec: str, sources: Sequence[WholeDataset], options: Options, *, overwrite: bool
) -> DatasetTarget:
    """Return the target under a prefix that may be written.

    Raises:
        ConfigError: the prefix is a folder, or one of the sources.
        ObjectExistsError: an object exists there, and `overwrite` is False.
    """
    name = os.fspath(prefix)
    if name.endswith("/"):
        raise ConfigError(f"{name}: a folder, needed a prefix such as {name}en")
    if any(absolute_uri(name) in each.source.uris for each in sources):
        raise ConfigError(f"{name}: is read and written, needed another prefix to write to")
    target = DatasetTarget(name, codec, options)
    if not overwrite:
        target.check_free()
    return target


def publish_dataset(
    target: DatasetTarget, columns: IndexColumns, publish_bin: Callable[[], object], check: Callable[[], object]
) -> None:
    """Write the `.idx` invisibly; then call `check` and `publish_bin`, and make the `.idx` visible last."""

    def before_publish() -> None:
        check()
        publish_bin()

    with create_object(target.idx_uri, target.options, before_publish=before_publish) as writer:
        for piece in columns.format():
            writer.write(piece)


class DatasetOutput:
    """Unpublished dataset whose tokens pass through this process.

    Attributes:
        columns: of its `.idx`.
        bin: writer of its tokens.
    """

    def __init__(self, target: DatasetTarget, dtype: DTypeLike, multimodal: bool) -> None:
        self.target, self.columns = target, IndexColumns(dtype, multimodal)
        self.bin = BinWriter(target.bin_uri, target.options)
        self.bin.obsolete_uris.append(target.idx_uri)

    def publish(self, remove_existing: Callable[[], object], check: Callable[[], object]) -> None:
        """Call `check` and `remove_existing`, and make the dataset visible."""

        def publish_bin() -> None:
            remove_existing()
            self.bin.publish()

        publish_dataset(self.target, self.columns, publish_bin, check)

    def close(self) -> None:
        """Remove what was not published."""
        self.columns.close()
        self.bin.abandon()
