"""A script with classes of its own in `__main__`, whose loader spawns workers; it does not import binidx.

python spawning.py PREFIX
"""

import json
import sys
from collections import OrderedDict
from dataclasses import dataclass

import torch

torch.compile = lambda function: function  # to import the compiler takes 2 s, in the worker, too

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, 999

    @property
    def unique_identifiers(self):
        return OrderedDict([("class", "Tokenizer")])


@dataclass
class Config(GPTDatasetConfig):
    more: int = 1


class Counted(GPTDataset):
    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        worker = torch.utils.data.get_worker_info()
        number, version = -1 if worker is None else worker.id, new_config("any").megatron_samples
        return {"tokens": sample["tokens"] + self.config.more, "worker": number, "version": version}


def new_config(prefix):
    return Config(
        random_seed=1, sequence_length=8, blend=([prefix], None), split="1,0,0", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, more=7,
    )  # fmt: skip


def main():
    builder = BlendedMegatronDatasetBuilder(Counted, [20, 0, 0], lambda: True, new_config(sys.argv[1]))
    dataset = builder.build()[0]
    here = [dataset[number]["tokens"].tolist() for number in range(len(dataset))]
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="spawn")
    batches = list(loader)
    print(
        json.dumps(
            {
                "workers": sorted({int(each) for batch in batches for each in batch["worker"]}),
                "versions": sorted({each for batch in batches for each in batch["version"]}),
                "equal": [row.tolist() for batch in batches for row in batch["tokens"]] == here,
                "home": type(dataset).__mro__[1].__module__,
            }
        )
    )


if __name__ == "__main__":
    main()
