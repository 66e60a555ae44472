"""Turn a dataset into packed files (LITPKDS, of lit-gpt, TinyLlama, the Gemstones), or packed files into a dataset.

  pack PREFIX --to DIR             documents one after the other, in files of --chunk-size tokens; --sep fills the last
  pack --back FILE ... --to PREFIX    each document is what ends with the token --sep; what fills the end is left out

After a break, the same command begins again; files that the first run had published are compared and left alone, while
other content needs --overwrite. --shard I/N splits the files between machines, as N jobs of a Slurm array. --back runs
in this process: where documents end is known when all tokens were read.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx pack data/en --to packed/ --chunk-size 4196352 --sep 0
  binidx pack --back packed/train_*.bin --to data/en2 --sep 0
"""

from __future__ import annotations

import argparse

from binidx.errors import ConfigError
from binidx.format.bin_file import as_prefix
from binidx.format.indexed_dataset import IndexedDataset
from binidx.jobs.parts import Workers
from binidx.packed.packed_convert import indexed_to_packed, packed_to_indexed, plan_packed_files
from binidx.packed.packed_files import PackedFiles

from ._command import DATASET, RESUMES, add_json, add_workers, chosen, command, print_result, target, workers
from ._display import counts


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("sources", nargs="+", metavar="PREFIX | FILE", help=f"{DATASET}; with --back, packed files")
    options.add_argument("--to", required=True, metavar="DIR | PREFIX", help="to write, path or URI")
    options.add_argument("--back", action="store_true", help="write the dataset, from packed files in this order")
    options.add_argument("--sep", type=int, required=True, metavar="ID", help="token that separates documents")
    options.add_argument("--chunk-size", type=int, default=2048 * 2049, metavar="N", help="tokens a file (4,196,352)")
    options.add_argument("--name", default="train", help="first part of the file names (train)")
    options.add_argument("--add-separator", action="store_true", help="put ID after each document, too")
    add_workers(options, "files")
    options.add_argument("--overwrite", action="store_true", help="replace an existing target")
    add_json(options, "--storage-options", "fsspec's own")


def pack(arguments: argparse.Namespace) -> None:
    """Write packed files from a dataset."""
    if len(arguments.sources) != 1:
        raise ConfigError(f"sources: found {len(arguments.sources)}, needs one dataset; --to names where to write")
    dataset = IndexedDataset(as_prefix(arguments.sources[0]), storage_options=arguments.storage_options)
    place, sizes = workers(arguments), (arguments.name, arguments.chunk_size)
    files = place.select(plan_packed_files(dataset, *sizes, add_separator=arguments.add_separator))
    arguments.watch.begin("pack", sum(file.size for file in files), 0, "tokens")
    options = {"workers": place, **chosen(arguments, "add_separator", "overwrite", "storage_options")}
    options["watch"] = arguments.watch.advance
    names = indexed_to_packed(dataset, arguments.to, *sizes, arguments.sep, **options)
    tokens = dataset.index.num_tokens
    text = f"{names[0]}: first of {counts(files=len(names))}, {counts(tokens=tokens)}"
    print_result({"files": names, "tokens": tokens}, text, arguments)


def unpack(arguments: argparse.Namespace) -> None:
    """Write a dataset from packed files."""
    if workers(arguments) != Workers():
        raise ConfigError("engine, workers, shard: --back runs in this process")
    files, prefix = PackedFiles(arguments.sources, 1, storage_options=arguments.storage_options), target(arguments.to)
    arguments.watch.begin("unpack", len(files.uris) * files.header.chunk_size, 0, "tokens")
    options = chosen(arguments, "overwrite", "storage_options")
    count = packed_to_indexed(files, prefix, arguments.sep, **options, watch=arguments.watch.advance)
    values = {"prefix": prefix, "documents": count, "files": len(files.uris)}
    text = f"{prefix}: {counts(documents=count)} of {counts(files=len(files.uris))}"
    print_result(values, text, arguments)


main = command(
    "pack",
    __doc__,
    add_options,
    lambda arguments: (unpack if arguments.back else pack)(arguments),
    RESUMES,
    progress=True,
)
