"""Megatron-LM's own pretrain_gpt.py on CPUs with gloo: `python cpu_pretrain.py ARGS...`.

The tree is the one in MEGATRON_TREE. What asks for CUDA gets the CPU's; nothing of the data path is touched. Prints the
loss of each step, with all digits.
"""

from __future__ import annotations

import collections
import json
import os
import runpy
import sys
import typing
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

TREE = os.environ["MEGATRON_TREE"]
sys.dont_write_bytecode = True  # the tree is the user's


class OnCpu(TorchFunctionMode):
    """Tensors of a CUDA device are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Nothing:
    """Stream, event or context of CUDA that does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def use_cpu() -> None:
    """Replace what Megatron's training calls of CUDA."""
    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    torch.compile = lambda model=None, **_: (lambda each: each) if model is None else model
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "manual_seed", "set_rng_state", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    for name, value in {
        "is_available": True, "current_device": "cpu", "device_count": 1, "get_rng_state": torch.get_rng_state(),
        "current_stream": Nothing(), "is_current_stream_capturing": False, "get_device_name": "cpu",
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "memory_stats": collections.defaultdict(int), "get_device_capability": (8, 0),
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, value=value, **__: value)
    for name in ("Stream", "Event", "stream", "device"):
        setattr(cuda, name, Nothing)
    for name in ("Float", "Int", "Long", "Half", "BFloat16", "Byte", "Double"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.default_generators = [torch.default_generator]
    torch.nn.Module.cuda = lambda module, *_: module  # type: ignore[method-assign,assignment]
    OnCpu().__enter__()


def use_built_helpers() -> None:
    """Take the C++ helpers of the installed megatron-core, so that nothing is compiled into the tree."""
    path = next(path for place in sys.path for path in Path(place).glob("megatron/core/datasets/helpers_cpp*.so"))
    spec = spec_from_file_location("megatron.core.datasets.helpers_cpp", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    import megatron.core.datasets.utils

    megatron.core.datasets.utils.compile_helpers = lambda: None


def print_losses() -> None:
    """Print the loss of each step with all digits, before Megatron's own line."""
    from megatron.training import training

    log = training.training_log

    def print_and_log(losses: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        values = {name: float(value) for name, value in losses.items()}
        print(json.dumps({"step": iteration, **values}), flush=True)
        return log(losses, total, rate, iteration, *args, **kwargs)

    training.training_log = print_and_log


def main() -> None:
    use_cpu()
    sys.path.insert(0, TREE)
    use_built_helpers()
    print_losses()
    sys.argv[0] = os.path.join(TREE, "pretrain_gpt.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
