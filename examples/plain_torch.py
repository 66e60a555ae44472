"""A training loop of one's own: the loader's state goes into the checkpoint beside the model's."""

from __future__ import annotations

import torch
from common import TinyModel, arguments, join_ranks, losses_of, replicate, save, tell, train_dataset, train_loader


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    join_ranks()
    model = TinyModel(options.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = train_loader(train_dataset(options), options.save / "losses")
    start, checkpoint = 0, options.save / "checkpoint.pt"
    if options.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        start = saved["step"]

    replica = replicate(model)
    for step, batch in zip(range(start, options.steps), loader):  # noqa: B905
        losses = losses_of(replica, batch)
        loader.record_losses(step, losses)
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, batch, loss)
        if (step + 1) % options.save_interval == 0 or step + 1 == options.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            save({**state, "step": step + 1}, checkpoint)


if __name__ == "__main__":
    main()
