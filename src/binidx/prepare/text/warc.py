"""Records of WARC files with extracted text, as Common Crawl's WET files: the key is `text`.

    WARC/1.0 CRLF                            a version
    WARC-Type: conversion CRLF               named fields, for --id-key and --keep: WARC-Record-ID, WARC-Target-URI
    Content-Length: 1834 CRLF CRLF
    text                                     so many bytes
    CRLF CRLF

    conversion                               a document: text that was extracted from a page
    warcinfo, request, metadata, revisit     dropped, counted as "warc request"
    response, resource                       Problem "not extracted": a fetched page; no text is extracted of HTML
    anything else between records            FormatError: no later record could be found for sure

The parser is ours, as those of others end at a truncated file without an error. Source: ISO 28500 (WARC 1.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from binidx.errors import FormatError
from binidx.prepare.text.plain_text import decode_text
from binidx.prepare.text.rows import ByteStream, NotADocument, Row, TruncatedError
from binidx.prepare.text.slices import ReadRequest

MOST_LINE_BYTES = 1 << 20
"""Longest line before the text; a URI may have 64 KiB and more."""

DROPPED = ("warcinfo", "request", "metadata", "revisit")
PAGE_REMEDY = "extract its text first (trafilatura, resiliparse), or take files of conversion records (.wet)"


def parse_warc(request: ReadRequest, stream: ByteStream) -> Iterator[Row]:
    """Yield the records of a file.

    Raises:
        FormatError: it is not WARC, or truncated.
    """
    number = 0
    while not stream.at_end():
        start, subject = stream.position, f"{request.piece.uri}: row {number}, byte {stream.position}"
        try:
            head, fields = _read_fields(stream, subject)
            length = _content_length(fields, subject)
            too_long = length > request.max_line_bytes
            if too_long:
                stream.skip(length)
            body, end = b"" if too_long else stream.take(length), stream.take(4)
        except TruncatedError as error:
            raise FormatError(f"{subject}: ends in the middle of a record; restore it from its source") from error
        if end != b"\r\n\r\n":
            raise FormatError(
                f"{subject}: no blank lines after its {length} bytes (found {end!r}); not WARC, or damaged"
            )
        value = _parse_record(fields, body)
        if too_long and isinstance(value, dict):
            value = NotADocument("too long", f"{length} bytes, the limit is {request.max_line_bytes}")
        yield Row(start, stream.position - start, value, b"" if too_long else head + body + end)
        number += 1


def _read_fields(stream: ByteStream, subject: str) -> tuple[bytes, dict[str, str]]:
    """Return the bytes of a record before its text, and its named fields."""
    lines = [stream.take_line(MOST_LINE_BYTES)]
    if not lines[0].startswith(b"WARC/"):
        raise FormatError(f"{subject}: not a record of WARC (found {lines[0][:20]!r}, need WARC/1.0); restore it")
    fields, name = dict[str, str](), ""
    while (line := stream.take_line(MOST_LINE_BYTES)).strip():
        lines.append(line)
        text = line.decode(errors="replace").rstrip("\r\n")
        if text[0] in " \t" and name:  # a folded line continues the field
            fields[name] += f" {text.strip()}"
        else:
            name, _, value = text.partition(":")
            fields[name] = value.strip()
    if not line.endswith(b"\n"):
        raise TruncatedError(subject)
    return b"".join([*lines, line]), fields


def _content_length(fields: dict[str, str], subject: str) -> int:
    text = next((value for name, value in fields.items() if name.lower() == "content-length"), "")
    if not (text.isascii() and text.isdigit()):
        raise FormatError(f"{subject}: no Content-Length (found {text!r}); not WARC, or damaged")
    return int(text)


def _parse_record(fields: dict[str, str], body: bytes) -> dict[str, Any] | NotADocument:
    """Return the fields of a record with its text, or why it is not a document."""
    kind = next((value for name, value in fields.items() if name.lower() == "warc-type"), "")
    if kind in DROPPED:
        return NotADocument(f"warc {kind}")
    if kind != "conversion":
        return NotADocument("not extracted", f"a record of type {kind!r} is no text; {PAGE_REMEDY}")
    text = decode_text(body, "text")
    return {**fields, "text": text} if isinstance(text, str) else text
