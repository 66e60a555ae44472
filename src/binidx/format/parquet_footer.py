"""Footers of Parquet files, parsed in a child process first: pyarrow aborts on some damaged ones.

    this process    footer ──────────────► row groups    or FormatError: the child died, the next file gets a new one
    child               └──► pyarrow ──────┘

Cost: 0.3 s of CPU and 60 MB for the child, once for a process; a millisecond for each file.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from io import BufferedRWPair
from typing import Any

from binidx.errors import FormatError, WorkerError
from binidx.storage.interfaces import RangeReader

TAIL_BYTES = 64 << 10
"""Bytes at the end of a file that are read first; most footers fit."""

END_BYTES = 8
"""Bytes that follow the footer: its length, and the magic."""


RowGroup = tuple[int, int, int]
"""First stored byte, stored bytes of all columns, rows."""

Answer = tuple[list[RowGroup], str]
"""Row groups of a footer, and its problem: "" for a valid footer."""

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that end the child process if a damaged footer crashes pyarrow; another signal has another cause."""


def read_row_groups(reader: RangeReader) -> list[RowGroup]:
    """Return the row groups of a Parquet file.

    Raises:
        FormatError: not a Parquet file, or damaged.
        WorkerError: the child process did not start, or was killed.
    """
    return _read_footer(reader)[1]


def read_metadata(reader: RangeReader) -> Any:
    """Return pyarrow's metadata of a Parquet file, with which it opens the file without reading the footer again.

    Raises:
        FormatError: not a Parquet file, or damaged.
        WorkerError: the child process did not start, or was killed.
    """
    from binidx.format.arrow import pa, parquet

    return parquet.read_metadata(pa.BufferReader(b"PAR1" + _read_footer(reader)[0]))


def _read_footer(reader: RangeReader) -> tuple[bytes, list[RowGroup]]:
    """Return a footer that does not crash pyarrow, and its row groups."""
    tail = reader.read([(max(0, reader.size - TAIL_BYTES), reader.size)])[0]
    needed = int.from_bytes(tail[-END_BYTES:-4], "little") + END_BYTES
    if len(tail) < needed <= reader.size:
        tail = reader.read([(reader.size - needed, reader.size)])[0]
    footer = bytes(tail[-needed:])
    groups, problem = _child(os.getpid()).parse(footer, reader.size)
    if problem:
        raise FormatError(f"{reader.uri}: not a Parquet file, or damaged ({problem}); restore it from its source")
    return footer, groups


class _Child:
    """Child process that parses footers: started for the first footer, and again for the next one after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: tuple[subprocess.Popen[bytes], BufferedRWPair] | None = None

    def parse(self, footer: bytes, file_bytes: int) -> Answer:
        """Return the row groups of a footer, or a description of its problem."""
        with self._lock:
            process, pipe = self._started = self._started or _start()
            try:
                pickle.dump((footer, file_bytes), pipe)
                pipe.flush()
                answer: Answer = pickle.load(pipe)
                return answer
            except BaseException as error:
                died = isinstance(error, (EOFError, OSError))
                if not died:  # Ctrl-C: the answer would be taken for that of the next footer
                    process.kill()
                self._started, code = None, process.wait()
                with contextlib.suppress(OSError):
                    pipe.close()
                if not died:
                    raise
                if -code not in CRASHES:
                    raise WorkerError(f"the process that reads Parquet footers ended with {code}; run again") from error
                return [], f"pyarrow died of it, {signal.strsignal(-code)}"


@functools.cache
def _child(pid: int) -> _Child:
    """Return the child process that parses footers for process `pid`; a forked process gets one of its own."""
    return _Child()


def _start() -> tuple[subprocess.Popen[bytes], BufferedRWPair]:
    """Start the child process; return it, and the pipe to it, which is its stdin: others may print to its stdout."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    ours, stdin = socket.socketpair()
    with ours, stdin:
        silence = subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, "-c", code], stdin=stdin.fileno(), stdout=silence, stderr=silence)
        pipe = ours.makefile("rwb")
    atexit.register(_stop, process, pipe, os.getpid())
    return process, pipe


def _stop(process: subprocess.Popen[bytes], pipe: BufferedRWPair, pid: int) -> None:
    if os.getpid() == pid:  # a fork leaves the child to its parent
        with contextlib.suppress(OSError):
            pipe.close()
        process.wait()


def serve() -> None:
    """Run the child process: read footers from stdin, a socket, and answer each with its row groups or its problem."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError), open(0, "wb") as answers:
        while True:
            footer, file_bytes = pickle.load(sys.stdin.buffer)
            try:
                answer: Answer = parse_footer(footer, file_bytes), ""
            except Exception as error:
                answer = [], " ".join(str(error).split()) or repr(error)
            pickle.dump(answer, answers)
            answers.flush()


def parse_footer(footer: bytes, file_bytes: int) -> list[RowGroup]:
    """Return the row groups of a footer; a damaged one makes pyarrow raise, or kill this process.

    Args:
        footer: the footer, its length and the magic: the last bytes of the file.
        file_bytes: size of the file, which all columns must be within.
    """
    from binidx.format.arrow import pa, parquet

    file, groups = parquet.ParquetFile(pa.BufferReader(b"PAR1" + footer)), list[RowGroup]()
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        columns_of(group, ["a"])  # the reader gets their paths, too
        columns = columns_of(group)
        ranges = [column_range(column) for column in columns]
        for at, column in enumerate(columns):
            if (needed := file.schema.column(at).physical_type) != column.physical_type:  # reading it would kill
                raise ValueError(f"row group {number} has a column of {column.physical_type}, the schema {needed}")
        if group.num_rows < 0 or any(not 0 <= first <= stop <= file_bytes for first, stop in ranges):
            raise ValueError(f"row group {number} has {group.num_rows} rows in {ranges} of {file_bytes} bytes")
        groups.append((min(ranges, default=(0, 0))[0], sum(stop - first for first, stop in ranges), group.num_rows))
    if sum(num_rows for _, _, num_rows in groups) != file.metadata.num_rows:
        raise ValueError(f"the row groups do not have the {file.metadata.num_rows} rows of the file")
    file.schema_arrow  # noqa: B018 - the reader converts it, too
    return groups


def columns_of(group: Any, names: Any = None) -> list[Any]:
    """Return the stored columns of a row group with these names, or all; a list has the stored column of its items.

    Args:
        group: pyarrow's metadata of a row group.
        names: names of columns at the top of the schema; None for all.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    if names is None:
        return columns
    # A name may have dots itself.
    return [column for column in columns if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)]


def column_range(column: Any) -> tuple[int, int]:
    """Return the byte range (start, stop) of a row group's column in the file."""
    first = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return first, first + column.total_compressed_size
