"""Find the documents in which an exact text, or a sequence of token ids, stands.

TEXT is compared byte for byte with the text of each document, across the bounds of tokens and never across documents,
wherever the tokens lie. The tokenizer is that of the manifest beside the dataset, or --tokenizer: byte-level BPE, or
SentencePiece. -e gives several texts, and then all arguments are prefixes. With --tokens, TEXT is ids: 464,2330,22746.

--normalize compares normal forms, of TEXT or the items and of each document. Characters are compared by their Unicode
NFKC and without case. Blanks, controls, punctuation ($+<=>^`|~ too) and bytes that are no UTF-8 become one blank a run.
Format characters, as soft hyphens, are left out; accents and other symbols stay. A line on stderr says which was done.

Each line of the output names a document: prefix, tab, number. So it is a list as binidx.View takes it, to train without
these documents, and as `binidx where RUN --documents -` and `binidx where RUN --count` do. --show adds origins and the
text around the first match, for people.

--queries finds the items of an evaluation: each item's n-grams of words are searched for, and the table has the items
of which one stands in a document. With --run the data is that of a run, and the table has how many samples it has read
of which all tokens of an n-gram of the item are inputs (`whole`), and of which only some of them are (`part`).

With --engine, --workers or --shard the tokens are read in parts, as by `binidx verify`.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx grep "white rabbit" s3://corpus/en > drop.txt
  binidx grep -e "white rabbit" -e "pink eyes" s3://corpus/en --show
  binidx grep --normalize "the white rabbit's watch" s3://corpus/en
  binidx grep --tokens 464,2330,22746 s3://corpus/en --workers 8
  binidx grep --queries evals.jsonl --ngram 13 --run run.json --to drop.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import binidx
from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import counts, human_bytes, human_seconds
from ._display import table as columns
from ._options import add_json, add_workers, chosen, chosen_workers, prefix
from ._run_options import add_normalize, add_steps, add_text_tokenizer

if TYPE_CHECKING:
    from binidx.search.document_search import SearchResult

AROUND = 60
"""Bytes of text before and after a match that --show prints."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("names", nargs="*", metavar="TEXT PREFIX", help="the text, then prefixes of datasets")
    options.add_argument("-e", dest="texts", action="append", metavar="TEXT", help="a text; may be repeated")
    options.add_argument("--tokens", action="store_true", help="texts are token ids: 464,2330")
    add_normalize(options)
    options.add_argument("--queries", metavar="FILE", help="items of an evaluation, a JSON object a line")
    options.add_argument("--key", metavar="KEY", help="of the text of an item (all strings but id)")
    options.add_argument("--ngram", type=int, default=13, metavar="N", help="words of an n-gram (13)")
    options.add_argument("--run", metavar="RUN", help="search the data of a run.json, and count its reads")
    add_steps(options, ":N", help="count only steps before N (all)")
    add_text_tokenizer(options, "by default that of the manifest")
    options.add_argument("--show", action="store_true", help="origins, and the text around the first match")
    options.add_argument("--to", metavar="LIST", help="write the list of documents there, too")
    add_workers(options, "parts")
    options.add_argument("--records", metavar="DIR", help="folder of the parts' findings, for restarts and shards")
    add_json(options, "--storage-options", "fsspec's own, for all URIs")


def grep(arguments: argparse.Namespace) -> None:
    """Search, and print the documents, or the items with theirs."""
    from binidx.search.document_search import find_token_table, search_documents
    from binidx.search.matches import find_ranges, search_sources
    from binidx.search.normalize import normalize_text
    from binidx.search.queries import count_ngrams, match_items, read_queries
    from binidx.storage.location import Location

    from ._runs import open_order, print_comparison, stop_step, write_text

    if arguments.run and not arguments.queries:
        raise ConfigError("run: needs --queries; of other texts: binidx where RUN --text FILE")
    history = open_order(arguments) if arguments.run else None
    names = [*arguments.names]
    texts = arguments.texts or ([] if arguments.queries else names[:1])
    prefixes = [prefix(name) for name in (names if arguments.texts or arguments.queries else names[1:])]
    asked: list[str | None] = [*prefixes] or [None]
    selected = [history.select_sources(name) for name in asked] if history else []
    sources = {name: source for each in selected for name, source in each.items()}
    prefixes = [source.prefix for source in sources.values()] or prefixes
    if not (texts or arguments.queries) or not prefixes:
        raise ConfigError("names: found no text or no prefix, needs TEXT PREFIX ...")
    if arguments.queries and (texts or arguments.tokens):
        raise ConfigError("queries, texts: found both, need one")
    options = arguments.storage_options
    items = read_queries(Location.of(arguments.queries, options), arguments.key) if arguments.queries else []
    ngrams: list[list[int]] = []
    if arguments.normalize:  # n-grams of the words that normal forms have
        items = [replace(item, texts=[*map(normalize_text, item.texts)]) for item in items]
    if items:
        texts, ngrams = count_ngrams(items, arguments.ngram)
    locations = [Location.of(name, options) for name in prefixes]
    table = None if arguments.tokens else find_token_table(locations, arguments.tokenizer)
    patterns = [parse_ids(text) for text in texts] if arguments.tokens else texts
    place = {"workers": chosen_workers(arguments), **chosen(arguments, "records", "normalize", "watch")}
    if sources:
        result = search_sources(sources, patterns, table, options, **place)
    else:
        result = search_documents(locations, patterns, table, **place)
    arguments.watch.end_stage()
    if arguments.to:
        write_text(arguments.to, result.format_list(), options)
    if items:
        rows = match_items(items, ngrams, result.hits)
        if history is not None:
            reads = _count_reads(history, find_ranges(sources, result), ngrams, stop_step(history, arguments.steps))
            rows = [row | each for row, each in zip(rows, reads, strict=True)]
        print_result({"items": rows, **_searched(result)}, _table(rows), arguments)
    else:
        documents = [*_documents(result, arguments)] if arguments.show or arguments.json else []
        text = _blocks(documents) if arguments.show else result.format_list().rstrip("\n")
        if text or arguments.json:
            print_result({"documents": documents, **_searched(result)}, text, arguments)
    _print_summary(result)
    if table is not None:
        print_comparison(result.normalized)


