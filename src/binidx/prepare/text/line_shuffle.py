"""Lines of text in random order: jsonl, plain or .gz or .zst, in the two passes of `buckets`.

A line is what ends in a newline, blank or not; a last line without one gets one, or it would run into its neighbour.
The order is that of `keys`: of the seed and the number of lines, not of the memory.

How much text a .gz holds is not known before it is read, and not how many lines any of them has. What is guessed only
decides how many buckets there are, so what is guessed wrong costs memory or time, never another order.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.shuffle_buckets import MIB, Buckets, ShufflePlan, plan_shuffle, shuffle_keys
from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.source import absolute_uri
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.jsonl import Lines, own_bytes, whole_lines
from binidx.prepare.text.read import PLAIN, CountedPieces, check_read, stored_pieces
from binidx.prepare.text.slices import JSONL, PARQUET, Input, Slice, plan_slices
from binidx.storage.adapters import WritableFile
from binidx.storage.codecs.segments import CODECS
from binidx.storage.interfaces import Writer
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher
from binidx.storage.writing.publish import create_object, object_exists

Options = Mapping[str, Any] | None


WHOLE = 1 << 62


"""Bytes of a part: an input is read as one."""


PACKED = 6


"""Plain bytes for a stored one, where nobody knows: more than text mostly has."""


NEWLINE = ord("\n")


@dataclass(frozen=True)
class ShuffledLines:
    """What a shuffle of lines did; `num_bytes` of text, newlines counted."""

    target: str
    num_inputs: int
    num_lines: int
    num_bytes: int
    num_buckets: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def shuffle_lines(
    inputs: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    seed: int,
    memory_bytes: int,
    scratch: str | None = None,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> ShuffledLines:
    """Write the lines of all inputs to one object, in the order that `seed` and their number give.

    Args:
        inputs: as in `find_inputs`; a name that tells no format is plain text.
        target: a .gz or .zst is compressed, a .zst so that it can be cut again.
        memory_bytes, scratch, overwrite: as in `shuffle_datasets`.

    Raises:
        ConfigError: an input that has no lines, the target among the inputs, or too little memory.
        FormatError: what is compressed is broken, or a line has more than an eighth of the memory.
        ObjectNotFoundError, ObjectExistsError, ObjectChangedError, StorageError: of inputs and target.
    """
    began, watch, name = time.monotonic(), watch or SilentWatcher(), os.fspath(target)
    found = [each for one in inputs for each in text_inputs(os.fspath(one), source_options)]
    check_target(name, found, target_options, overwrite)
    plan = plan_lines(found, memory_bytes, source_options)
    pieces, count, size = plan_slices(found, WHOLE), 0, 0
    with contextlib.closing(Buckets(plan, 1, scratch)) as buckets:
        watch.begin("into buckets", sum(each.num_bytes for each in pieces), 0)
        for piece in pieces:
            for lines in read_lines(piece, plan.round_bytes, memory_bytes // 8, source_options, watch.advance):
                data, bounds = cut_lines(lines)
                buckets.add(shuffle_keys(seed, count, len(bounds) - 1), [(data, bounds)])
                count, size = count + len(bounds) - 1, size + len(data)
        watch.begin("in order", size, 0)
        with create_object(name, target_options) as stored, compressing_writer(name, stored) as out:
            for run in buckets.sorted():
                for text in run.pieces(0):
                    out.write(text)
                    watch.advance(len(text))
    return ShuffledLines(name, len(found), count, size, plan.num_buckets, time.monotonic() - began)


def text_inputs(name: str, options: Options) -> list[Input]:
    """What a name stands for; one that tells no format is text."""
    try:
        found = find_inputs([name], storage_options=options)
    except ConfigError:
        found = find_inputs([name], format=JSONL, storage_options=options)
    for each in found:
        if each.format == PARQUET:
            raise ConfigError(f"{each.uri}: is parquet, needed lines; binidx preprocess reads it, then shuffle tokens")
    return found


def check_target(name: str, found: Sequence[Input], options: Options, overwrite: bool) -> None:
    """ConfigError if it is read, ObjectExistsError if it stands there and nobody said `overwrite`."""
    if any(absolute_uri(each.uri) == absolute_uri(name) for each in found):
        raise ConfigError(f"{name}: is read and written, needed another name to write to")
    if not overwrite and object_exists(name, options):
        raise ObjectExistsError(f"{name}: stands there, needed a free name; --overwrite replaces it")


def plan_lines(found: Sequence[Input], memory_bytes: int, options: Options) -> ShufflePlan:
    """Buckets for about so many bytes, in lines as long as those at the head of the first input."""
    num_bytes = sum(plain_bytes(each) for each in found)
    whole = plan_slices([each for each in found if each.size], WHOLE)
    head = next(read_lines(whole[0], MIB, memory_bytes // 8, options), None) if whole else None
    mean = len(head.data) / (bytes(head.data).count(b"\n") or 1) if head else 1.0
    return plan_shuffle(memory_bytes, num_bytes, int(num_bytes / mean), 1)


def plain_bytes(each: Input) -> int:
    """Of text in an input, as far as it tells."""
    if each.format == JSONL:
        return each.size
    return sum(block.count for block in each.blocks) or PACKED * each.size


def read_lines(
    piece: Slice, batch_bytes: int, most: int, options: Options, advance: Callable[[int], object] = int
) -> Iterator[Lines]:
    """The lines of an input, about so many bytes of them at once."""
    with contextlib.closing(stored_pieces(piece, options)) as stored:
        counted = CountedPieces(stored, piece.num_bytes)
        plain = own_bytes(PLAIN[piece.format](counted, piece), piece.first, piece.last)
        for lines in whole_lines(plain, batch_bytes, most):
            if lines.too_long:
                found, needed = f"{lines.too_long:,} bytes", f"{most:,} or fewer, an eighth of the memory"
                raise FormatError(f"{piece.uri}: the line at byte {lines.place} has {found}, needed {needed}")
            yield lines
            advance(counted.taken())
    check_read(piece)


def cut_lines(lines: Lines) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Their bytes, a newline at the end of each, and where each begins."""
    data = np.frombuffer(lines.data, np.uint8)
    if data[-1] != NEWLINE:
        data = np.append(data, np.uint8(NEWLINE))
    ends = np.flatnonzero(data == NEWLINE)
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends + 1
    return data, bounds


def compressing_writer(name: str, stored: Writer) -> AbstractContextManager[Any]:
    """What compresses into a writer, as the name says."""
    if name.endswith(".gz"):
        # Level 6 and no time: the same lines give the same bytes.
        return gzip.GzipFile("", "wb", 6, WritableFile(stored), mtime=0)
    return CODECS["zstd" if name.endswith(".zst") else "raw"].create(stored, None)
