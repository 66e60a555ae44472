"""torchtitan: a `BaseDataLoader`, which its trainer builds, iterates and saves with its own checkpoints.

torchtitan takes pairs of inputs and labels, and a `Config` that builds the loader: name this one in a train spec. Here
a loop stands for its trainer, which needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from common import TinyModel, arguments, join_ranks, losses_of, replicate, save, tell, train_dataset, train_loader
from torchtitan.components.dataloader import BaseDataLoader

Pair = tuple[dict[str, torch.Tensor], torch.Tensor]


class MegatronTokens(BaseDataLoader):  # type: ignore[misc]
    """Pairs of ({"input": (B, S), "loss_mask": (B, S)}, labels (B, S)) of this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.loader = train_loader(train_dataset(options), options.save / "losses")

    def __iter__(self) -> Iterator[Pair]:
        for batch in self.loader:
            yield {"input": batch["tokens"], "loss_mask": batch["loss_mask"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:  # torchtitan loads an empty one where a checkpoint has none
            self.loader.load_state_dict(state_dict)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    join_ranks()
    model, data = TinyModel(options.vocab_size), MegatronTokens(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, checkpoint = 0, options.save / "checkpoint.pt"
    if options.resume:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["dataloader"])
        start = saved["step"]

    replica = replicate(model)
    for step, (inputs, labels) in zip(range(start, options.steps), data):  # noqa: B905
        batch = {"tokens": inputs["input"], "labels": labels, "loss_mask": inputs["loss_mask"]}
        losses = losses_of(replica, batch)
        data.loader.record_losses(step, losses)
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, batch, loss)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dataloader": data.state_dict()}
    save({**state, "step": options.steps}, checkpoint)


if __name__ == "__main__":
    main()
