"""Text without structure: a document a line, or a document a file; its key is `text`.

    txt         each line is a document, without its newline or CR LF; blank lines are dropped and counted
    txt-file    each file is a document, with all of its bytes; an empty file is none

No name of a file decides between them: a book read by lines, or a corpus read as one document, would be wrong without
an error. A byte order mark at the beginning of a file is left out. Source: the builder `text` of Hugging Face datasets,
`sample_by` line (its default) and document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.text.jsonl import WHITESPACE
from binidx.prepare.text.rows import BLANK, BOM, ByteStream, NotADocument, Row, check_names
from binidx.prepare.text.slices import ReadRequest


def parse_text_lines(
    data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64], request: ReadRequest
) -> tuple[list[dict[str, Any]], dict[int, NotADocument]]:
    """Return the text of each line that is a document, and the error of each other line by its number."""
    check_names(request.piece.uri, ["text"], [*request.keys, *request.fields])
    documents, errors = list[dict[str, Any]](), dict[int, NotADocument]()
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        line = bytes(data[start:stop])
        text = decode_text(line.removesuffix(b"\r"), "line") if line.strip(WHITESPACE) else NotADocument(BLANK)
        if isinstance(text, str):
            documents.append({"text": text})
        else:
            errors[number] = text
    return documents, errors


def parse_text_file(request: ReadRequest, stream: ByteStream) -> Iterator[Row]:
    """Yield the document of a file."""
    check_names(request.piece.uri, ["text"], [*request.keys, *request.fields])
    data = stream.take_up_to(request.max_line_bytes)
    if not stream.at_end():
        length = len(data) + stream.skip()
        yield Row(0, length, NotADocument("too long", f"{length} bytes, the limit is {request.max_line_bytes}"))
    elif data:
        text = decode_text(data.removeprefix(BOM), "file")
        yield Row(0, len(data), {"text": text} if isinstance(text, str) else text, data)


def decode_text(data: bytes, unit: str) -> str | NotADocument:
    """Return UTF-8 as text, or the error of other bytes; `unit` names what they are."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return NotADocument("not utf-8", f"byte {data[error.start]:#04x} at {error.start} of the {unit}")
