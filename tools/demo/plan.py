"""The plan of a training run, from which a new process can resume it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """A run over a blend, from its first step to its last.

    Args:
        prefixes: URIs of the datasets.
        weights: share of samples taken from each.
        cache: URI for the index caches.
        tokenizer: path of the tokenizer.json.
        checkpoint: path where the checkpoint is kept.
        num_steps: steps of the whole run.
        checkpoint_step: after this many steps a checkpoint is written.
        batch_size: samples per step.
        sequence_length: tokens fed per sample.
        seed: of the data's order and of the model's first weights.
    """

    prefixes: list[str]
    weights: list[float]
    cache: str
    tokenizer: str
    checkpoint: str
    num_steps: int
    checkpoint_step: int
    batch_size: int
    sequence_length: int
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        """Tokens fed in one step."""
        return self.batch_size * self.sequence_length

    @property
    def checkpoint_samples(self) -> int:
        """Samples consumed when the checkpoint is written."""
        return self.checkpoint_step * self.batch_size

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))
