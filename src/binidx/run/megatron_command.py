"""The run of a Megatron command line: `torchrun ... pretrain_gpt.py --data-path ... --seq-length 4096 ...`.

Options of the data, the steps and the parallelism are read, and those of the model left out. Data parallel ranks are
the processes of the job, divided by tensor, pipeline and context parallel sizes.

Source: Megatron-LM (main, d98e8a64), `arguments.py`, `core_gpt_dataset_config_from_args` of `pretrain_gpt.py` and
`get_train_valid_test_num_samples`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

from binidx.dataset.blend_arguments import get_blend_and_blend_per_split
from binidx.dataset.config import GPTDatasetConfig, SpecialTokens
from binidx.errors import BinidxError, ConfigError
from binidx.run.run_file import Run
from binidx.run.schedule import split_sizes, steps_of_samples
from binidx.tokenizers.describe import describe_tokenizer

INTEGERS = {
    "seq-length": None, "seed": 1234, "micro-batch-size": None, "global-batch-size": None, "train-iters": None,
    "train-samples": None, "eval-interval": 1000, "eval-iters": 100, "eval-global-batch-size": None,
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
    "num-dataset-builder-threads": 1, "nnodes": 1, "nproc-per-node": None,
}  # fmt: skip
FLAGS = (
    *("decrease-batch-size-if-needed", "full-validation", "multiple-validation-sets", "no-data-sharding"),
    *("reset-position-ids", "reset-attention-mask", "eod-mask-loss", "dataloader-inter-document-masking"),
    *("allow-ambiguous-pad-tokens",),
)
TEXTS = (
    *("split", "data-args-path", "per-split-data-args-path", "data-cache-path", "dataloader-type"),
    *("step-batch-size-schedule", "phase-transition-iterations", "tokenizer-type", "tokenizer-model", "vocab-file"),
    *("merge-file",),
)
LISTS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
LISTS_OF_NUMBERS = ("rampup-batch-size", "iterations-to-skip")

SAME_IN_RUN = ("micro_batch_size", "global_batch_size", "decrease_batch_size_if_needed", "step_batch_size_schedule")
SAME_IN_CONFIG = (
    *("multiple_validation_sets", "full_validation", "num_dataset_builder_threads", "reset_position_ids"),
    *("reset_attention_mask", "eod_mask_loss", "allow_ambiguous_pad_tokens"),
)
"""Arguments of `Run` and of its config that have the names and the values of Megatron's."""

