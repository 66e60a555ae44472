"""Find every step, rank and slot that read a document, for takedowns and contamination.

Searches all indices of the run, by one pass over each; a million documents take seconds for each hundred million
samples. A row is a sample with a token of the
document. Where no token of it was an input, since the model had only to predict one, it says "only the last label".
A document is named as `binidx trace` prints it: its number in its source, and the source where the run has several; and
as there, the file and row it came from are shown where its source has lineage. Such a document may also be named by
these, or by its id, and is searched in all sources if none is given. --documents takes the output of `binidx grep`.

--count prints how often the model saw each document, first and last: `samples` counts the samples with a token of it as
an input, `trained` those that no iteration to skip has read, `started` reads of its first token, `tokens` its tokens
that were inputs. Samples in which it was only the last label do not count. --engine counts 65,536 documents a part,
whose workers open the run; there is no --shard.

--text counts each match of the text of a file, byte for byte, or with --normalize in normal form (binidx grep --help).
A match is all tokens that hold a byte of it: `whole` counts the samples of which all of them are inputs, `part` those
of which only some are. "tokens A to B" ends before token B. The tokens are read, once.

A sample that is read again counts again. A run that names the one before it, or has phases, is searched over its whole
history. Of a resumed run that names none, the samples before its consumed_samples are searched, too; their step, rank
and slot (null in JSON) are in the run.json of the earlier part. A cyclic run that names none must be searched part by
part, with --no-earlier. --json prints JSON Lines: an object for each sample; with --count and --text it prints one.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx where run.json --document 123456 --source s3://corpus/en --steps :41200
  binidx where run.json --document crawl-07.jsonl.zst:4711 --document id=6ba7b810
  binidx where run.json --documents drop.txt
  binidx where run.json --document id=6ba7b810 --count --steps :41200
  binidx where run.json --documents drop.txt --count --engine local
  binidx where run.json --text passage.txt --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any

from binidx.errors import ConfigError

from ._command import Command
from ._display import counts
from ._options import add_workers, counting_workers
from ._run_options import add_normalize, add_run, add_steps, add_text_tokenizer, add_topology


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--document", action="append", metavar="N", help="a number, FILE:ROW or id=ID; may be repeated")
    which.add_argument("--documents", metavar="LIST", help="a list, as binidx grep prints it; - reads stdin")
    which.add_argument("--text", metavar="FILE", help="a passage: the text of this file, without newlines at its end")
    options.add_argument("--source", metavar="PREFIX", help="the source; of a number needed where there are several")
    add_steps(options, help="steps from A to before B (all); of --count and --text only :B")
    options.add_argument("--count", action="store_true", help="a row for each document: how often, first and last step")
    add_text_tokenizer(options, "with --text; by default that of the manifests")
    add_normalize(options)
    options.add_argument(
        "--no-earlier", action="store_true", help="without the samples that a resumed run had consumed"
    )
    add_workers(options, "counts of --count", shards=False)
    add_topology(options)


def find(arguments: argparse.Namespace) -> None:
    """Print the samples with parts of the documents, or the counts of each document; and the number of the samples."""
    from binidx.run.display.sample_rows import build_rows
    from binidx.run.provenance.exposures import find_reads

    from ._exposures import describe_earlier, find_documents, find_passage, print_counts, reads_of_stored
    from ._runs import MANY_DOCUMENTS, listed_documents, open_order, parse_steps, print_rows, read_list, stop_step

    if arguments.normalize and arguments.text is None:
        raise ConfigError("normalize: needs --text, whose text it compares")
    place = counting_workers(arguments, "count")
    arguments.watch.begin("search", 0, 0, unit="")
    listed = read_list(arguments.documents, arguments.storage_options) if arguments.documents else None
    history = open_order(arguments, whole=listed is not None and len(listed) >= MANY_DOCUMENTS)
    counted = arguments.count or arguments.text is not None
    stop_step(history, arguments.steps) if counted else None
    steps = parse_steps(history, arguments.steps)
    documents: Mapping[str, Any]
    stored = {name: found for name in arguments.document or () if len(found := history.samples_named(name))}
    if listed is not None:
        documents = listed_documents(history, listed)
    elif arguments.text is not None:
        documents = find_passage(history, arguments)
        arguments.watch.begin("count", 0, 0, unit="")
    elif names := [name for name in arguments.document if name not in stored]:
        documents = find_documents(history.select_sources(arguments.source), names, arguments.storage_options)
    else:
        documents = {}
    try:
        if counted:
            print_counts(history, documents, stored, steps.stop, arguments, place)
            return
        num_rows, read_in, past = 0, set[int](), 0
        earlier = steps.start == history.first_step and not arguments.no_earlier
        searched = find_reads(history, documents, steps.stop, earlier=earlier)
        for order, reads, contents in chain(reads_of_stored(history, stored.values(), steps.stop), searched):
            if steps.start > history.first_step:
                reads = reads.at(reads.step >= steps.start)
                contents = order.contents(reads.sample)
            num_rows += print_rows(build_rows(order, reads, contents=contents), arguments.json)
            past += int((reads.step < 0).sum())
            read_in |= set(reads.step[reads.step >= 0].tolist())
    except IndexError as error:
        raise ConfigError(str(error)) from error
    arguments.watch.end_stage()
    text = f"{counts(samples=num_rows)} in {len(read_in):,} of {counts(steps=len(steps))}"
    print(f"{text}{describe_earlier(history, past if earlier else None)}", file=sys.stderr)


main = Command("where", __doc__, add_options, find, progress=True)
