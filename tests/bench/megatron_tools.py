"""Run a tool of a Megatron-LM checkout in this process: python -m tests.bench.megatron_tools WAY JSONL TOKENIZER PREFIX

    tool-pool        tools/preprocess_data.py with one worker
    tool-gigatoken   the same with its --use-gigatoken
    tool-fast        tools/preprocess_data_fast.py

The checkout is the folder that BINIDX_BENCH_MEGATRON names. The tool runs twice in this process: over JSONL's
.first.jsonl, a tenth as long, then over JSONL. The first run pays for imports, and both start the same workers and
tokenizers, so the difference of their CPU seconds is the cost of the difference of their bytes. Prints the CPU seconds
of the first run, that difference, the difference for this process alone, the largest resident process in bytes, the
tokens, and the bytes that the difference stands for.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import shutil
import sys
import tempfile
import types
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bench.preprocessing import cpu_seconds, own_resident

TOOLS = {
    "tool-pool": ("preprocess_data.py", "--workers", "1", "--log-interval", "1000000000"),
    "tool-gigatoken": ("preprocess_data.py", "--workers", "1", "--log-interval", "1000000000", "--use-gigatoken"),
    "tool-fast": ("preprocess_data_fast.py", "--use-gigatoken"),
}
UNSET = (
    "vocab_file",
    "merge_file",
    "special_tokens",
    "chat_template",
    "metadata_path",
    "padded_vocab_size",
    "vocab_size",
)
OFF = ("pad_vocab_size", "trust_remote_code", "tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens")
"""Other options of Megatron's tokenizers, at their defaults."""


def find_checkout() -> Path | None:
    """Return the checkout that BINIDX_BENCH_MEGATRON names, or None."""
    folder = os.environ.get("BINIDX_BENCH_MEGATRON")
    if not folder:
        return None
    if not (Path(folder) / "tools" / "preprocess_data_fast.py").is_file():
        raise FileNotFoundError(f"BINIDX_BENCH_MEGATRON: {folder} has no tools/preprocess_data_fast.py")
    return Path(folder)


def main(way: str, source: str, tokenizer: str, prefix: str) -> None:
    checkout = find_checkout()
    assert checkout
    sys.path[:0] = [str(checkout)]
    stand_in_for_training()
    script, *options = TOOLS[way]
    with tempfile.TemporaryDirectory() as model:
        save_tokenizer(tokenizer, Path(model))

        def run(jsonl: Path, target: str) -> None:
            sys.argv = [
                script, *options, "--input", str(jsonl), "--output-prefix", target, "--append-eod",
                "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model,
            ]  # fmt: skip
            with mock.patch("sys.stdout", sys.stderr):
                runpy.run_path(str(checkout / "tools" / script), run_name="__main__")

        first = Path(source).with_suffix(".first.jsonl")
        run(first, f"{prefix}.import")  # imports
        marks = [cpu_seconds()]
        for jsonl, target in ((first, f"{prefix}.first"), (Path(source), prefix)):
            run(jsonl, target)
            marks.append(cpu_seconds())
    for end in ("bin", "idx"):
        shutil.move(f"{prefix}_text_document.{end}", f"{prefix}.{end}")
    (start, own_start), (long, own_long) = (
        (sum(after) - sum(before), after[0] - before[0]) for before, after in pairwise(marks)
    )
    most = max(own_resident(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    told = Path(source).stat().st_size - first.stat().st_size
    print(json.dumps([start, long - start, own_long - own_start, most, tokens, told]))


def save_tokenizer(tokenizer: str, folder: Path) -> None:
    """Write the folder that transformers wants: a tokenizer.json and a configuration that names the EOD, token 0."""
    added = json.loads(Path(tokenizer).read_text())["added_tokens"]
    [eod] = [each["content"] for each in added if each["id"] == 0]
    shutil.copy(tokenizer, folder / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def stand_in_for_training() -> None:
    """Give the tools the one function that they import of Megatron's training package: options of the tokenizer.

    The package itself needs Triton and Python 3.12 for what the tools do not run.
    """

    def add_tokenizer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("tokenizer-type", "tokenizer-model"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--use-gigatoken", action="store_true")
        parser.set_defaults(**dict.fromkeys(UNSET), **dict.fromkeys(OFF, False))
        return parser

    arguments: Any = types.ModuleType("megatron.training.arguments")
    arguments._add_tokenizer_args = add_tokenizer_args
    sys.modules.update({"megatron.training": types.ModuleType("megatron.training"), arguments.__name__: arguments})
    if not find_spec("triton"):  # a kernel that megatron.core imports and no tool runs
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = mock.MagicMock()


if __name__ == "__main__":
    main(*sys.argv[1:])
