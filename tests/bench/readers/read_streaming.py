"""MosaicML Streaming: shards of 64 MB of packed samples, shuffled by `shuffle_algo` with the block size it defaults to.

https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html
"""

from pathlib import Path

import boto3  # noqa: F401
import no_images  # noqa: F401
from stopwatch import arguments, race, tokens_of
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

given = arguments()
length = given["sequence_length"] + 1


def batches():
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote=given["uri"],
        local=f"{given['directory']}/shards",
        shuffle=True,
        shuffle_algo=given["shuffle_algo"],
        batch_size=given["batch"],
    )
    loader = StreamingDataLoader(dataset, batch_size=given["batch"], num_workers=0)
    return (batch["tokens"] for batch in loader)


def write():
    columns = {"tokens": f"ndarray:{given['dtype']}:{length}"}
    with MDSWriter(out=given["directory"], columns=columns) as writer:
        for sample in tokens_of(Path(given["source"]), given["dtype"], length):
            writer.write({"tokens": sample})


if "source" in given:
    write()
else:
    race(batches, given["num_samples"], given["seconds"])
