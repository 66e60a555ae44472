"""Copy datasets between any two places: a disk, s3://, gs://, anything fsspec opens, in either direction.

The source is checked in full before anything is written. The .bin goes first and is read back and compared; the .idx
goes last, so no dataset stands under the target's name before its tokens verify. After a break, kill -9 included, the
same command goes on with the missing parts, of 64 MiB to 1 GiB: TARGET-parts/, which is gone at the end, has a record
of each. (Stores other than disks, S3 and OSS keep no parts, GCS plain ones only: there the file begins again.)

A dataset that stands at the target already is compared with the source: if it is the same, nothing is done, else
--overwrite is needed. With --verify size that comparison is of the .idx and of 64 samples of the .bin (4 MiB): enough
to tell another tokenizer, order or seed, not enough to tell a few changed tokens; the output says which it was.

The tokens are stored at the target as at the source, unless told: --compress makes a .bin.zst of independent zstd
segments (natural text at level 3: 1.4 times smaller in uint16, 2.5 times in int32; zstd -d restores the exact .bin),
--plain the .bin of old. Every reader reads both. --checksums writes a .bin.xxh3 beside a plain .bin, 0.05 % of it, and
remote readers then check what they read; with the same prefix twice it does so for a dataset where it stands. Checksums
come along when a .bin that has some is copied.

Several datasets go into a folder, --to FOLDER/, each by its name.

A virtual merge arrives as one dataset. (binidx merge writes one, too, and lets the store move the tokens.)

With --engine, --workers or --shard the parts are made by processes of this machine, Ray, Dask, or any scheduler that
starts this command n times with --shard 0/n to n-1/n; the last of these finishes. Each part is an object under
TARGET-parts/; at the end the store itself joins them, and the tokens are read back. A compression by one process goes
the same way. The bytes are the same as without these options.

Endpoints and credentials are fsspec's own: AWS_* or FSSPEC_S3_* variables, ~/.config/fsspec. Options given here are for
the case that the two ends differ.

exit status: 0 the dataset stands at the target, or the shard is done; 1 the data is bad; 2 the call is wrong

example:
  binidx convert data/en --to s3://bucket/packed --compress 9
  binidx convert data/en --to s3://bucket/quick --engine local --workers 2
  binidx convert data/en data/code --to s3://bucket/
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from binidx.errors import ConfigError

from ._command import RESUMES, Command, print_result
from ._display import counts, counts_of_dataset, human_bytes, human_seconds
from ._options import add_dataset, add_stores, add_target, add_workers, chosen, chosen_workers

if TYPE_CHECKING:
    from binidx.corpus.convert import ConvertResult


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_dataset(options, "sources", metavar="SOURCE", nargs="+")
    add_target(options, "to copy it to; FOLDER/: under its own name")
    stored = options.add_mutually_exclusive_group()
    compress = "write a .bin.zst, at a level of 1 to 22 (3)"
    stored.add_argument("--compress", dest="level", metavar="LEVEL", type=level, nargs="?", const=0, help=compress)
    stored.add_argument("--plain", action="store_true", help="write a .bin, also from a .bin.zst")
    options.add_argument("--codec", metavar="NAME", help="codec of --compress (zstd); also one of an installed package")
    options.add_argument("--checksums", action="store_true", help="write a .bin.xxh3 beside a plain .bin")
    options.add_argument("--overwrite", action="store_true", help="replace another dataset, or wrong checksums")
    verify = "read back all that arrived (default), or only compare sizes and, with what stands there, samples"
    options.add_argument("--verify", choices=["checksum", "size"], default="checksum", help=verify)
    add_workers(options, "parts")
    add_stores(options)


def convert(arguments: argparse.Namespace) -> None:
    """Copy the datasets, one after the other, and print a summary of each."""
    from binidx.corpus.convert import StorageFormat, convert_dataset
    from binidx.storage.location import Location

    encoded = arguments.codec or ("zstd" if arguments.level is not None else None)
    codec = "raw" if arguments.plain else encoded
    way = StorageFormat(codec, arguments.level or None, arguments.checksums)
    options = chosen(arguments, "overwrite", "verify", "source_options", "target_options", "watch")
    folder = arguments.target if arguments.target.endswith("/") else ""
    targets = [folder + Location(source).name if folder else arguments.target for source in arguments.sources]
    if len(set(targets)) < len(targets):
        needed = "datasets of different names" if folder else "a folder, such as FOLDER/"
        raise ConfigError(f"--to: found {arguments.target} for {len(targets)} datasets, needs {needed}")
    texts, copies = [], []
    for source, place in zip(arguments.sources, targets, strict=True):
        done = convert_dataset(source, place, **options, way=way, workers=chosen_workers(arguments))
        sums = f"\n  its checksums are in {place}.bin.xxh3" if arguments.checksums and not done.parts_missing else ""
        texts.append(describe(done) + sums)
        copies.append(done)
    print_result(copies[0] if len(copies) == 1 else {"datasets": copies}, "\n".join(texts), arguments)


def level(text: str) -> int:
    """Parse a compression level; after a bare --compress, argparse passes the next argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text}, needed a level from 1 to 22; or say --compress last")
    return int(text)


def describe(done: ConvertResult) -> str:
    """Return the summary of a copy as text."""
    if done.parts_missing:
        made = f"{counts(parts=done.parts_sent)} made, {done.parts_kept:,} existed"
        left = counts(parts=done.parts_missing)
        return f"{done.target}: {made}; {left} left to other shards, the last of which finishes"
    counted = counts_of_dataset(done)
    held = f"  {counted}, {human_bytes(done.source_bytes)}"
    if done.target_bytes != done.source_bytes:
        held += f", at the target {human_bytes(done.target_bytes)}"
    if not done.copied:
        if done.verified == "index":
            return f"{done.target}: is the source, left alone; its index is valid, its tokens were not compared\n{held}"
        if done.verified == "checksum":
            return f"{done.target}: holds this dataset already, compared byte for byte\n{held}"
        return (
            f"{done.target}: index and size are this dataset's, and so are all samples of its tokens; left alone\n"
            f"{held}\n  the rest was not compared; --verify checksum does"
        )
    rate = human_bytes(done.bytes_sent / max(done.seconds, 1e-9))
    kept = f"; {done.parts_kept} of {done.parts_sent + done.parts_kept} parts were there from before"
    how = "read back and equal" if done.verified == "checksum" else "sizes equal, content not read back"
    return (
        f"{done.source} -> {done.target}\n{held}\n"
        f"  {human_bytes(done.bytes_sent)} sent in {human_seconds(done.seconds)} ({rate}/s)"
        f"{kept if done.parts_kept else ''}; {how}"
    )


main = Command("convert", __doc__, add_options, convert, RESUMES, progress=True)
