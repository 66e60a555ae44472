"""Lines of JSON as batches: C reads what is plain, `json_line` decides of all else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from binidx.native.jsonl import JsonLines
from binidx.text.batch import Batch, Problem, Strings
from binidx.text.extent import Extent
from binidx.text.json_line import BLANK, NotADocument, parse_line
from binidx.text.lines import Lines
from binidx.text.slices import Slice

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineReader:
    """Batches out of lines.

    Args:
        keys: of the texts.
        fields: further members to be read.
        max_line_bytes: for the detail of a problem.
        extent: is told of all lines that were read.
    """

    piece: Slice
    keys: Sequence[str]
    fields: Sequence[str]
    max_line_bytes: int
    extent: Extent = field(default_factory=Extent)

    def batches(self, chunks: Iterable[Lines]) -> Iterator[tuple[list[Batch], list[Strings]]]:
        """The batches of all keys, and the fields beside them, of each chunk of lines."""
        row = 0
        for lines in chunks:
            batches, fields = self._too_long(lines, row) if lines.too_long else self._read(lines, row)
            row += batches[0].num_rows
            yield batches, fields

    def _read(self, lines: Lines, row: int) -> tuple[list[Batch], list[Strings]]:
        keys, fields = ([each.encode() for each in names] for names in (self.keys, self.fields))
        start = len(BOM) if lines.place == 0 and lines.data[: len(BOM)] == BOM else 0
        reader = JsonLines(lines.data, keys, fields, start)
        problems: list[Problem] = []
        blank = 0
        while (line := reader.next_odd()) is not None:
            try:
                reader.add(*parse_line(line, self.keys, self.fields))
            except NotADocument as error:
                blank += error.kind == BLANK
                if error.kind != BLANK:
                    problems.append(self._problem(error, row + reader.row, lines.place + reader.place, line))
                reader.skip()
        self.extent.add(lines.place, reader.place)
        rows, places = reader.rows + row, reader.places + lines.place
        dropped = Counter({BLANK: blank}) if blank else Counter[str]()
        batches = [
            Batch(key, *reader.texts(number), rows, places, None, problems, dropped, reader.row)
            for number, key in enumerate(self.keys)
        ]
        return batches, [Strings(*reader.field(number)) for number in range(len(fields))]

    def _too_long(self, lines: Lines, row: int) -> tuple[list[Batch], list[Strings]]:
        """No document, and the one problem."""
        error = NotADocument("too long", f"{lines.too_long} bytes, the limit is {self.max_line_bytes}")
        batches, fields = self._read(Lines(memoryview(b""), lines.place), row)
        self.extent.add(lines.place, lines.too_long)
        problems = [self._problem(error, row, lines.place, b"")]
        return [each.with_counts(problems=problems, num_rows=1) for each in batches], fields

    def _problem(self, error: NotADocument, row: int, place: int, line: bytes) -> Problem:
        first = self.piece.first_row
        number = "" if first is None else f"line {first + row + 1}, "
        return Problem(error.kind, self.piece.uri, row, place, f"{number}byte {place}", error.detail, line)
