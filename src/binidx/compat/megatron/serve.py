"""Our modules in the place of Megatron's: a finder before all others on `sys.meta_path`.

    import megatron.core.datasets.gpt_dataset       ─►  binidx.compat.megatron.gpt_dataset, the same module object
    import megatron.core.datasets.data_schedule     ─►  not ours: Megatron's own, over our modules
    from megatron....sft_dataset import MockSFT     ─►  not in ours: Megatron's own, from its file, over our modules

So a script that imports what we do not have goes on running; a warning says whose it is.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, Literal

from binidx.errors import ConfigError

logger = logging.getLogger(__name__)

HERE = "binidx.compat.megatron"
CORE = (
    "bert_dataset",
    "blended_dataset",
    "blended_megatron_dataset_builder",
    "blended_megatron_dataset_config",
    "gpt_dataset",
    "helpers",
    "helpers_cpp",
    "indexed_dataset",
    "masked_dataset",
    "megatron_dataset",
    "multimodal_dataset",
    "object_storage_utils",
    "t5_dataset",
    "utils",
    "utils_s3",
)
TRAINING = ("data_samplers", "fim_dataset", "sft_dataset")

SERVED = {
    **{f"megatron.core.datasets.{name}": f"{HERE}.{name}" for name in CORE},
    **{f"megatron.training.datasets.{name}": f"{HERE}.{name}" for name in TRAINING},
    "megatron.legacy.data.data_samplers": f"{HERE}.data_samplers",
}
"""Megatron's modules, and ours."""


def install(*, trust_cache: Literal["megatron"] | None = None, cache_small_indices: bool = False) -> None:
    """From now on imports of the modules in `SERVED` give ours. Once more changes only the options.

    Args:
        trust_cache, cache_small_indices: of every config that does not say it: see `BlendedMegatronDatasetConfig`.

    Raises:
        ConfigError: one of them is there already, and may be in use.
    """
    if own := [name for name, ours in SERVED.items() if name in sys.modules and sys.modules[name].__name__ != ours]:
        raise ConfigError(
            f"{own[0]}: is Megatron's own, and imported already; call binidx.compat.megatron.install() before anything "
            f"of Megatron is imported, or run: python -m {HERE} SCRIPT ARGS..."
        )
    DEFAULTS.update(trust_cache=trust_cache, cache_small_indices=cache_small_indices)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def uninstall() -> None:
    """Imports give Megatron's own modules again. What was imported before stays what it is."""
    DEFAULTS.clear()
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    for name, ours in SERVED.items():
        module = sys.modules.get(name)
        if module is None or module.__name__ != ours:
            continue
        vars(module).pop("__getattr__", None)
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if vars(sys.modules.get(parent, module)).get(child) is module:
            delattr(sys.modules[parent], child)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader(path)) if fullname in SERVED else None


class _Loader(Loader):
    """Gives our module for Megatron's name.

    Args:
        path: where Megatron's package lies.
    """

    def __init__(self, path: Sequence[str] | None) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(SERVED[spec.name])
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec, module.__spec__ = module.__spec__, self.own  # the machinery has put the other name there
        if spec is not None:
            vars(module)["__getattr__"] = _Original(spec.name, self.path).attribute


class _Original:
    """Megatron's own module, loaded when a name of it is asked for that ours does not have."""

    def __init__(self, name: str, path: Sequence[str] | None) -> None:
        self.name, self.path = name, path
        self.module: ModuleType | None = None
        self._told: set[str] = set()

    def attribute(self, name: str) -> Any:
        missing = AttributeError(f"module {self.name!r}, which is {SERVED[self.name]}, has no attribute {name!r}")
        if name.startswith("__"):
            raise missing
        if self.module is None:
            self.module = self._load()
        if not hasattr(self.module, name):
            raise missing
        if name not in self._told:
            logger.warning("%s.%s: is not in binidx; Megatron's own is used", self.name, name)
        self._told.add(name)
        return getattr(self.module, name)

    def _load(self) -> ModuleType | None:
        spec = PathFinder.find_spec(self.name, self.path)
        if spec is None or spec.loader is None:
            return None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


FINDER = _Finder()

DEFAULTS: dict[str, Any] = {}
"""Fields of configs that a script does not set, from `install`."""
