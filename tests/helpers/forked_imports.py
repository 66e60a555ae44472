"""What the process has imported from which children are forked; none of it may start a thread."""

import gc

import numpy as np  # noqa: F401
import s3fs  # noqa: F401
from s3fs.core import S3FileSystem  # noqa: F401

import binidx.format.pair
import binidx.index.cache.index_cache
import binidx.storage.writing.publish  # noqa: F401

gc.freeze()  # no collection of a child looks at it, and copies it
