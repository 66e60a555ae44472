"""A dataset as files of another library: documents, dtypes and order are kept, and all tokens are read back.

The formats are those of binidx import. mds, litdata and arrow write a folder, olmo, nanotron and llmc files in one,
neox a prefix. In olmo and llmc the bounds of documents are the id of --eod: at the end, or the beginning, of each.

exit status: 0 the files stand, 1 the format cannot hold a document, 2 the call is wrong

example:
  binidx export mds data/en_text_document --to s3://shards/en
  binidx export olmo data/en_text_document --to data/olmo --eod 0
"""

from __future__ import annotations

import argparse

from binidx.corpus.formats.peer_formats import FORMATS, export_dataset
from binidx.format.bin_file import as_prefix

from ._command import DATASET, add_json, chosen, command, print_result
from .import_tokens import describe


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("format", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    options.add_argument("source", type=as_prefix, metavar="PREFIX", help=DATASET)
    options.add_argument("--to", dest="target", required=True, metavar="FOLDER", help="to write; of neox a prefix")
    options.add_argument("--eod", type=int, metavar="ID", help="id at the bounds of documents")
    add_json(options, "--source-options", "fsspec's options for the dataset")
    add_json(options, "--target-options", "the same for the files")


def export_tokens(arguments: argparse.Namespace) -> None:
    """Export the dataset, and print a summary."""
    names = ("format", "source", "target", "eod", "source_options", "target_options", "watch")
    done = export_dataset(**chosen(arguments, *names))
    print_result(done.to_json(), f"{', '.join(done.files)}: {describe(done)} read back and equal", arguments)


main = command("export", __doc__, add_options, export_tokens, progress=True)
