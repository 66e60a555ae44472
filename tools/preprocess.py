"""Tokenize text from any store into .bin/.idx datasets in any store.

Reads jsonl, csv, txt and warc (all also .gz and .zst), parquet and arrow, from disks, s3://, gs://, hf:// and http://;
names may be globs or folders. Standard input, as the name -, is jsonl, or as --format says; it is copied to a temporary
file first.

Writes PREFIX_KEY_document.bin and .idx for each key, the same bytes as Megatron's preprocess_data.py makes of clean
text, and beside them .lineage.parquet (the origin of each document) and .manifest.json (inputs, tokenizer and all
counts).

The work is cut into parts, each published atomically under PREFIX-parts/. After an interruption of any kind, kill -9
included, the same command resumes with the missing parts. At the end the store itself concatenates the parts, and they
are removed. The order is the input's, whatever makes the parts: processes of this machine, --engine ray,
ray:ADDRESS or dask=ADDRESS, or any scheduler that starts this command n times with --shard 0/n to n-1/n; the last of
these finishes, or --finish does.

Every row is accounted for: rows in = documents out + rows dropped, by reason, or the exit status is 1. A row that is no
document stops the job, unless --on-error skip or quarantine, which writes it to PREFIX.quarantine.jsonl.

--dry-run prints three documents as they will be tokenized, and an estimate of tokens, bytes, parts and time.

Options of Megatron's tool mean the same; those that have no effect here are taken with a warning.

exit status: 0 the datasets stand, or the shard is done; 1 the data is bad; 2 the call is wrong

example:
  binidx preprocess data/web.jsonl --to data/web --tokenizer data/tokenizer.json --append-eod --eod "<|endoftext|>"
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import binidx
from binidx.errors import FormatError

from ._command import RESUMES, Command, print_result
from ._display import counts, human_seconds, print_note
from ._display import table as columns
from ._options import add_json, add_workers, chosen, num_bytes, target
from ._text_options import add_filters, add_text, add_tokenizer, parse_filters, parse_tokenizer
from .estimate import describe as describe_estimate

if TYPE_CHECKING:
    from binidx.format.sidecars.dataset_manifest import Machine
    from binidx.prepare.preprocess.preprocess import JobStatus, Report


FINISH = (None, 1)
"""Shard of `--finish`: it makes no part, and merges the parts of the other shards."""

PREPROCESSING = ("engine", "workers", "overwrite", "watch", "task_memory", "task_resources")
"""Arguments of the library that have the names of options."""

WITHOUT_EFFECT = {
    "--partitions": "the text is cut into parts of --part-bytes",
    "--log-interval": "a bar, or a line a minute, shows the progress",
    "--keep-sequential-samples": "documents always stay in their order",
}
"""Option of Megatron's tool that is taken -> what there is in its place."""

MOST_SOURCES = 20
"""Most rows of sources in the summary."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command, in three groups."""
    group: Any = options.add_argument_group("text")
    group.add_argument("inputs", nargs="*", metavar="INPUT", help="path, URI, glob or folder; in the order given")
    group.add_argument("--input", action="append", default=[], metavar="INPUT", help="one more")
    add_text(group, "a dataset each")
    group.add_argument("--split-sentences", action="store_true", help="each sentence is a sequence; needs nltk")
    group.add_argument("--lang", dest="language", default="english", metavar="LANG", help="of the sentences (english)")
    group.add_argument("--keep-newlines", action="store_true", help="sentences keep the newlines after them")
    add_filters(group, "drop {}")
    group.add_argument("--min-tokens", type=int, metavar="N", help="drop shorter documents")
    group.add_argument("--max-tokens", type=int, metavar="N", help="drop longer ones")
    ways = ["raise", "skip", "quarantine"]
    group.add_argument("--on-error", choices=ways, default="raise", help="for a row that is no document (raise)")
    group.add_argument("--id-key", metavar="KEY", help="field that goes into the lineage")

    group = options.add_argument_group("tokens")
    to = {"dest": "output", "required": True, "type": target, "metavar": "PREFIX"}
    group.add_argument("--to", "--output-prefix", **to, help="path or URI: PREFIX_KEY_document")
    add_tokenizer(group)
    group.add_argument("--append-eod", action="store_true", help="end each document with EOD")
    empty = "a document of no tokens: one of no sequence (Megatron), of an EOD (its fast path), or dropped"
    group.add_argument("--empty", choices=["zero-seq", "eod", "drop"], default="zero-seq", help=empty)
    compared = "of texts that the reference tokenizes too (0.0001)"
    group.add_argument("--compare", dest="compared_share", type=float, default=1e-4, metavar="SHARE", help=compared)
    group.add_argument("--compress", action="store_true", help="write a .bin.zst")
    group.add_argument("--codec", metavar="NAME", help="codec of the tokens; also one of an installed package")
    group.add_argument("--no-lineage", action="store_true", help="write no .lineage.parquet, which needs pyarrow")
    add_json(group, "--target-options", "fsspec's options for the datasets")

    group = options.add_argument_group("work")
    add_workers(group, "parts", "local").add_argument(
        "--finish", dest="shard", action="store_const", const=FINISH, help="make no part; put them together"
    )
    group.add_argument("--status", action="store_true", help="only print the progress of this job, here or elsewhere")
    group.add_argument("--dry-run", action="store_true", help="only print three tokenized documents and an estimate")
    group.add_argument("--part-bytes", type=num_bytes, metavar="SIZE", help="of text in a part (4 to 512 MiB)")
    for flag in WITHOUT_EFFECT:
        how: dict[str, Any] = {"action": "store_true"} if flag == "--keep-sequential-samples" else {"type": int}
        group.add_argument(flag, help=argparse.SUPPRESS, **how)
    group.add_argument("--overwrite", action="store_true", help="replace datasets, and parts of another job")


