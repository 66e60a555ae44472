"""Lightning: give it the loader; it saves and loads the state with its own checkpoints.

`use_distributed_sampler=False`, since the loader finds its rank: that of Lightning's process group. `devices` and
`num_nodes` are torchrun's: by default Lightning would train a model of its own in each process of a CPU.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from common import TinyModel, arguments, losses_of, tell, train_dataset, train_loader


class Module(lightning.LightningModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = TinyModel(vocab_size)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        losses = losses_of(self.model, batch)
        self.trainer.train_dataloader.record_losses(self.global_step, losses)
        loss = losses.mean()
        tell(self.global_step, batch, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(lightning.LightningDataModule):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> Any:
        return train_loader(train_dataset(self.options), self.options.save / "losses")


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = options.save / "checkpoint.ckpt"
    trainer.fit(Module(options.vocab_size), Data(options), ckpt_path=checkpoint if options.resume else None)
    trainer.save_checkpoint(checkpoint)


if __name__ == "__main__":
    main()
