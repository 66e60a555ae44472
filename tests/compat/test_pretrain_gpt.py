"""Megatron-LM's own pretrain_gpt.py, of the tree in MEGATRON_TREE, over our datasets against its own.

It runs on CPUs with gloo: `cpu_pretrain.py`. A model of two layers trains for 50 steps, and every loss is compared with
all its digits. `make soak` runs it, and prints why it did not where there is no tree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from compat.running import DROP_IN, HERE, Ranks, start
from compat.test_training import upload
from conftest import Bucket
from helpers.gpt_data import write_with_megatron

TREE = os.environ.get("MEGATRON_TREE")
MISSING = [name for name in ("einops", "omegaconf", "transformers", "triton") if find_spec(name) is None]
NEEDS = "an unpacked Megatron-LM, for its pretrain_gpt.py (compared at d98e8a64)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(TREE is None, reason=f"MEGATRON_TREE is not set; name {NEEDS}"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"Megatron-LM's training imports {', '.join(MISSING)}, which is not installed"
    ),
]

STEPS, HALF = 50, 25
RESETS = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
MODEL = """
    --use-cpu-initialization --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 2
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3
    --hidden-dropout 0 --attention-dropout 0 --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --attention-backend unfused --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 1000 --null-tokenizer-eod-id 0
    --split 8,1,1 --num-workers 2 --log-interval 1 --eval-interval 1000 --eval-iters 1 --ckpt-format torch
"""


@dataclass(frozen=True)
class Training:
    """One way to train: the options of a run, and its number of ranks."""

    options: list[str]
    ranks: int
    folder: Path

    def start(self, reader: tuple[str, ...], prefixes: list[str], name: str = "", stop: bool = False) -> Ranks:
        """Start a run whose checkpoints have a name, with Megatron's reader `()` or with ours.

        Args:
            stop: whether to save and to end after half of the steps.
        """
        script = [*reader, str(HERE / "cpu_pretrain.py"), *MODEL.split(), "--train-iters", str(STEPS), *self.options]
        data = ["--data-path", "0.6", prefixes[0], "0.4", prefixes[1]]
        cache = ["--data-cache-path", str(self.folder / f"cache of {'ours' if reader else 'theirs'}")]
        places = [f"--save={self.folder / name}", f"--load={self.folder / name}", f"--save-interval={HALF}"]
        ends = [*(places if name else ()), *([f"--exit-interval={HALF}"] if stop else ())]
        return start([*script, *data, *cache, *ends], self.ranks, beside=HERE)


def losses(run: Ranks) -> list[tuple[int, float]]:
    """Step and loss of all steps, on which all ranks agree."""
    first, *others = [[(line["step"], line["lm loss"]) for line in lines] for lines in run.lines()]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("options", "ranks", "remote"),
    [
        (RESETS, 1, False),
        (["--dataloader-type", "cyclic"], 2, False),
        (["--dataloader-type", "cyclic", "--no-data-sharding", *RESETS], 1, True),
        (["--dataloader-type", "cyclic", *RESETS], 2, True),
    ],
    ids=["disk", "disk, cyclic, 2 ranks", "s3, cyclic without sharding", "s3, cyclic, 2 ranks"],
)
def test_megatrons_own_training_has_the_same_losses_over_our_datasets(
    options: list[str], ranks: int, remote: bool, s3: Bucket, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    local = [write_with_megatron(tmp_path / name, rng.integers(1, 60, 300).astype(np.int32), rng) for name in "ab"]
    ours = [upload(prefix, f"{s3.fresh()}/{Path(prefix).name}") for prefix in local] if remote else local
    training = Training(options, ranks, tmp_path)

    expected = losses(training.start((), local))
    assert [step for step, _ in expected] == [*range(1, STEPS + 1)]
    assert len({loss for _, loss in expected}) > STEPS // 2
    assert losses(training.start(DROP_IN, ours)) == expected

    # Stopped half way, and continued by the other reader.
    assert losses(training.start((), local, "theirs first", stop=True)) == expected[:HALF]
    assert losses(training.start(DROP_IN, ours, "theirs first")) == expected[HALF:]
    assert losses(training.start(DROP_IN, ours, "ours first", stop=True)) == expected[:HALF]
    assert losses(training.start((), local, "ours first")) == expected[HALF:]
