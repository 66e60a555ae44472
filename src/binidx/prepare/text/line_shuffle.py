"""Shuffle lines of text (jsonl, plain, .gz or .zst) in the two passes of `corpus.shuffle_buckets`.

A line ends in a newline and may be blank. A last line without a newline gets one, so that it cannot join another line.
The order follows from the seed and the number of lines alone, not from the memory.

The plain size of a .gz and the number of lines are unknown before the first pass. Estimates of them only decide the
number of buckets, so a wrong estimate costs memory or time and never changes the order.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.random_numbers import shuffle_keys
from binidx.corpus.shuffle_buckets import MIB, Buckets, ShufflePlan, keyed_row, plan_shuffle
from binidx.corpus.whole_dataset import Options
from binidx.errors import ConfigError, FormatError
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.jsonl import Lines
from binidx.prepare.text.read import read_lines
from binidx.prepare.text.slices import CUT_ANYWHERE, LINES, Extent, Input, Slice, plan_slices
from binidx.storage.adapters import WritableFile
from binidx.storage.interfaces import Writer
from binidx.storage.location import Location
from binidx.storage.open import codec_named, codec_of
from binidx.storage.writing.publish import create_or_compare

WHOLE_FILE = 1 << 62
"""Bytes of a part: each input becomes one slice."""

COMPRESSION_RATIO = 6
"""Assumed plain bytes per stored byte, if they are unknown: higher than that of most text."""

NEWLINE = ord("\n")


@dataclass(frozen=True)
class ShuffledLines:
    """Report of a finished `shuffle_lines`; the lines themselves are in the object `target`.

    Attributes:
        target: URI of the object with the shuffled lines.
        num_inputs: number of input objects.
        num_lines: number of lines written, blank lines included.
        num_bytes: uncompressed bytes of the lines, newlines included.
        num_buckets: number of buckets into which the first pass split the lines.
        seconds: elapsed time.
    """

    target: str
    num_inputs: int
    num_lines: int
    num_bytes: int
    num_buckets: int
    seconds: float


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
    """Write the lines of all inputs to one object, in a random order that depends on `seed` and their number alone.

    Args:
        inputs: as in `find_inputs`; a name without a known suffix is plain text.
        target: compressed if it ends in .gz or .zst; a .zst is written with a seek table.
        memory_bytes, scratch, overwrite: as in `shuffle_datasets`. Without `overwrite` an existing target is compared
            with the result.

    Raises:
        ConfigError: a Parquet input, which has no lines, a target among the inputs, or too little memory.
        FormatError: damaged compression, or a line longer than an eighth of the memory.
        ObjectNotFoundError, ObjectExistsError, ObjectChangedError, StorageError: of inputs and target.
    """
    began, watch, output = time.monotonic(), watch or SilentWatcher(), Location.of(target, target_options)
    name = output.uri
    files = [file for one in inputs for file in _find_text(os.fspath(one), source_options)]
    if any(Location(file.uri).absolute == output.absolute for file in files):
        raise ConfigError(f"target: found {name}, which is an input, too; give another")
    plan = _plan_buckets(files, memory_bytes, source_options)
    pieces, count, size = plan_slices(files, WHOLE_FILE), 0, 0
    with contextlib.closing(Buckets(plan, keyed_row(1), scratch)) as buckets:
        watch.begin("into buckets", sum(piece.num_bytes for piece in pieces), 0)
        for piece in pieces:
            location = Location(piece.uri, source_options)
            for lines, num_bytes in _read_lines(piece, location, plan.round_bytes, memory_bytes // 8):
                data, bounds = _terminated_lines(lines)
                buckets.add(shuffle_keys(seed, count, len(bounds) - 1), [(data, bounds)])
                count, size = count + len(bounds) - 1, size + len(data)
                watch.advance(num_bytes)
        watch.begin("in order", size, 0)
        refusal = f"{name}: exists; give another name, or --overwrite to replace it"
        with (
            create_or_compare(output, refusal, overwrite=overwrite) as stored,
            _compressing_writer(name, stored) as out,
        ):
            for _, (pieces_in_order,) in buckets.sorted():
                for text in pieces_in_order:
                    out.write(text)
                    watch.advance(len(text))
    return ShuffledLines(name, len(files), count, size, plan.num_buckets, time.monotonic() - began)


def _find_text(name: str, options: Options) -> list[Input]:
    """Return the inputs that a name stands for; a name without a known suffix is plain text."""
    try:
        files = find_inputs([name], storage_options=options)
    except ConfigError:
        files = find_inputs([name], format="txt", storage_options=options)
    for file in files:
        if file.format not in LINES:
            raise ConfigError(
                f"{file.uri}: rows of {file.format} are no lines; run binidx preprocess and shuffle the tokens"
            )
    return files


def _plan_buckets(files: Sequence[Input], memory_bytes: int, options: Options) -> ShufflePlan:
    """Plan buckets from the estimated bytes, and from the mean line length at the start of the first input."""
    num_bytes = sum(_estimate_plain_bytes(file) for file in files)
    whole = plan_slices([file for file in files if file.size], WHOLE_FILE)
    head = None
    if whole:
        location = Location(whole[0].uri, options)
        head, _ = next(_read_lines(whole[0], location, MIB, memory_bytes // 8), (None, 0))
    mean = len(head.data) / (bytes(head.data).count(b"\n") or 1) if head else 1.0
    return plan_shuffle(memory_bytes, num_bytes, int(num_bytes / mean), 1)


def _estimate_plain_bytes(file: Input) -> int:
    if file.format in CUT_ANYWHERE:
        return file.size
    return sum(block.count for block in file.blocks) or COMPRESSION_RATIO * file.size


def _read_lines(piece: Slice, location: Location, batch_bytes: int, most: int) -> Iterator[tuple[Lines, int]]:
    """Yield the lines of an input, about `batch_bytes` at once, with the number of stored bytes read for them."""
    for lines, num_bytes in read_lines(piece, batch_bytes, most, location, Extent()):
        if lines.too_long:
            raise FormatError(
                f"{piece.uri}: line too long (found {lines.too_long:,} bytes at byte {lines.position}, need at "
                f"most {most:,}, an eighth of the memory); raise --memory"
            )
        yield lines, num_bytes


def _terminated_lines(lines: Lines) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of lines, with a newline at the end of each; and the start of each line, then the end."""
    data = np.frombuffer(lines.data, np.uint8)
    if data[-1] != NEWLINE:
        data = np.append(data, np.uint8(NEWLINE))
    return data, np.concatenate([[0], np.flatnonzero(data == NEWLINE) + 1])


def _compressing_writer(name: str, stored: Writer) -> AbstractContextManager[Any]:
    """Return a writer that compresses as the suffix of `name` requires."""
    if name.endswith(".gz"):
        # Level 6 and no time: the same lines give the same bytes.
        return gzip.GzipFile("", "wb", 6, WritableFile(stored), mtime=0)
    return codec_named(codec_of(name, end="")).create(stored, None)
