"""Small GPT configs, and samples as the tokens they are made of."""

from __future__ import annotations

from typing import Any

from helpers.gpt_data import Tokenizer

import binidx

RESETS = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}


def config(blend: Any = (["unread"], [1.0]), **options: Any) -> binidx.GPTDatasetConfig:
    defaults = {"random_seed": 3, "sequence_length": 8, "split": "9,1,0", "tokenizer": Tokenizer(pad=-5, eod=-6)}
    return binidx.GPTDatasetConfig(blend=blend, **{**defaults, **RESETS, **options})


def tokens(sample: Any) -> list[int]:
    return [*sample["tokens"].tolist(), sample["labels"][-1].item()]
