"""Runs of an example, one after the other in one process, which `helpers.forked_ranks` forks.

how: {"example": its module, "runs": [its arguments, ...], "change": a function of this module, called before}
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any


def main(how: dict[str, Any]) -> None:
    if "change" in how:
        globals()[how["change"]]()
    for arguments in how["runs"]:
        importlib.import_module(how["example"]).main(arguments)


def accumulate_gradients() -> None:
    """Hugging Face's trainer takes two micro-batches a step."""
    transformers = importlib.import_module("hf_trainer").transformers  # which is not the module of this name
    transformers.TrainingArguments = partial(transformers.TrainingArguments, gradient_accumulation_steps=2)


def start_two_ranks() -> None:
    """Lightning starts two ranks itself, so that no variable of a launcher is set."""
    import lightning

    make = lightning.Trainer
    lightning.Trainer = lambda **options: make(**{**options, "devices": 2, "strategy": "ddp_fork"})
