"""Who saw a document: every step, rank and slot whose sample has a token of it, for takedowns and contamination.

The way back from a document through all indices of the run: one pass over each, no token is read. A document is named
as `binidx trace` prints it: its number in its source, and the source where the run has several; and as there, the file
and row it came from are shown where its source has lineage. Then it may be named by these, too, or by its id.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx where run.json --document 123456 --source s3://corpus/en --before-step 41200
  binidx where run.json --document crawl-07.jsonl.zst:4711 --document id=6ba7b810
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if __name__ == "__main__":  # python tools/where.py: see convert.py
    __package__ = "binidx.tools"

from binidx.errors import ConfigError
from binidx.order.run_order import RunOrder
from binidx.prepare.origin_search import documents_at, documents_with_id

from ._face import parser, run
from ._orders import add_run, open_run, print_rows, rows_of, stop_step


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser("where", __doc__)
    add_run(options)
    options.add_argument(
        "--document", action="append", required=True, metavar="N", help="a number, FILE:ROW or id=ID; may be repeated"
    )
    options.add_argument("--source", metavar="PREFIX", help="prefix of the source; not needed where there is one")
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N; by default all of the run")
    options.add_argument("--json", action="store_true", help="print one JSON object a sample")
    arguments = options.parse_args(argv)

    def body() -> int:
        order = open_run(arguments)
        stop = stop_step(order, arguments.before_step)
        try:
            source = source_of(order, arguments.source)
            documents = [number for name in arguments.document for number in documents_of(order, source, name)]
            readings, contents = order.where(source, documents, stop)
        except IndexError as error:
            raise ConfigError(str(error)) from error
        count = print_rows(rows_of(order, readings, contents), arguments.json)
        print(f"{count:,} samples in {len(set(readings.step.tolist())):,} of {stop:,} steps", file=sys.stderr)
        return 0

    return run("where", body)


def documents_of(order: RunOrder, source: int, name: str) -> list[int]:
    """The numbers of the documents that are meant."""
    if name.isdecimal():
        return [int(name)]
    prefix, options = order.prefixes[source], order.sources[source].config.storage_options
    file, colon, row = name.rpartition(":")
    if name.startswith("id="):
        found = documents_with_id(prefix, name.removeprefix("id="), options)
    elif colon and row.isdecimal():
        found = documents_at(prefix, file, int(row), options)
    else:
        raise ConfigError(f"--document: found {name}, needs a number, FILE:ROW or id=ID")
    if not found:
        raise ConfigError(f"--document: {prefix} has no document {name}")
    return found


def source_of(order: RunOrder, prefix: str | None) -> int:
    """The number of the source that is meant."""
    names = order.prefixes
    if prefix is None and len(names) == 1:
        return 0
    if prefix not in names:
        raise ConfigError(f"--source: found {prefix}, needs one of {', '.join(names)}")
    return names.index(prefix)


if __name__ == "__main__":
    raise SystemExit(main())
