"""Hugging Face's Trainer: its step says how many samples were consumed, so there is nothing to save, and none to skip.

`max_steps`, or `num_train_epochs=1` for all samples of the dataset: the length of the loader is its batches.
`ignore_data_skip`, or it would read every batch again that it has seen. It knows its step only after it has made the
loader, so a callback tells the loader where to begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from common import MICRO_BATCH_SIZE, TinyModel, arguments, losses_of, tell, train_dataset, train_loader


class Trainer(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return train_loader(self.train_dataset, Path(self.args.output_dir) / "losses")

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        losses = losses_of(model, inputs)
        if model.training:
            loader = self.callback_handler.train_dataloader
            loader.record_losses(loader.number, losses)
            loader.number += 1
        loss = losses.mean()
        tell(self.state.global_step, inputs, loss)
        return loss


class GoOn(transformers.TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, _: Any, train_dataloader: Any = None, **__: Any) -> None:
        samples_of_step = MICRO_BATCH_SIZE * args.gradient_accumulation_steps * args.world_size
        train_dataloader.consumed_samples = state.global_step * samples_of_step
        train_dataloader.number = state.global_step * args.gradient_accumulation_steps  # of the micro-batch to train

    def on_save(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        train_dataloader.state_dict()  # writes the losses recorded so far


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    settings = transformers.TrainingArguments(
        output_dir=str(options.save),
        max_steps=options.steps,
        save_steps=options.steps,
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        remove_unused_columns=False,
        ignore_data_skip=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(TinyModel(options.vocab_size), settings, train_dataset=train_dataset(options), callbacks=[GoOn()])
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
