"""Lance, LanceDB's format: rows of packed samples, batches of neighbouring rows in random order, read ahead in threads.

https://lancedb.github.io/lance: `lance.torch.data.LanceDataset` with a `ShardedBatchSampler`.
"""

import os
from pathlib import Path

import lance
import pyarrow as pa
import torch  # noqa: F401
from lance.sampler import ShardedBatchSampler
from lance.torch.data import LanceDataset
from stopwatch import arguments, race, tokens_of

given = arguments()
length = given["sequence_length"] + 1
ROWS_AT_ONCE = 4096
NAME = "corpus.lance"


def batches():
    options = {"aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "allow_http": "true"}
    stored = lance.dataset(f"{given['uri']}/{NAME}", storage_options=options)
    sampler = ShardedBatchSampler(rank=0, world_size=1, randomize=True)
    return LanceDataset(stored, given["batch"], columns=["tokens"], sampler=sampler)


def write():
    samples = tokens_of(Path(given["source"]), given["dtype"], length)
    schema = pa.schema({"tokens": pa.list_(pa.from_numpy_dtype(samples.dtype), length)})

    def tables():
        for start in range(0, len(samples), ROWS_AT_ONCE):
            flat = pa.array(samples[start : start + ROWS_AT_ONCE].reshape(-1))
            yield pa.record_batch([pa.FixedSizeListArray.from_arrays(flat, length)], schema=schema)

    lance.write_dataset(tables(), f"{given['directory']}/{NAME}", schema=schema)


if "source" in given:
    write()
else:
    race(batches, given["num_samples"], given["seconds"])
