"""What tests of text share: the rule of a line said once more, random lines, and slices read to their end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from binidx.prepare.text.batch import Batch, Problem
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import Slice, plan_slices

Document = list[str]


@dataclass
class Read:
    """All that slices gave: texts of each document and key, and the rest beside them."""

    documents: list[list[Document]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_bytes: int = 0

    @property
    def texts(self) -> list[Document]:
        """Those of the first key."""
        return [each[0] for each in self.documents]

    def add(self, batches: Sequence[Batch]) -> None:
        check_batches(batches)
        self.documents += [list(each) for each in zip(*map(documents_of, batches), strict=True)]
        first = batches[0]
        self.positions += first.positions.tolist()
        self.rows += first.rows.tolist()
        self.ids += first.ids.tolist() if first.ids else []
        self.problems += first.problems
        for reason, count in first.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.num_rows += first.num_rows
        self.num_bytes += first.num_bytes


def check_batches(batches: Sequence[Batch]) -> None:
    """What must hold in every batch: bounds tile what they bound, and every row is accounted for."""
    for each in batches:
        assert each.offsets[0] == each.documents[0] == 0
        assert each.offsets[-1] == len(each.texts)
        assert each.documents[-1] == len(each.offsets) - 1
        assert (each.offsets[1:] >= each.offsets[:-1]).all()
        assert (each.documents[1:] >= each.documents[:-1]).all()
        assert len(each.documents) - 1 == each.num_documents == len(each.positions)
        assert each.num_rows == each.num_documents + len(each.problems) + each.dropped.total()
        assert each.problems is batches[0].problems
        assert each.dropped == batches[0].dropped


def documents_of(batch: Batch) -> list[Document]:
    return [
        [batch.text(number) for number in range(batch.documents[d], batch.documents[d + 1])]
        for d in range(batch.num_documents)
    ]


def read_all(slices: Iterable[Slice], keys: Sequence[str] = ("text",), **options: Any) -> Read:
    found = Read()
    for each in slices:
        for batches in read_slice(each, keys, **options):
            found.add(batches)
    return found


def read_file(path: Path | str, keys: Sequence[str] = ("text",), part_bytes: int = 1 << 40, **options: Any) -> Read:
    where = {name: options[name] for name in ("storage_options",) if name in options}
    return read_all(plan_slices(find_inputs(str(path), **where), part_bytes), keys, **options)


def cut_at(path: Path, bounds: list[int]) -> list[Slice]:
    """Slices of a plain file between these bytes."""
    (found,) = find_inputs(str(path))
    return [
        Slice(found.uri, "jsonl", found.identity, first, last, first, last - first, None if first else 0)
        for first, last in pairwise(bounds)
    ]


def by_json(data: bytes, keys: Sequence[str] = ("text",)) -> tuple[list[list[Document]], list[str], int]:
    """Documents, kinds of problems and blank lines of a jsonl, by Python's json alone."""
    documents, kinds, blank = [], [], 0
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not line.strip(b" \t\r"):
            blank += 1
            continue
        try:
            documents.append(_document(json.loads(line.decode()), keys))
        except UnicodeDecodeError:
            kinds.append("not utf-8")
        except KeyError as error:
            kinds.append(error.args[0])
        except UnicodeEncodeError:
            kinds.append("lone surrogate")
        except (ValueError, RecursionError):
            kinds.append("malformed")
    # What follows the last newline is no line where it is nothing.
    return documents, kinds, blank - (data.endswith(b"\n") or not data)


def _document(value: Any, keys: Sequence[str]) -> list[Document]:
    if not isinstance(value, dict):
        raise KeyError("not an object")
    return [_texts(value, key) for key in keys]


def _texts(value: dict[str, Any], key: str) -> Document:
    if key not in value:
        raise KeyError("missing key")
    if value[key] is None:
        raise KeyError("null")
    strings = value[key] if isinstance(value[key], list) else [value[key]]
    if not all(isinstance(each, str) for each in strings):
        raise KeyError("not text")
    for each in strings:
        each.encode()
    return list(strings)


PIECES = [
    *('"', "\\", "\\n", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\udc00", "\\u0000", "\\x", "\\/", "\\\\", "/"),
    *(
        "é",
        "語",
        "😀",
        "\u2028",
        "\x7f",
        "\x00",
        "\t",
        " ",
        "a",
        "0",
        "plain words, more of them than a block has bytes ",
    ),
]
VALUES = [
    *("null", "true", "false", "0", "-0", "-1", "01", "1.", "1.5e-3", "1e5", "1E+2", "-", "NaN", "-Infinity", "1e400"),
    *(
        "[]",
        "{}",
        '[["a"]]',
        '["a","b"]',
        '["a",null]',
        '[ "x" , "" ]',
        '{"a":{"text":"b"}}',
        '""',
        "tru",
        "nul",
        "[1,]",
    ),
    *('{"a":1,}', "{1:2}", '"a" "b"', "123456789012345678901", '"\\u12g4"', "[" * 40 + "]" * 40),
]
KEYS = ["text", "id", "id", "a", "b", "c", "te\\u0078t", "other", "tëxt", ""]
SPACES = ["", "", "", "", " ", "\t", "\r", "  ", "\x0b", "\xa0"]


def random_line(rng: random.Random) -> bytes:
    """A line of jsonl: as json writes it, or put together from odd pieces; now and then broken by a byte."""
    line = _written(rng) if rng.random() < 0.6 else _assembled(rng)
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 2))):
        at = rng.randrange(len(line) + 1)
        changed = rng.choice(
            (b"", b'"', b"\\", b"{", b"}", b",", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82", b"a")
        )
        line = line[:at] + changed + line[at + rng.choice((0, 1)) :]
    return line.replace(b"\n", b"")


def _written(rng: random.Random) -> bytes:
    texts = ["".join(rng.choices('ab \n"\\\té語😀\x00', k=rng.randrange(60))) for _ in range(3)]
    value = {
        "id": rng.choice([7, "x", True, None, texts[0]]),
        "text": rng.choice([texts[1], texts[1:], texts[2]]),
        "n": [1.5, {}],
    }
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=rng.choice([None, (",", ":")])).encode()


def _assembled(rng: random.Random) -> bytes:
    members = [f'"{rng.choice(KEYS)}"{_space(rng)}:{_space(rng)}{_value(rng)}' for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.7:
        members.insert(rng.randrange(len(members) + 1), f'"text":{_string(rng)}')
    between = f"{_space(rng)},{_space(rng)}"
    return f"{_space(rng)}{{{between.join(members)}{_space(rng)}}}{_space(rng)}".encode()


def _value(rng: random.Random) -> str:
    return rng.choice(VALUES) if rng.random() < 0.3 else _string(rng)


def _string(rng: random.Random) -> str:
    inner = [rng.choice(PIECES) for _ in range(rng.choice((0, 1, 3, 8)))]
    # Most of what would end the string or break it is left out, so that most strings are right.
    if rng.random() < 0.97:
        inner = [each for each in inner if each not in ('"', "\\", "\\x", "\x00", "\t")]
    return f'"{"".join(inner)}"'


def _space(rng: random.Random) -> str:
    return rng.choice(SPACES[:8] if rng.random() < 0.995 else SPACES)


def random_lines(seed: int, count: int, make: Callable[[random.Random], bytes] = random_line) -> list[bytes]:
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]
