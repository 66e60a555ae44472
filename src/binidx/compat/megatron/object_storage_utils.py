"""Stand-in for `megatron.core.datasets.object_storage_utils`. Any URI opens without it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from binidx.errors import ConfigError
from binidx.format.bin_file import strip_bin_suffix
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.open import open_object, stream
from binidx.storage.writing.publish import create_object

S3_PREFIX = "s3://"
MSC_PREFIX = "msc://"


@dataclass
class ObjectStorageConfig:
    """Config without effect: `.idx` files are stored in `index_dir`, and a read fetches only its ranges."""

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 * 1024 * 1024


S3Config = ObjectStorageConfig


class S3Client(Protocol):
    """Methods of a boto3 client that Megatron calls; unused here, since fsspec's drivers are used."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None: ...  # noqa: N803 as boto3 has them
    def upload_file(self, Filename: str, Bucket: str, Key: str) -> None: ...  # noqa: N803
    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]: ...  # noqa: N803
    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]: ...  # noqa: N803
    def close(self) -> None: ...


def is_object_storage_path(path: str) -> bool:
    """Return whether Megatron takes a path for one in a store: s3:// and msc:// only. Unused here."""
    return path.startswith((S3_PREFIX, MSC_PREFIX))


def get_object_storage_access(path: str) -> str:
    return "s3" if path.startswith(S3_PREFIX) else "msc"


def parse_s3_path(path: str) -> tuple[str, str]:
    """Return bucket and key.

    Raises:
        ConfigError: the path does not begin with s3://.
    """
    if not path.startswith(S3_PREFIX):
        raise ConfigError(f"{path}: must begin with {S3_PREFIX}")
    bucket, _, key = path.removeprefix(S3_PREFIX).partition("/")
    return bucket, key


def get_index_cache_path(idx_path: str, object_storage_config: ObjectStorageConfig) -> str:
    """Return the path at which Megatron stores the `.idx` of a remote prefix.

    Raises:
        ConfigError: the path begins with neither s3:// nor msc://.
    """
    if not is_object_storage_path(idx_path):
        raise ConfigError(f"{idx_path}: must begin with {S3_PREFIX} or {MSC_PREFIX}")
    return os.path.join(object_storage_config.path_to_idx_cache, idx_path.partition("://")[2])


def dataset_exists(path_prefix: str, idx_path: str, bin_path: str) -> bool:
    """Adapt `IndexedDataset.exists`. (Megatron's is true for any S3 prefix: it passes `bucket` for `Bucket`.)"""
    return IndexedDataset.exists(strip_bin_suffix(bin_path) if bin_path else path_prefix)


def cache_index_file(remote_path: str, local_path: str) -> None:
    """Copy a whole file, on every rank that calls, so that none needs a barrier."""
    os.makedirs(os.path.dirname(os.path.abspath(local_path)), exist_ok=True)
    with create_object(local_path) as target:
        for part in stream(open_object(remote_path, cache=False)):
            target.write(part)
