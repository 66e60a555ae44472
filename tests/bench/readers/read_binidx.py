"""binidx, with the defaults that everybody gets: GPT order, documents shuffled, one process.

`fill` other than "never": with a cache_dir in the directory for caches, filled so.
"""

import s3fs  # noqa: F401
import torch  # noqa: F401
from gpt import run_config
from stopwatch import arguments, race

import binidx

given = arguments()


def batches():
    fill = given.get("fill", "never")
    ours = {"cache_dir": f"{given['directory']}/cache", "cache_fill": fill}
    options = None if fill == "never" else {"binidx": ours}
    config = binidx.GPTDatasetConfig(**run_config(given), storage_options=options)
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config)
    loader = binidx.build_pretraining_data_loader(builder.build()[0], 0, given["batch"])
    return (batch["tokens"] for batch in loader)


race(batches, given["num_samples"], given["seconds"])