def make(arguments: argparse.Namespace) -> int | None:
    """Tokenize, or with --status print the progress of a job that runs elsewhere or has stopped."""
    from binidx.prepare.preprocess.preprocess import job_status

    for flag, why in WITHOUT_EFFECT.items():
        if vars(arguments)[flag[2:].replace("-", "_")]:
            print_note("binidx preprocess", f"{flag}: has no effect; {why}", "warning")
    job = parse_job(arguments)
    if arguments.status:
        status = job_status(job)
        print_result(status.to_json(), describe_status(status), arguments)
        return None
    if arguments.dry_run:
        show_plan(job, arguments)
        return None
    shard = arguments.shard and binidx.Shard(*arguments.shard)
    done = binidx.preprocess(job, shard=shard, **chosen(arguments, *PREPROCESSING))
    print_result(done.to_json(), describe(done), arguments)
    if done.finished and not any(manifest["dataset"]["documents"] for manifest in done.manifests.values()):
        inputs = ", ".join(job.inputs[:3]) + ", ..." * (len(job.inputs) > 3)
        raise FormatError(f"{inputs}: no document in them; {remove_empty(job, arguments.overwrite)}name other text")
    return 0 if done.finished or arguments.shard not in (None, FINISH) else 1


def remove_empty(job: binidx.Job, overwrite: bool) -> str:
    """Remove datasets without documents that replaced none; return the beginning of a clause about those that stay."""
    if overwrite:
        return "the dataset is empty; "
    from binidx.corpus.whole_dataset import DatasetTarget
    from binidx.storage.location import Location
    from binidx.storage.writing.publish import delete_object

    for prefix in job.datasets.values():
        target = DatasetTarget(Location(prefix, job.target_options), job.codec)
        target.remove_existing()
        delete_object(target.bin)
    return "no dataset is left; "


def show_plan(job: binidx.Job, arguments: argparse.Namespace) -> None:
    """Print the first documents with their tokens, the datasets that the job would write, and its estimate."""
    from binidx.prepare.preprocess.estimate import estimate_tokens, first_documents
    from binidx.tokenizers.library import open_decoder

    shown, decode = first_documents(job, 3), open_decoder(job.tokenizer, job.source_options)
    same = {name: vars(job)[name] for name in ("keys", "append_eod", "filters", "format", "engine", "source_options")}
    estimated = estimate_tokens(job.inputs, job.tokenizer, **same, sample_bytes=8 << 20, watch=arguments.watch)
    names, lines = {number: text for text, number in job.tokenizer.special_tokens}, []
    for document in shown:
        numbers = [*document.ids[:10], *document.ids[-1:]]
        pieces = [json.dumps(names.get(number) or decode([number]), ensure_ascii=False)[1:-1] for number in numbers]
        lines.append(f"{' '.join(document.text.split())[:70]}")
        lines.append(f"  {counts(tokens=len(document.ids))}: {'|'.join(pieces[:-1])}| … |{''.join(pieces[-1:])}")
    lines += ["", *(f"to {prefix}" for prefix in job.datasets.values()), describe_estimate(estimated)]
    values = {"documents": shown, "datasets": job.datasets, "estimate": estimated}
    print_result(values, "\n".join(lines), arguments)


def parse_job(arguments: argparse.Namespace) -> binidx.Job:
    """Return the job that the options describe: those with the name of a field of it, and those with another form."""

    same = {field.name: vars(arguments)[field.name] for field in fields(binidx.Job) if field.name in arguments}
    same |= {"keys": tuple(arguments.keys), "lineage": not arguments.no_lineage, "engine": arguments.tokenizer_engine}
    inputs = [copied_stdin() if name == "-" else name for name in (*arguments.inputs, *arguments.input)]
    same |= {"inputs": (*inputs,), "filters": parse_filters(arguments)}
    codec = arguments.codec or ("zstd" if arguments.compress else "raw")
    return binidx.Job(**{**same, "tokenizer": parse_tokenizer(arguments), "codec": codec})


