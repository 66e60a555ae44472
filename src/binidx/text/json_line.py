"""One line of jsonl by Python's own json: the rule that the fast reader keeps, and the answer where it gives up.

    line                                     answer
    {"text": "a"}                            a document of one text; [] of none, ["a", "b"] of two, "" of an empty one
    blank: spaces, tabs, CR                  dropped, counted as "blank line"
    not what json.loads reads                Problem "malformed": a NUL or another raw control character in a string, a
                                             number of more digits than Python reads, nesting too deep
    bytes that are not UTF-8                 Problem "not utf-8", wherever in the line
    [1], "a", 7                              Problem "not an object"
    no such key                              Problem "missing key"
    {"text": null}                           Problem "null"
    {"text": 7}, {"text": ["a", null]}       Problem "not text"
    {"text": "\\ud800"}                       Problem "lone surrogate"; in a field that nobody reads it is no problem
    longer than max_line_bytes               Problem "too long", without its bytes
    a key twice                              the last one counts, as in json.loads
    NaN, Infinity, in another field          as json.loads: no problem
    CR LF; no newline at the end             as without; U+2028, U+2029, U+0085 end no line
    a byte order mark                        left out where the file begins, "malformed" anywhere else
    \\u0000 in a text                         a character like any other

Source: Megatron Core's tools/preprocess_data.py reads lines by json.loads; it hangs where we say Problem.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BLANK = "blank line"
WHITESPACE = b" \t\r\n"

Texts = list[bytes]


class NotADocument(Exception):
    """Why a line is none: `kind` is one of KINDS, or BLANK."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def parse_line(line: bytes, keys: Sequence[str], fields: Sequence[str]) -> tuple[list[Texts], list[bytes | None]]:
    """The texts of each key, and the values of other fields: `field_value`.

    Raises:
        NotADocument: it is none.
    """
    found = _object(line)
    texts = [_texts(found, key) for key in keys]
    return texts, [field_value(found[name]) if found.get(name) is not None else None for name in fields]


def field_value(value: Any) -> bytes | None:
    """A string as it is, any other value as JSON; a lone surrogate becomes `?`, as an id is no text."""
    if value is None:
        return None
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


def _object(line: bytes) -> dict[str, Any]:
    if not line.strip(WHITESPACE):
        raise NotADocument(BLANK)
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise NotADocument("not utf-8", f"byte {line[error.start]:#04x} at {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise NotADocument("malformed", str(error)) from None
    except RecursionError:
        raise NotADocument("malformed", "nested too deep") from None
    except ValueError as error:  # int() refuses more than 4,300 digits
        raise NotADocument("malformed", str(error).partition(";")[0]) from None
    if not isinstance(found, dict):
        raise NotADocument("not an object", f"found {_kind(found)}, needed an object")
    return found


def _texts(found: dict[str, Any], key: str) -> Texts:
    if key not in found:
        raise NotADocument("missing key", f"{key!r} is not among {', '.join(map(repr, list(found)[:8])) or 'no keys'}")
    value = found[key]
    if value is None:
        raise NotADocument("null", f"{key!r} is null")
    strings = value if isinstance(value, list) else [value]
    for each in strings:
        if not isinstance(each, str):
            where = f"a list with {_kind(each)}" if isinstance(value, list) else _kind(each)
            raise NotADocument("not text", f"{key!r} is {where}, needed a string or a list of strings")
    try:
        return [each.encode() for each in strings]
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise NotADocument("lone surrogate", f"{key!r} has {code} at character {error.start}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
