r"""Compare samples of Megatron Core and binidx, bit for bit: one run, over its data and a copy.

    python examples/compare_with_megatron.py --seed 1234 --split 969,30,1 --seq-length 4096 \
        --train-iters 500000 --global-batch-size 1024 --eod 50256 \
        --data-path 0.7 /data/en 0.3 /data/code \
        --moved-data-path 0.7 s3://corpus/en 0.3 s3://corpus/code

Options have the names and defaults of Megatron-LM: give those of your run. Of each split the
first samples are compared, and some at random. Indices are built in a temporary directory.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

import binidx

MEGATRON = BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
BINIDX = binidx.BlendedMegatronDatasetBuilder, binidx.GPTDataset, binidx.GPTDatasetConfig
SPLITS = ("train", "valid", "test")
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


class Tokenizer:
    """The part of a tokenizer that samples depend on: the ids of two tokens."""

    vocab_size = None

    def __init__(self, eod: int, pad: int) -> None:
        self.eod, self.pad = eod, pad
        self.unique_identifiers = OrderedDict(eod=eod, pad=pad)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", nargs="+", required=True)
    parser.add_argument("--moved-data-path", nargs="+", required=True, help="the same, moved")
    parser.add_argument("--split", default="969, 30, 1")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--seq-length", type=int, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--train-iters", type=int)
    length.add_argument("--train-samples", type=int)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--eval-interval", type=int, default=1000)
    parser.add_argument("--eval-iters", type=int, default=100)
    parser.add_argument("--eod", type=int, required=True, help="token that ends a document")
    parser.add_argument("--pad", type=int, default=-1, help="the pad, if the data contains any")
    for flag in FLAGS:
        parser.add_argument("--" + flag.replace("_", "-"), action="store_true")
    parser.add_argument("--first", type=int, default=64, help="samples of each split")
    parser.add_argument("--random", type=int, default=64, help="further ones, at random")
    return parser.parse_args(argv)


def sizes_of(run: argparse.Namespace) -> list[int]:
    """Samples of each split that Megatron-LM asks for (without --rampup-batch-size)."""
    steps = run.train_iters or run.train_samples // run.global_batch_size
    samples = run.train_samples or steps * run.global_batch_size
    evaluation = run.eval_iters * run.global_batch_size
    return [samples, (steps // run.eval_interval + 1) * evaluation, evaluation]


def build(classes: Any, data_path: list[str], cache: str, run: argparse.Namespace) -> list[Any]:
    """Train, valid and test: both libraries take the same arguments."""
    builder, dataset, config = classes
    options = config(
        random_seed=run.seed,
        sequence_length=run.seq_length,
        blend=get_blend_from_list(data_path),
        split=run.split,
        path_to_cache=cache,
        tokenizer=Tokenizer(run.eod, run.pad),
        create_attention_mask=False,
        **{flag: getattr(run, flag) for flag in FLAGS},
    )
    return builder(dataset, sizes_of(run), lambda: True, options).build()


def first_difference(theirs: Any, ours: Any, numbers: Iterable[int]) -> str | None:
    """Describe the first value that differs between these samples; None if none does."""
    for number in numbers:
        old, new = theirs[number], ours[number]
        if {*old} != {*new}:
            return f"sample {number}: has {', '.join(old)}, and {', '.join(new)} in binidx"
        for name in old:
            a, b = (torch.as_tensor(sample[name]) for sample in (old, new))
            where = f"sample {number}: {name} is"
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return f"{where} {a.dtype} {[*a.shape]}, and {b.dtype} {[*b.shape]} in binidx"
            if len(wrong := torch.nonzero(a != b)):
                at = tuple(wrong[0].tolist())  # () of a number, such as dataset_id
                place = f" at position {', '.join(map(str, at))}" if at else ""
                return f"{where} {a[at]}{place}, and {b[at]} in binidx"
    return None


def main(argv: list[str] | None = None) -> int:
    run = arguments(argv)
    compared = []
    with tempfile.TemporaryDirectory() as cache:
        # First ours: where a split has no document it raises an error, and Megatron never returns.
        ours = build(BINIDX, run.moved_data_path, f"{cache}/binidx", run)
        # Megatron asks for its rank.
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        theirs = build(MEGATRON, run.data_path, cache, run)
        torch.distributed.destroy_process_group()
        for split, old, new in zip(SPLITS, theirs, ours, strict=True):
            if old is None and new is None:
                continue
            lengths = [0 if dataset is None else len(dataset) for dataset in (old, new)]
            if lengths[0] != lengths[1]:
                print(f"different: {split} has {lengths[0]} samples, and {lengths[1]} in binidx")
                return 1
            first = min(run.first, lengths[0])
            others = range(first, lengths[0])
            numbers = [*range(first), *random.sample(others, min(run.random, len(others)))]
            if found := first_difference(old, new, numbers):
                print(f"different: {split}, {found}")
                return 1
            compared.append(f"{split} {len(numbers):,} of {lengths[0]:,}")
    print(f"the same samples, bit for bit: {', '.join(compared)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
