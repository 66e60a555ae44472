"""Ranks of a gloo group build datasets whose class counts on rank 0 being first.

python rank_zero_first.py PREFIX DIRECTORY
"""

import json
import os
import sys
import time

import numpy
import torch
from users import Tokenizer

from binidx.compat.megatron.blended_dataset import BlendedDataset
from binidx.compat.megatron.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from binidx.compat.megatron.gpt_dataset import GPTDataset, GPTDatasetConfig

RANK = int(os.environ["RANK"])


class Saved(GPTDataset):
    """Rank 0 builds and saves, in its time; the others load, and then all have their barrier."""

    def _build_document_sample_shuffle_indices(self):
        path = os.path.join(self.config.path_to_cache, f"{self.index_split.name}-{len(self.indices)}.npz")
        if RANK == 0:
            time.sleep(0.3)
            document_index, sample_index, shuffle_index = super()._build_document_sample_shuffle_indices()
            numpy.savez(path, d=document_index, s=sample_index, x=shuffle_index)
        found = numpy.load(path)
        torch.distributed.barrier()
        return found["d"], found["s"], found["x"]


class Broken(GPTDataset):
    def __init__(self, *arguments):
        if RANK == 0:
            raise ValueError("broken on rank 0")
        super().__init__(*arguments)


def main():
    torch.distributed.init_process_group("gloo")
    prefix, directory = sys.argv[1:]
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=([prefix, prefix], [1.0, 2.0]), split="8,2,0", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=directory,
    )  # fmt: skip
    train, valid, _ = BlendedMegatronDatasetBuilder(Saved, [20, 4, 0], lambda: True, config).build()
    found = {"rank": RANK, "blended": isinstance(train, BlendedDataset), "tokens": train[7]["tokens"].tolist()}
    try:
        BlendedMegatronDatasetBuilder(Broken, [20, 4, 0], lambda: True, config).build()
    except Exception as error:
        found["error"] = type(error).__name__
    built = BlendedMegatronDatasetBuilder.build_generic_dataset(list, lambda: RANK == 1, True, (1, 2))
    print(json.dumps({**found, "valid": len(valid), "built": built}))
    torch.distributed.destroy_process_group()


main()