def copied_stdin() -> str:
    """Copy standard input to a file, for workers that read it in parts and again; it is removed at exit."""
    folder = tempfile.mkdtemp(prefix="binidx-stdin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with open(path := os.path.join(folder, "stdin.jsonl"), "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def describe(done: Report) -> str:
    """Return the summary of a call as text."""
    if not done.finished:
        return (
            f"{done.job.output}: {counts(parts=done.parts_made)} made in {human_seconds(done.seconds)}; "
            f"{done.parts_missing} of {done.parts} are missing: the other shards make them, or this command without "
            f"--shard and --finish{describe_machines(done.machines)}"
        )
    lines = []
    for key, prefix in done.job.datasets.items():
        made = done.manifests[key]["dataset"]
        held = counts(documents=made["documents"], sequences=made["sequences"], tokens=made["tokens"])
        lines.append(f"{prefix}: {held} of {made['dtype']}")
    manifest = next(iter(done.manifests.values()))
    lines += describe_sources(manifest)
    engines = [
        f"{name} {counts(parts=engine['parts'])}"
        + (f" ({counts(texts=engine['compared'])} compared, all equal)" if engine["compared"] else "")
        for name, engine in manifest["engines"].items()
    ]
    kept = f", {done.parts - done.parts_made} made before" if done.parts_made < done.parts else ""
    lines.append(f"  {counts(parts=done.parts)}{kept}; {', '.join(engines)}; {human_seconds(done.seconds)}")
    return "\n".join(lines) + describe_machines(done.machines)


def describe_sources(manifest: dict[str, Any]) -> list[str]:
    """Return a line for each source: the rows read, the documents made, and the dropped rows by reason."""
    lines = [f"  {source['uri']}: {describe_counts(source['counts'])}" for source in manifest["sources"]]
    if len(lines) == 1:
        return lines
    if len(lines) > MOST_SOURCES:
        lines[MOST_SOURCES - 1 :] = [f"  ... {len(lines) - MOST_SOURCES + 1:,} more in the manifest"]
    return [*lines, f"  all: {describe_counts(manifest['counts'])}"]


def describe_counts(totals: dict[str, Any]) -> str:
    """Format counts: `10 rows = 8 documents (1 empty) + 2 dropped: 1 malformed, 1 blank line`."""
    empty = f" ({totals['num_empty']:,} empty)" if totals["num_empty"] else ""
    text = f"{counts(rows=totals['num_rows'])} = {counts(documents=totals['num_documents'])}{empty}"
    if totals["dropped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(totals["dropped"].items()))
        text += f" + {sum(totals['dropped'].values()):,} dropped: {reasons}"
    return text


def describe_status(status: JobStatus) -> str:
    """Return `s3://corpus/en: 12 of 40 parts, 31% of the text; ...`, and the machines."""
    if status.finished:
        return f"{status.output}: finished, {counts(parts=status.parts)}{describe_machines(status.machines)}"
    share = status.done_bytes / status.total_bytes if status.total_bytes else 0.0
    words = [f"{status.output}: {status.parts_done:,} of {counts(parts=status.parts)}, {share:.0%} of the text"]
    if status.bytes_per_second is not None:
        words.append(f"{status.bytes_per_second / 1e6:,.1f} MB/s")
    if status.seconds_left is not None:
        words.append(f"{human_seconds(status.seconds_left)} left at that pace")
    if status.last_part_seconds is not None:
        words.append(f"the last part {human_seconds(status.last_part_seconds)} ago")
    return "; ".join(words) + describe_machines(status.machines, least=1)


def describe_machines(machines: Mapping[str, Machine], least: int = 2) -> str:
    """Return a table of the machines that begins with a newline; "" if there are fewer than `least`.

    Args:
        machines: name of each machine -> its counts.
        least: fewest machines that are printed.
    """
    if len(machines) < least:
        return ""
    rows = []
    for name, machine in machines.items():
        numbers = [f"{count:,}" for count in (machine.parts, machine.documents, machine.tokens)]
        rate = "" if machine.bytes_per_second is None else f"{machine.bytes_per_second / 1e6:,.1f}"
        rows.append([name or "(unknown)", *numbers, rate])
    return "\n" + columns(("machine", "parts", "documents", "tokens", "MB/s"), rows)


main = Command("preprocess", __doc__, add_options, make, RESUMES, progress=True)
