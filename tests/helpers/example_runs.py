"""Runs of an example, one after the other in one process, which `helpers.forked_ranks` forks.

how: {"example": its module, "runs": [its arguments, ...], "change": a function of this module, called before}
"""

from __future__ import annotations

import importlib
import json
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


def train_all_samples_with_hugging_face() -> None:
    """The Trainer reads 42 samples once, and prints the length of the run that it sees, and its last learning rate."""
    import hf_trainer

    whole, make = hf_trainer.train_dataset, hf_trainer.transformers.TrainingArguments
    epoch = {"max_steps": -1, "num_train_epochs": 1, "lr_scheduler_type": "linear"}
    hf_trainer.train_dataset = lambda options: [whole(options)[number] for number in range(42)]
    hf_trainer.transformers.TrainingArguments = lambda **options: make(**{**options, **epoch})

    class Told(hf_trainer.GoOn):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, _: Any, **also: Any) -> None:
            rate = also["lr_scheduler"].get_last_lr()[0]
            print(json.dumps({"step": state.global_step, "steps": state.max_steps, "rate": rate}), flush=True)

    hf_trainer.GoOn = Told


def train_all_samples_with_lightning() -> None:
    """The same with Lightning."""
    import lightning
    import lightning_trainer

    whole, make = lightning_trainer.train_dataset, lightning.Trainer
    lightning_trainer.train_dataset = lambda options: [whole(options)[number] for number in range(42)]
    lightning.Trainer = lambda **options: make(**{**options, "max_steps": -1, "max_epochs": 1})

    class Told(lightning_trainer.Module):  # type: ignore[misc]
        def on_train_end(self) -> None:
            steps = self.trainer.estimated_stepping_batches
            print(json.dumps({"step": self.global_step, "steps": steps, "rate": 0}), flush=True)

    lightning_trainer.Module = Told
