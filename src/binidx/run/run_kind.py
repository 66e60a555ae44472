"""Files of runs, before their kind is known: a run over `.bin` and `.idx`, or over packed files, which has "fork"."""

from __future__ import annotations

from typing import Any

from binidx.errors import AccessError, ConfigError, StorageError, UnreachableError
from binidx.format.bin_file import as_prefix
from binidx.format.indexed_dataset import IndexedDataset
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.open import read_document

ANY_RUN = JsonFile[Any](Any, error=ConfigError, hint="needs the file of a run, which binidx.save_run writes")


def read_run_file(file: Location) -> bytes:
    """Return the bytes of a run's file; raise ConfigError if it is a dataset or one of its files."""
    try:
        if as_prefix(file.uri) in (file.uri, file.uri.rstrip("/")):
            return read_document(ANY_RUN, file)
    except (AccessError, UnreachableError):
        raise
    except StorageError:
        if not IndexedDataset.exists(file.uri, storage_options=file.options):
            raise
    raise ConfigError(
        f"{file}: not the file of a run (found a dataset, needs JSON with config, sizes and batch size); describe it "
        "by --sequence-length, --world, --micro-batch-size and --global-batch-size, or write its file in Python: "
        "binidx.save_run(loader, 'run.json', global_batch_size=N)"
    )


def is_packed_run(file: Location) -> bool:
    """Return whether a file describes a run over packed files; raise ConfigError if it is not the file of a run."""
    return describes_packed(ANY_RUN.parse(read_run_file(file), file.uri))


def describes_packed(values: Any) -> bool:
    """Return whether the JSON value of a run's file is that of a run over packed files."""
    return isinstance(values, dict) and "fork" in values
