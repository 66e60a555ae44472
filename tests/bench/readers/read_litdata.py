"""LitData as its README has it for pretraining: TokensLoader, chunks of 2,049 x 8,012 tokens, shuffled.

https://github.com/Lightning-AI/litData: "LLM Pre-training", and "Shuffle".
"""

import os
from pathlib import Path

import no_images  # noqa: F401
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from litdata.streaming import downloader
from stopwatch import arguments, race, tokens_of

given = arguments()
length = given["sequence_length"] + 1
CHUNK_TOKENS = 2049 * 8012 // length * length


# The server of the bench speaks plain HTTP, which obstore refuses unless told; LitData has no argument that reaches it.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def batches():
    dataset = StreamingDataset(
        input_dir=given["uri"],
        cache_dir=f"{given['directory']}/chunks",
        item_loader=TokensLoader(block_size=length),
        shuffle=True,
        drop_last=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    return StreamingDataLoader(dataset, batch_size=given["batch"], num_workers=given["num_workers"])


def tokens(source):
    samples = tokens_of(Path(source), given["dtype"], length)
    per_item = CHUNK_TOKENS // length
    for start in range(0, len(samples), per_item):
        yield torch.from_numpy(samples[start : start + per_item].reshape(-1).copy())


def write():
    optimize(
        fn=tokens,
        inputs=[given["source"]],
        output_dir=given["directory"],
        chunk_size=CHUNK_TOKENS,
        item_loader=TokensLoader(),
        num_workers=1,
    )


if __name__ == "__main__":
    if "source" in given:
        write()
    else:
        race(batches, given["num_samples"], given["seconds"])
