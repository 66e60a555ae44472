"""Megatron Core with its own S3 reader: the same order, `block_bytes` for each request, `num_workers` processes."""

import warnings

from gpt import run_config
from stopwatch import arguments, race
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

given = arguments()
workers = given["num_workers"]


def batches():
    config = GPTDatasetConfig(
        **run_config(given), mmap_bin_files=False, object_storage_cache_path=f"{given['directory']}/idx"
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    # The dataclass that holds it is made inside: there is no argument that reaches it.
    dataset.dataset.bin_reader._cache_nbytes = given["block_bytes"]
    return (batch["tokens"] for batch in DataLoader(dataset, batch_size=given["batch"], num_workers=workers))


race(batches, given["num_samples"], given["seconds"], warm=workers)
