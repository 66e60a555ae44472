"""python served.py: prints, in JSON, what a process sees of modules that ours take the place of. It knows binidx."""

# ruff: noqa: E402, I001, the order of imports is what is tried

import json
import pickle
import sys
import warnings

warnings.simplefilter("ignore")

import binidx.compat.megatron

found = {"torch at install": None, "before": [name for name in sys.modules if name.startswith("megatron")]}
binidx.compat.megatron.install()
binidx.compat.megatron.install(cache_small_indices=True, megatron_samples="0.16.1")
found["torch at install"] = "torch" in sys.modules

import torch

torch.compile = lambda function: function  # to import the compiler takes 2 s

from megatron.core.datasets import helpers  # a submodule before its package's others
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
import megatron.core.datasets.indexed_dataset as indexed_dataset
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset
from megatron.legacy.data.data_samplers import MegatronPretrainingSampler
import binidx.compat.megatron.gpt_dataset as ours

found["homes"] = [
    each.__module__
    for each in (
        GPTDataset, helpers.build_sample_idx, helpers.build_sample_idx_int32, indexed_dataset.IndexedDataset,
        HybridCPDataLoaderWrapper, MegatronLegacyTokenizer, GPTFIMDataset, MegatronPretrainingSampler,
    )
]  # fmt: skip
found["same"] = sys.modules["megatron.core.datasets.gpt_dataset"] is ours
found["spec"] = ours.__spec__.name
found["pickled"] = pickle.loads(pickle.dumps(GPTDataset)) is GPTDataset
found["own"] = sys.modules["megatron.core.datasets.data_schedule"].__file__.endswith("data_schedule.py")


class Tokenizer:
    vocab_size, eod, pad = 10, 0, 9


config = GPTDatasetConfig(
    1, 8, blend=(["en"], None), split="1,0,0", tokenizer=Tokenizer(), reset_position_ids=False,
    reset_attention_mask=False, eod_mask_loss=False,
)  # fmt: skip
found["options"] = [config.cache_small_indices, config.megatron_samples]
found["mask"] = config.create_attention_mask

# Names that ours does not have are Megatron's own, over ours.
import megatron.core.datasets.gpt_dataset as stand_in

found["left"] = [
    each.__module__
    for each in (stand_in._build_shuffle_index, stand_in._get_ltor_masks_and_position_ids, stand_in.Split)
]
try:
    _ = stand_in.nonsense
except AttributeError as error:
    found["missing"] = str(error)

from megatron.training.datasets.sft_dataset import MockSFTDataset, SFTDataset

found["beside"] = [MockSFTDataset.__mro__[1].__module__, SFTDataset.__module__]

binidx.compat.megatron.uninstall()
from megatron.core.datasets.utils import Split

found["after"] = [Split.__module__, "megatron.core.datasets.gpt_dataset" in sys.modules]
try:
    binidx.compat.megatron.install()
except ValueError as error:
    found["late"] = str(error)
print(json.dumps(found))
