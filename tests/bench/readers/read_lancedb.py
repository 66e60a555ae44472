"""LanceDB's StreamingDataset over the rows of `read_lance.py`: shuffled one by one, or in clumps of neighbours.

https://lancedb.github.io/lancedb: `lancedb.streaming.StreamingDataset` with its `StreamingDataLoader`.
"""

import os

import lancedb
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset
from stopwatch import arguments, race

given = arguments()


def tensors(rows):
    """Return the samples of a RecordBatch, as its documents advise: by one view of all of its tokens."""
    tokens = rows.column("tokens").flatten().to_numpy(zero_copy_only=True)
    return torch.from_numpy(tokens).view(rows.num_rows, -1)


def batches():
    options = {"aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "allow_http": "true"}
    table = lancedb.connect(given["uri"], storage_options=options).open_table("corpus")
    dataset = StreamingDataset(
        table,
        columns=["tokens"],
        shuffle_clump_size=given["clump"],
        io_queue_depth=given["io_queue_depth"],
        transform=tensors,
    )
    return StreamingDataLoader(dataset, batch_size=given["batch"])


race(batches, given["num_samples"], given["seconds"])
