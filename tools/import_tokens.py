"""Tokens of another library as a dataset: documents, dtypes and order are kept, and all tokens are compared.

mds, litdata and arrow take folders, neox a prefix, the others files in order, or, but for litpkds, folders of them.
olmo, llmc and litpkds have no bounds of documents: --eod names the id at them; a .csv.gz beside a file of olmo has
them, and is taken instead. With --eod the packed samples of the others are split, too. In litpkds --eod also fills the
last file; the import leaves this out, and does not read back the rest.

  mds        MosaicML Streaming 0.13, by its index.json; also zstd and gz
  litdata    LitData 0.2, written for its TokensLoader
  litpkds    packed files of lit-gpt, TinyLlama and the Gemstones; needs --eod
  olmo       OLMo-core 3: .npy of tokens without a header; needs --stored-dtype
  arrow      Hugging Face datasets, save_to_disk; a column of lists of integers; needs pyarrow
  nanotron   datatrove's .ds and .ds.index
  llmc       llm.c's .bin for GPT-2 and Llama 3; the EOD moves from the beginning of a document to its end
  neox       GPT-NeoX and fairseq, lazy and cached (TNTIDX); its mmap is a dataset already

exit status: 0 the dataset stands, 1 the files are damaged, 2 the call is wrong

example:
  binidx import mds s3://shards/en --to s3://corpus/en
  binidx import olmo part-00.npy part-01.npy --to data/en --eod 100257 --stored-dtype uint32
"""

from __future__ import annotations

import argparse

from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import counts
from ._options import Names, add_stores, add_target, chosen, refuse

FORMATS = Names("binidx.corpus.formats.peer_formats", "FORMATS", "litpkds")
DTYPES = ("uint8", "uint16", "int32", "int64")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("format", type=FORMATS, metavar="FORMAT", help="of the files, such as mds or litpkds")
    options.add_argument("sources", nargs="+", metavar="SOURCE", help="folder, prefix or files, in any store")
    add_target(options, "dataset to write")
    options.add_argument("--eod", type=int, metavar="ID", help="id at the bounds of documents")
    options.add_argument("--column", metavar="NAME", help="of mds and arrow (tokens, input_ids)")
    options.add_argument("--stored-dtype", choices=(*DTYPES, "uint32"), help="of tokens in files that do not record it")
    options.add_argument("--dtype", choices=DTYPES, help="of the dataset (that of the files, or int32)")
    options.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    add_stores(options, "the sources", "the dataset")


def import_tokens(arguments: argparse.Namespace) -> None:
    """Import the files, and print a summary."""
    from binidx.corpus.formats.peer_formats import import_dataset

    if arguments.format == "litpkds":
        import_packed(arguments)
        return
    names = ("format", "sources", "target", "eod", "column", "stored_dtype", "dtype", "overwrite")
    done = import_dataset(**chosen(arguments, *names, "source_options", "target_options", "watch"))
    counted = counts(documents=done.documents, tokens=done.tokens)
    print_result(done, f"{done.prefix}: {counted} of {done.dtype}; read back and equal", arguments)


def import_packed(arguments: argparse.Namespace) -> None:
    """Write a dataset from packed files, and print a summary."""
    from binidx.packed.packed_convert import packed_to_indexed
    from binidx.packed.packed_files import PackedFiles

    refuse(arguments, ("column", "stored_dtype", "dtype"), "litpkds does not take it")
    eod, files = eod_of_packed(arguments), PackedFiles(arguments.sources, 1, storage_options=arguments.source_options)
    arguments.watch.begin("unpack", len(files.uris) * files.header.chunk_size, 0, "tokens")
    options = {"storage_options": arguments.target_options, "watch": arguments.watch.advance}
    count = packed_to_indexed(files, arguments.target, eod, overwrite=arguments.overwrite, **options)
    values = {"prefix": arguments.target, "documents": count, "files": len(files.uris)}
    print_result(values, f"{arguments.target}: {counts(documents=count)} of {counts(files=len(files.uris))}", arguments)


def eod_of_packed(arguments: argparse.Namespace) -> int:
    """Return the id that ends documents in packed files; raise ConfigError if none is given."""
    if arguments.eod is None:
        raise ConfigError("eod: litpkds files have no bounds of documents; give the id at them")
    return int(arguments.eod)


main = Command("import", __doc__, add_options, import_tokens, progress=True)
