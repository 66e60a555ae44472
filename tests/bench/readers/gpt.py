"""The arguments that binidx's and Megatron's dataset configs share."""

from typing import Any


class Tokenizer:
    """As much of a tokenizer as the datasets look at; its EOD and pad are not in the corpus."""

    vocab_size, eod, pad = 1000, 0, 1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "bench"}


def run_config(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "random_seed": 1234, "sequence_length": given["sequence_length"], "blend": ([given["uri"]], None),
        "split": "1,0,0", "path_to_cache": f"{given['directory']}/indices", "tokenizer": Tokenizer(),
        "create_attention_mask": False, "reset_position_ids": False, "reset_attention_mask": False,
        "eod_mask_loss": False,
    }  # fmt: skip
