"""Stand-in for `megatron.core.datasets.utils_s3`, the older name of `object_storage_utils`."""

from binidx.compat.megatron.object_storage_utils import S3_PREFIX as S3_PREFIX
from binidx.compat.megatron.object_storage_utils import S3Client as S3Client
from binidx.compat.megatron.object_storage_utils import S3Config as S3Config
from binidx.compat.megatron.object_storage_utils import is_object_storage_path as is_s3_path
from binidx.compat.megatron.object_storage_utils import parse_s3_path as parse_s3_path

__all__ = ["S3_PREFIX", "S3Client", "S3Config", "is_s3_path", "parse_s3_path"]
