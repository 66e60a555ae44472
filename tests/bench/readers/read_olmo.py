"""OLMo-core: fixed slices of one flat array, in one permutation, read by ranges over its own S3 functions.

https://olmo-core.readthedocs.io/en/latest/data/numpy_dataset.html; `num_threads` None is its default, 4 here.
"""

import boto3  # noqa: F401
import numpy as np
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.data.types import NumpyDatasetDType
from stopwatch import arguments, race

given = arguments()


def batches():
    dataset = NumpyFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=1 << 31, eos_token_id=0, pad_token_id=1),
        paths=[given["uri"] + ".bin"],
        sequence_length=given["sequence_length"],
        dtype=NumpyDatasetDType("uint16" if np.dtype(given["dtype"]).itemsize == 2 else "uint32"),
        work_dir=f"{given['directory']}/work",
    ).build()
    loader = NumpyDataLoaderConfig(
        global_batch_size=given["batch"] * given["sequence_length"],
        seed=0,
        num_threads=given["num_threads"],
        work_dir=f"{given['directory']}/work",
    ).build(dataset)
    loader.reshuffle(epoch=1)
    return (batch["input_ids"] for batch in loader)


race(batches, given["num_samples"], given["seconds"])
