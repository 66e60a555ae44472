"""The reader of lines against Python's json: what it takes, what it refuses, and every text, over broken lines."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from helpers.text_oracle import VALUES, by_json, documents_of, random_line

from binidx.prepare.text.jsonl import Lines, parse_json_lines, parse_lines
from binidx.prepare.text.rows import RowReader
from binidx.prepare.text.slices import Extent, ReadRequest, Slice
from binidx.storage.location import Location

KEYS, FIELDS = ["text", "title"], ["id", "n"]
PIECE = Slice("a.jsonl", "jsonl", {"size": 0}, 0, None, 0, 0, 0)

Row = tuple[int, int, list[list[str]], list[str | None]]
"""A document: its line, the byte where that begins, the texts of each key, each field."""


def read(data: bytes) -> tuple[list[Row], list[tuple[int, str]]]:
    """Documents, and the line and kind of each that is none, as our reader says."""
    request = ReadRequest(PIECE, KEYS, FIELDS, 1 << 20, 1 << 30, Location(PIECE.uri), Extent())
    rows = parse_lines(Lines(memoryview(data), 7), request, parse_json_lines)
    batches, fields = RowReader(request, ("line", 1)).make_batches(rows, 0)
    texts = zip(*map(documents_of, batches), strict=True)
    values = zip(*(column.tolist() for column in fields), strict=True)
    rows, places = batches[0].rows.tolist(), (batches[0].positions - 7).tolist()
    found = [(*each[:2], list(each[2]), list(each[3])) for each in zip(rows, places, texts, values, strict=True)]
    problems = [(each.row, each.kind) for each in batches[0].problems]
    assert batches[0].num_rows == len(found) + len(problems) + batches[0].dropped["blank line"]
    return found, problems


def oracle(data: bytes) -> tuple[list[Row], list[tuple[int, str]]]:
    """The same as json says, line by line."""
    found, problems, place = list[Row](), list[tuple[int, str]](), 0
    for row, line in enumerate(data.split(b"\n")):
        documents, kinds, _ = by_json(line, KEYS)
        problems += [(row, kind) for kind in kinds]
        found += [(row, place, texts, fields_of(json.loads(line))) for texts in documents]
        place += len(line) + 1
    return found, problems


def fields_of(value: dict[str, Any]) -> list[str | None]:
    return [None if value.get(name) is None else in_words(value[name]) for name in FIELDS]


def in_words(value: Any) -> str:
    return value.encode(errors="replace").decode() if isinstance(value, str) else json.dumps(value)


def check(lines: Iterable[bytes]) -> int:
    """That both say the same of these lines; how many documents there are."""
    data = b"\n".join(lines)
    (found, problems), (needed, kinds) = read(data), oracle(data)
    for one, other in zip(found, needed, strict=False):
        assert one == other
    assert problems == kinds
    assert len(found) == len(needed)
    return len(found)


TEMPLATES = [
    '{"text": "a\\u00e9\\n語", "title": "", "id": -10}'.encode(),
    b'{"title":["x","\\ud83d\\ude00"],"id":"7","text":[],"n":true}',
    b'{ "n" : null , "o":{"text":[1.5e-3,"\\\\"]}, "text":"0123456789abcdefghij" ,"title":"t"}\r',
]


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_every_byte_of_a_line_replaced_by_every_other(template: bytes) -> None:
    assert check([template]) == 1
    lines = (template[:at] + bytes([byte]) + template[at + 1 :] for at in range(len(template)) for byte in range(256))
    assert check(lines) > len(template)


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_every_run_of_a_line_left_out_or_there_twice(template: bytes) -> None:
    bounds = [(first, last) for last in range(len(template) + 1) for first in range(max(0, last - 12), last)]
    check(template[:first] + template[last:] for first, last in bounds)
    check(template[:last] + template[first:] for first, last in bounds)


TOKENS = [
    b'"',
    b"\\",
    b",",
    b":",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\\u0",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\xc3",
    b"\xa9",
    b"-",
]
TOKENS += [
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf0\x82\x82\xac",
    b"0",
    b"e1",
    b"null",
    b'"text":',
    b'"id":1,',
    b" ",
    b"\t",
]


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_every_token_put_in_at_every_place(template: bytes) -> None:
    check(template[:at] + token + template[at:] for at in range(len(template) + 1) for token in TOKENS)


def test_every_code_of_an_escape_and_every_start_of_a_character() -> None:
    check(
        b'{"text":"\\u%04x","title":"%d"}' % (code, code)
        for code in [*range(0x900), *range(0x900, 0xFFF0, 89), *range(0xFFF0, 0x10000)]
    )
    check(b'{"text":"\\ud83d\\u%04x","title":""}' % code for code in range(0xD700, 0xE100))
    ends = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
    starts = [bytes([first, second]) for first in range(0x80, 0x100) for second in ends]
    check(
        b'{"text":"%s%s","title":""}' % (start, rest)
        for start in starts
        for rest in (b"", b"\x80", b"\xbf\x80", b"\xbf\xc0")
    )


@pytest.mark.parametrize("field", ["id", "n"])
def test_every_odd_value_as_a_field_and_as_a_text(field: str) -> None:
    numbers = [
        *VALUES,
        "nan",
        "inf",
        "infinity",
        "True",
        "9" * 17,
        "9" * 18,
        "9" * 19,
        "-" + "9" * 18,
        "1" * 4300,
        "1" * 4301,
        "1E400",
        "-1e-400",
        "0.0",
    ]
    check(f'{{"text":"a","title":"b","{field}":{value}}}'.encode() for value in numbers)
    check(f'{{"text":"a","title":{value},"{field}":7}}'.encode() for value in numbers)


def mutated(rng: random.Random, lines: list[bytes]) -> Iterator[bytes]:
    """Each line changed in up to three places: a byte flipped, a run cut out, moved, or taken from another line."""
    for line in lines:
        for _ in range(rng.randrange(4)):
            first = rng.randrange(len(line) + 1)
            last = min(len(line), first + rng.choice((0, 1, 1, 2, 5, 20)))
            other = rng.choice(lines)
            start = rng.randrange(len(other) + 1)
            between = rng.choice((b"", bytes([rng.randrange(256)]), other[start : start + rng.choice((1, 3, 20))]))
            line = line[:first] + between + line[last:]
        yield line.replace(b"\n", b"")


def with_title(rng: random.Random) -> bytes:
    """A line that has both keys, mostly."""
    line = random_line(rng)
    return line.replace(b"{", b'{"title":"%d",' % rng.randrange(99), 1) if rng.random() < 0.9 else line


@pytest.mark.parametrize("seed", range(4))
def test_random_lines_broken_at_random(seed: int) -> None:
    rng = random.Random(seed)
    lines = [with_title(rng) for _ in range(3000)]
    assert check(lines) > 1000
    assert check(mutated(rng, lines)) > 500


def test_a_line_is_read_alike_wherever_it_ends() -> None:
    """Alone, so that the bytes behind it are none, and behind runs of every length."""
    rng = random.Random(9)
    for line in mutated(rng, [with_title(rng) for _ in range(600)]):
        check([line])
    for length in range(40):
        check([b"%s" % (b" " * length) + TEMPLATES[0], b'{"text":"%s","title":"\xc3\xa9"}' % (b"x" * length)])
