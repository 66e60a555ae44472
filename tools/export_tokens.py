"""A dataset as files of another library: documents, dtypes and order are kept, and all tokens are read back.

The formats are those of binidx import. mds, litdata and arrow write a folder, olmo, nanotron and llmc files in one,
neox a prefix. In olmo and llmc the bounds of documents are the id of --eod: at the end, or the beginning, of each.

litpkds writes packed files into a folder: documents one after the other, in files of --chunk-size tokens; --eod fills
the last. These are not read back. After a break, the same command resumes: files that the first run had published are
compared and left alone, while other content needs --overwrite. --shard I/N splits the files between machines, as N jobs
of a Slurm array.

exit status: 0 the files stand, 1 the format cannot hold a document, 2 the call is wrong

example:
  binidx export mds data/en_text_document --to s3://shards/en
  binidx export olmo data/en_text_document --to data/olmo --eod 0
  binidx export litpkds data/en_text_document --to packed/ --eod 0
"""

from __future__ import annotations

import argparse

import binidx

from ._command import Command, print_result
from ._display import counts
from ._options import WORKERS, add_dataset, add_stores, add_target, add_workers, chosen, refuse, workers
from .import_tokens import FORMATS, eod_of_packed

OF_PACKED = ("chunk_size", "name", "add_separator", *WORKERS, "overwrite")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("format", type=FORMATS, metavar="FORMAT", help="of the files, such as mds or litpkds")
    add_dataset(options, "source")
    add_target(options, "to write; of neox a prefix", type=str, metavar="FOLDER")
    options.add_argument("--eod", type=int, metavar="ID", help="id at the bounds of documents")
    add_stores(options, "the dataset", "the files")
    packed = options.add_argument_group("for litpkds")
    packed.add_argument("--chunk-size", type=int, metavar="N", help="tokens a file (4,196,352)")
    packed.add_argument("--name", help="first part of the file names (train)")
    packed.add_argument("--add-separator", action="store_true", help="put ID after each document, too")
    add_workers(packed, "files")
    packed.add_argument("--overwrite", action="store_true", help="replace existing files")


def export_tokens(arguments: argparse.Namespace) -> None:
    """Export the dataset, and print a summary."""
    from binidx.corpus.formats.peer_formats import export_dataset

    if arguments.format == "litpkds":
        export_packed(arguments)
        return
    refuse(arguments, OF_PACKED, f"litpkds takes it, {arguments.format} does not")
    names = ("format", "source", "target", "eod", "source_options", "target_options", "watch")
    done = export_dataset(**chosen(arguments, *names))
    text = f"{counts(documents=done.documents, tokens=done.tokens)} of {done.dtype}; read back and equal"
    print_result(done, f"{', '.join(done.files)}: {text}", arguments)


def export_packed(arguments: argparse.Namespace) -> None:
    """Write packed files, and print a summary."""
    from binidx.packed.packed_convert import indexed_to_packed, plan_packed_files

    eod, store = eod_of_packed(arguments), arguments.source_options
    dataset = binidx.IndexedDataset(arguments.source, storage_options=store)
    size = 2048 * 2049 if arguments.chunk_size is None else arguments.chunk_size
    sizes, place = (arguments.name or "train", size), workers(arguments)
    files = place.select(plan_packed_files(dataset, *sizes, add_separator=arguments.add_separator))
    arguments.watch.begin("pack", sum(file.size for file in files), 0, "tokens")
    options = {"workers": place, "storage_options": arguments.target_options, "watch": arguments.watch.advance}
    options |= chosen(arguments, "add_separator", "overwrite")
    names = indexed_to_packed(dataset, arguments.target, *sizes, eod, **options)
    text = f"{names[0]}: first of {counts(files=len(names))}, {counts(tokens=dataset.index.num_tokens)}"
    print_result({"files": names, "tokens": dataset.index.num_tokens}, text, arguments)


main = Command("export", __doc__, add_options, export_tokens, progress=True)
