"""python queried.py FOLDER PREFIX [install]: samples of a user's dataset over a release of Megatron, or over ours.

FOLDER holds the release. Prints, in JSON, the release whose samples ours are, and the samples.
"""

# ruff: noqa: E402, the order of imports is what is tried

import json
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy

warnings.simplefilter("ignore")

from helpers.release_process import do_not_compile, put_in_front

do_not_compile()
put_in_front(Path(sys.argv[1]))
if "install" in sys.argv:
    import binidx.compat.megatron

    binidx.compat.megatron.install()

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, 999

    @property
    def unique_identifiers(self):
        return OrderedDict([("class", "Tokenizer")])


class Backwards(GPTDataset):
    def _query_document_sample_shuffle_indices(self, idx):
        text, document_ids, lengths = super()._query_document_sample_shuffle_indices(idx)
        real = sum(lengths)
        return numpy.concatenate([text[:real][::-1], text[real:]]), document_ids, lengths[::-1]


config = GPTDatasetConfig(
    random_seed=1, sequence_length=16, blend=([sys.argv[2]], None), split="6,3,1", tokenizer=Tokenizer(),
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    inter_document_masking=True, drop_last_partial_validation_sequence=False,
)  # fmt: skip
built = BlendedMegatronDatasetBuilder(Backwards, [20, 20, 1], lambda: True, config).build()
samples = [
    {name: numpy.asarray(value).tolist() for name, value in dataset[number].items()}
    for dataset in built
    for number in [*range(len(dataset)), None]
]
print(json.dumps({"release": vars(config).get("megatron_samples"), "samples": samples}))
