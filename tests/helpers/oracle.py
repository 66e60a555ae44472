"""Megatron Core itself, for differential tests: `from helpers.oracle import megatron`."""

import warnings
from types import SimpleNamespace
from unittest.mock import patch

# Models are not compiled: no dataset calls their functions, and to import torch's compiler takes 2 s.
with warnings.catch_warnings(), patch("torch.compile", lambda function: function):
    warnings.simplefilter("ignore")
    from megatron.core.datasets import (
        bert_dataset,
        blended_dataset,
        blended_megatron_dataset_builder,
        blended_megatron_dataset_config,
        gpt_dataset,
        helpers,
        indexed_dataset,
        multimodal_dataset,
        t5_dataset,
        utils,
    )

megatron = SimpleNamespace(
    bert=bert_dataset,
    blended=blended_dataset,
    builder=blended_megatron_dataset_builder,
    config=blended_megatron_dataset_config,
    gpt=gpt_dataset,
    helpers=helpers,
    indexed=indexed_dataset,
    multimodal=multimodal_dataset,
    t5=t5_dataset,
    utils=utils,
)