def parse_ids(text: str) -> list[int]:
    """Parse token ids, separated by commas or blanks."""
    try:
        if ids := [int(number) for number in text.replace(",", " ").split()]:
            return ids
    except ValueError:
        pass
    raise ConfigError(f"tokens: found {text!r}, needs ids such as 464,2330")


def _count_reads(history: Any, ranges: Mapping[str, Any], ngrams: Sequence[list[int]], stop: int) -> list[Any]:
    """Return the reads of each item before a step of a run, as `binidx where` counts them, in JSON values.

    Args:
        history: the run.
        ranges: of the documents with each pattern, by source.
        ngrams: numbers of the patterns of each item.
    """
    from binidx.run.provenance.exposures import count_groups
    from binidx.search.queries import group_matches

    from ._runs import column_rows

    groups = {name: group_matches(ngrams, matches) for name, matches in ranges.items()}
    reads = count_groups(history, groups, len(ngrams), stop)
    return column_rows({name: column for name, column in reads.items() if name not in ("tokens", "times_started")})


def _searched(result: SearchResult) -> dict[str, Any]:
    """Return what was searched, in JSON values."""
    names = ("num_documents", "num_tokens", "num_bytes", "seconds", "parts_missing", "normalized")
    return {"searched": {name.removeprefix("num_"): getattr(result, name) for name in names}}


def _documents(result: SearchResult, arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the documents in JSON values."""
    from binidx.run.display.sample_rows import known_origins
    from binidx.search.normalize import normalize_bytes
    from binidx.storage.location import Location

    for name, numbers in result.documents().items():
        location, hits = Location.of(name, arguments.storage_options), result.hits[name]
        origins = known_origins(location, numbers.tolist()) if arguments.show else {}
        with_text = arguments.show or result.normalized
        dataset = binidx.IndexedDataset(name, storage_options=arguments.storage_options) if with_text else None
        for number in numbers.tolist():
            rows = hits[slice(*hits[:, 0].searchsorted([number, number + 1]))]
            document = {"prefix": name, "document": number, "matches": int(rows[:, 2].sum())}
            document |= {"patterns": rows[:, 1].tolist(), "byte": int(rows[:, 3].min())}
            if origin := origins.get(number):
                document["origin"] = origin
            if dataset is not None and result.table is not None:
                bounds = dataset.document_indices[number : number + 2].tolist()
                text = result.table.decode([int(id) for tokens in dataset[slice(*bounds)] for id in tokens])
                if result.normalized:
                    document["byte"] = int(normalize_bytes(text)[1][document["byte"]])
                around = text[max(document["byte"] - AROUND, 0) : document["byte"] + 2 * AROUND]
                if arguments.show:
                    document["text"] = " ".join(around.decode(errors="ignore").split())
            yield document


def _blocks(documents: Sequence[dict[str, Any]]) -> str:
    from binidx.format.sidecars.lineage import origin_text

    lines = list[str]()
    for each in documents:
        lines.append(f"{each['prefix']}  document {each['document']:,}  {counts(places=each['matches'])}")
        lines += [f"    from {origin_text(each['origin'])}"] if "origin" in each else []
        lines += [f"    {each['text']}"] if "text" in each else []
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the items of which an n-gram was found, as a table."""
    from ._runs import READ_HEAD, read_cells

    found = [row for row in rows if row["found"]]
    has_run = "samples" in rows[0]
    head = ["item", "found", "of", "documents", *READ_HEAD[: 4 * has_run]]
    counted = [(row["found"], row["ngrams"], sum(map(len, row["documents"].values()))) for row in found]
    cells = [
        [str(row["id"] or row["line"]), *(f"{count:,}" for count in own), *(read_cells(row) if has_run else ())]
        for row, own in zip(found, counted, strict=True)
    ]
    short = sum(not row["ngrams"] for row in rows)
    told = f"{len(found):,} of {counts(items=len(rows))} found" + (f", {short:,} with too few words" if short else "")
    return f"{columns(head, cells)}\n{told}" if cells else told


def _print_summary(result: SearchResult) -> None:
    num_found = sum(map(len, result.documents().values()))
    rate = human_bytes(result.num_bytes / max(result.seconds, 1e-9))
    what = counts(documents=result.num_documents, tokens=result.num_tokens)
    left = f"; {counts(parts=result.parts_missing)} left to other shards" if result.parts_missing else ""
    print(f"{num_found:,} of {what}; {human_seconds(result.seconds)}, {rate}/s{left}", file=sys.stderr)


main = Command("grep", __doc__, add_options, grep, progress=True)