OTHER_SAMPLES = (
    *("mock-data", "sft", "fim-data", "use-varlen-dataset", "hybrid-context-parallel", "dynamic-context-parallel"),
    *("perform-rl-step", "yaml-cfg", "per-dataset-sequences-path", "tensor-parallel-num-weight-shards", "skip-train"),
    *("start-eval-at-iter", "result-rejected-tracker-filename", "override-ckpt-iteration"),
)
"""Options with which the samples or the steps are others than those of a run file."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"from_megatron: {message}")


def parse_megatron_command(
    command: Sequence[str],
    *,
    num_processes: int | None = None,
    rampup: Literal["kept", "ignored"] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **resumed: Any,
) -> Run:
    """Return the run of a Megatron command line.

    Args:
        command: the words of the command; those before the first option are ignored.
        num_processes: number of processes of the job, by default those of torchrun's options in the command.
        rampup: whether `--rampup-batch-size` has an effect: not in Megatron-LM after 532ad926 (2026-04-21).
        storage_options: options of the stores of the data.
        resumed: further arguments of `Run`: `previous`, `first_step`, `consumed_samples`, `earlier_samples`.

    Returns:
        The run.

    Raises:
        ConfigError: an option is missing or invalid, or samples depend on one that a run file lacks.
    """
    given = _parse(command)
    total = num_processes or (given.nproc_per_node and given.nnodes * given.nproc_per_node)
    model = given.tensor_model_parallel_size * given.pipeline_model_parallel_size * given.context_parallel_size
    if not total or total % model:
        raise ConfigError(
            f"num_processes: found {total}, need a multiple of {model}, all that hold one copy of the model"
        )
    if given.rampup_batch_size and rampup is None:
        raise ConfigError(
            "rampup: found --rampup-batch-size, which Megatron ignores since 2026-04; need kept or ignored"
        )
    phases = sorted(int(text) for text in (given.phase_transition_iterations or "").split(",") if text)
    if phases and given.train_samples is None:
        raise ConfigError("from_megatron: found phase transitions without --train-samples, which they need")
    run = Run(
        _config(given, storage_options),
        [1, 0, 0],
        data_parallel_size=total // model,
        dataloader_type=given.dataloader_type or "single",
        data_sharding=not given.no_data_sharding,
        rampup_batch_size=tuple(given.rampup_batch_size or ()) if rampup == "kept" else None,
        iterations_to_skip=sorted({*(given.iterations_to_skip or ())}),
        **{name: getattr(given, name) for name in SAME_IN_RUN},
        **resumed,
    )
    length = {"train_iters": given.train_iters, "train_samples": given.train_samples}
    evaluation = {"eval_interval": given.eval_interval, "eval_iters": given.eval_iters}
    sizes = split_sizes(run.schedule, **length, **evaluation, full_validation=given.full_validation)
    if given.eval_global_batch_size:
        size = run.schedule.global_batch_size
        sizes[1:] = [number and number // size * given.eval_global_batch_size for number in sizes[1:]]
    stop_step = given.train_iters or steps_of_samples(run.schedule, given.train_samples)
    return replace(run, sizes=sizes, stop_step=stop_step, phase_transition_iterations=phases)


def _parse(command: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command that matter here."""
    parser = _Parser(prog="megatron", add_help=False, allow_abbrev=False)
    for name, default in INTEGERS.items():
        spellings = [f"--{name}", "--nproc_per_node"] if name == "nproc-per-node" else [f"--{name}"]
        parser.add_argument(*spellings, type=int, default=default)
    for name in (*FLAGS, *OTHER_SAMPLES):
        kind: Any = {"action": "store_true"} if name in FLAGS else {"nargs": "*"}
        parser.add_argument(f"--{name}", **kind)
    for name in TEXTS:
        parser.add_argument(f"--{name}")
    for name in LISTS:
        parser.add_argument(f"--{name}", nargs="*")
    for name in LISTS_OF_NUMBERS:
        parser.add_argument(f"--{name}", nargs="*", type=int)
    given, _ = parser.parse_known_args([*command])
    for name in OTHER_SAMPLES:
        if getattr(given, name.replace("-", "_")) is not None:
            raise ConfigError(
                f"from_megatron: found --{name}, with which samples or steps are others than a run file has"
            )
    for name in ("seq-length", "micro-batch-size"):
        if getattr(given, name.replace("-", "_")) is None:
            raise ConfigError(f"from_megatron: found no --{name}, needs one")
    return given


def _config(given: argparse.Namespace, storage_options: Mapping[str, Any] | None) -> GPTDatasetConfig:
    blend, per_split = get_blend_and_blend_per_split(given, storage_options)
    return GPTDatasetConfig(
        given.seed,
        given.seq_length,
        blend,
        per_split,
        split=given.split or (None if per_split is not None else "969, 30, 1"),
        path_to_cache=given.data_cache_path,
        tokenizer=_tokenizer(given, storage_options),
        inter_document_masking=given.dataloader_inter_document_masking,
        storage_options=storage_options,
        **{name: getattr(given, name) for name in SAME_IN_CONFIG},
    )


def _tokenizer(given: argparse.Namespace, options: Mapping[str, Any] | None) -> Any:
    """Return the description of the tokenizer; without it, `SpecialTokens()`, as the order does not depend on it."""
    uri, lowercase = given.tokenizer_model or given.vocab_file, given.tokenizer_type == "BertWordPieceLowerCase"
    try:
        if uri is None:
            raise ConfigError(f"--tokenizer-type {given.tokenizer_type}: has no file to describe")
        return describe_tokenizer(uri, merges=given.merge_file, lowercase=lowercase, storage_options=options)
    except BinidxError as error:
        logging.getLogger(__name__).warning("tokenizer: not described, which only loss masks need: %s", error)
        return SpecialTokens()
