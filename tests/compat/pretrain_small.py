"""A training script in the manner of Megatron-LM's pretrain_gpt.py, which knows nothing of binidx.

Trains megatron-core's GPTModel on the CPU, from --data-path, and prints of each step a digest of the batch by its keys,
and the loss; then the same of one batch of validation.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import warnings
from collections import OrderedDict
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

# torch's compiler, which optimizers import as well, takes 2 s of CPU time.
torch.compile = lambda function: function

from megatron.core import mpu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.datasets.utils import compile_helpers, get_blend_from_list  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.rerun_state_machine import RerunDataIterator  # noqa: E402
from megatron.core.transformer import TransformerConfig, dot_product_attention  # noqa: E402
from megatron.training import get_args  # noqa: E402
from megatron.training.datasets.data_samplers import build_pretraining_data_loader  # noqa: E402


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, 999

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        return OrderedDict([("class", "Tokenizer")])


def parse_args() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--data-cache-path")
    parser.add_argument("--split", default="8,1,1")
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--train-iters", type=int, default=4)
    parser.add_argument("--consumed-train-samples", type=int, default=0)
    parser.add_argument("--dataloader-type", default="single")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--mock-data", action="store_true")
    parser.add_argument("--reset", action="store_true")
    parser.add_argument("--no-mmap-bin-files", action="store_false", dest="mmap_bin_files")
    parser.add_argument("--compile-helpers", action="store_true")
    parser.parse_args(namespace=get_args())
    vars(get_args()).update(exit_signal_handler=False, full_validation=False, hybrid_context_parallel=False)


def core_gpt_dataset_config_from_args(args: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=None,
        split=args.split,
        num_dataset_builder_threads=1,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=Tokenizer(),
        reset_position_ids=args.reset,
        reset_attention_mask=args.reset,
        eod_mask_loss=args.reset,
        object_storage_cache_path=None,
        mid_level_dataset_surplus=0.005,
    )


def is_dataset_built_on_rank() -> bool:
    return bool(mpu.get_tensor_model_parallel_rank() == 0)


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> Any:
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, is_dataset_built_on_rank, config).build()


def build_model(args: Any) -> GPTModel:
    # On the CPU: its dropout draws from a generator of CUDA, even where it is 0, and a buffer asks for the device.
    torch.cuda.current_device = lambda: "cpu"
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda: argparse.Namespace(fork=contextlib.nullcontext)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=torch.float32,
    )  # fmt: skip
    torch.manual_seed(1)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=1000, max_sequence_length=args.seq_length)


def forward_step(batch: dict[str, torch.Tensor], model: GPTModel) -> torch.Tensor:
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def digests(batch: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.md5(value.numpy().tobytes()).hexdigest() + f" {value.dtype} {tuple(value.shape)}"
        for name, value in sorted(batch.items())
    }


def pretrain() -> None:
    parse_args()
    args = get_args()
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(1, 1)
    if torch.distributed.get_rank() == 0 and args.compile_helpers:
        compile_helpers()
    torch.distributed.barrier()
    samples = args.consumed_train_samples + args.train_iters * args.global_batch_size
    train, valid, _ = train_valid_test_datasets_provider([samples, args.global_batch_size, 0])
    batches = RerunDataIterator(iter(build_pretraining_data_loader(train, args.consumed_train_samples)))
    model = build_model(args)
    per_step = args.global_batch_size // (args.micro_batch_size * mpu.get_data_parallel_world_size())
    for _ in range(args.train_iters):
        for _ in range(per_step):
            batch = next(batches)
            loss = forward_step(batch, model)
            loss.backward()
            print(json.dumps({"rank": torch.distributed.get_rank(), "loss": loss.item(), **digests(batch)}), flush=True)
        for parameter in model.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.data -= 0.1 * parameter.grad
        model.zero_grad()
    batch = next(iter(build_pretraining_data_loader(valid, 0)))
    print(json.dumps({"rank": torch.distributed.get_rank(), "valid": digests(batch)}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    pretrain()
