"""Accelerate: prepare the model, not the loader, which knows its rank; its state is saved with all the rest."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import TinyModel, arguments, losses_of, tell, train_dataset, train_loader


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    accelerator = Accelerator(cpu=True)
    model = TinyModel(options.vocab_size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = train_loader(train_dataset(options), options.save / "losses")
    accelerator.register_for_checkpointing(loader)
    if options.resume:
        accelerator.load_state(str(options.save))

    block = loader.batch_sampler.micro_batch_size * accelerator.num_processes
    for step, batch in zip(range(loader.consumed_samples // block, options.steps), loader):  # noqa: B905
        losses = losses_of(model, batch)
        loader.record_losses(step, losses)
        loss = losses.mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        tell(step, batch, loss)
    accelerator.save_state(str(options.save))


if __name__ == "__main__":
    main()
