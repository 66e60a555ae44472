"""The tokens of a prefix, however they are stored: `.bin`, or `.bin.zst` where there is none; and the sums beside.

    PREFIX.bin        plain; read where both lie there
    PREFIX.bin.zst    zstd segments, `storage.segments`
    PREFIX.bin.xxh3   checksums of a plain one, `storage.checksums`

All three are looked for at once, so that the two which are mostly not there cost no round trip. Local files are checked
only on demand (BINIDX_VERIFY=1): a warm sample of 8 KiB takes 2 us, and checking its blocks would take 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.format.idx import get_bin_path
from binidx.storage import filesystem
from binidx.storage.backends import layered, open_stored
from binidx.storage.checksums import SUFFIX
from binidx.storage.look_up import look_up, says_no
from binidx.storage.publish import object_exists
from binidx.storage.ranges import RangeReader
from binidx.storage.segments import CODECS, codec_of
from binidx.storage.settings import ReadSettings
from binidx.storage.side_reads import submit

Options = Mapping[str, Any] | None

COMPRESSED = [(name, codec.suffix) for name, codec in CODECS.items() if codec.suffix]


def open_bin(
    path_prefix: str, *, mmap: bool = True, cache: bool | None = None, storage_options: Options = None
) -> RangeReader:
    """The plain bytes of the `.bin` of a prefix.

    Args:
        mmap, cache: as in `open_object`.

    Raises:
        ObjectNotFoundError: there is neither a `.bin` nor a compressed one; or no checksums, which
            `storage_options={"binidx": {"verify": True}}` or BINIDX_VERIFY=1 demand.
        FormatError: what is there is not stored as its name says, or the checksums are of another size.
    """
    stored, codec, sums = _find(path_prefix, mmap, storage_options)
    return layered(stored, sums=sums, codec=codec, cache=cache)


def find_bin(path_prefix: str, storage_options: Options = None) -> str | None:
    """The URI of the object that holds the tokens of a prefix; None: there is none."""
    uri = get_bin_path(path_prefix)
    names = [uri + codec.suffix for codec in CODECS.values()]
    return next((name for name in names if object_exists(name, storage_options)), None)


def beside(uri: str) -> list[str]:
    """The other objects that may hold what `uri` does, or tell of it: they go when it is written.

    Args:
        uri: of a `.bin`, compressed or not, or of an object that follows no rule.
    """
    plain = get_bin_path(prefix_of(uri))
    if prefix_of(uri) == uri:
        return [uri + SUFFIX]
    return [name for name in (*(plain + codec.suffix for codec in CODECS.values()), plain + SUFFIX) if name != uri]


def prefix_of(uri: str) -> str:
    """The prefix of a `.bin`, compressed or not; an object that follows no rule is its own."""
    return uri.removesuffix(CODECS[codec_of(uri)].suffix).removesuffix(".bin")


def _find(prefix: str, mmap: bool, options: Options) -> tuple[RangeReader, str, RangeReader | None]:
    """The stored object, its codec, and its checksums if they are wanted."""
    uri = get_bin_path(prefix)
    verify = ReadSettings.of(options).verify
    if filesystem.local_path(uri) is None:
        stored, codec, sums = _find_remote(uri, verify is not False, options)
    else:
        stored, codec, sums = _find_local(uri, mmap, bool(verify), options)
    if verify and codec == "raw" and sums is None:
        raise ObjectNotFoundError(
            f"{uri}{SUFFIX}: no such object; BINIDX_VERIFY=1 needs it, binidx convert --checksums writes it"
        )
    return stored, codec, sums


def _find_local(uri: str, mmap: bool, verify: bool, options: Options) -> tuple[RangeReader, str, RangeReader | None]:
    def open_it(at: str) -> RangeReader:
        return open_stored(at, storage_options=options, mmap=mmap)

    try:
        stored = open_it(uri)
    except ObjectNotFoundError:
        for name, suffix in COMPRESSED:
            if object_exists(uri + suffix):
                return open_it(uri + suffix), name, None
        raise
    return stored, "raw", open_it(uri + SUFFIX) if verify and object_exists(uri + SUFFIX) else None


def _find_remote(uri: str, verify: bool, options: Options) -> tuple[RangeReader, str, RangeReader | None]:
    """All at the same time; what was looked for in vain, or found beside a plain one, is of no consequence."""

    def look(at: str) -> RangeReader | None:
        found = look_up(at, options)
        return None if found is None else open_stored(at, storage_options=options, info=found)

    def look_for_compressed() -> tuple[RangeReader, str] | None:
        each = ((look(uri + suffix), name) for name, suffix in COMPRESSED)
        return next(((reader, name) for reader, name in each if reader is not None), None)

    compressed = submit(look_for_compressed)
    sums = submit(lambda: look(uri + SUFFIX) if verify else None)
    try:
        stored = open_stored(uri, storage_options=options)
    except StorageError as error:
        found = compressed.result() if says_no(error) else None
        if found is None:
            raise
        return *found, None
    finally:
        wait([compressed])
        wait([sums])
    return stored, "raw", sums.result()
