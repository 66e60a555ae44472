"""Import of binidx's modules in place of Megatron's: a finder before all others on `sys.meta_path`.

    import megatron.core.datasets.gpt_dataset       ─►  binidx.compat.megatron.gpt_dataset, the same module object
    import megatron.core.datasets.data_schedule     ─►  Megatron's own module, over binidx's classes
    from megatron....sft_dataset import MockSFT     ─►  a name that binidx lacks: Megatron's own, over binidx's classes

So a script that imports a name that binidx lacks keeps working, with a warning.
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
"""Megatron's modules and their stand-ins."""


def install(*, trust_cache: Literal["megatron"] | None = None, cache_small_indices: bool = False) -> None:
    """Replace the modules in `SERVED` for all imports from now on. A second call changes only the options.

    Args:
        trust_cache, cache_small_indices: defaults of every config: see `BlendedMegatronDatasetConfig`.

    Raises:
        ConfigError: Megatron's own module was imported before.
    """
    if own := [name for name, ours in SERVED.items() if name in sys.modules and sys.modules[name].__name__ != ours]:
        raise ConfigError(
            f"{own[0]}: Megatron's own module is imported already; call binidx.compat.megatron.install() before any "
            f"import of Megatron, or run: python -m {HERE} SCRIPT ARGS..."
        )
    DEFAULTS.update(trust_cache=trust_cache, cache_small_indices=cache_small_indices)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def uninstall() -> None:
    """Let imports return Megatron's own modules again. Names that were imported before stay."""
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
    """Loader of the stand-in for one of Megatron's modules.

    Args:
        path: search path of Megatron's package.
    """

    def __init__(self, path: Sequence[str] | None) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(SERVED[spec.name])
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec, module.__spec__ = module.__spec__, self.own  # the import system has set Megatron's name
        if spec is not None:
            vars(module)["__getattr__"] = _Original(spec.name, self.path).attribute


class _Original:
    """Megatron's own module, loaded when a name is looked up that the stand-in lacks."""

    def __init__(self, name: str, path: Sequence[str] | None) -> None:
        self.name, self.path = name, path
        self.module: ModuleType | None = None
        self._warned: set[str] = set()

    def attribute(self, name: str) -> Any:
        missing = AttributeError(f"module {self.name!r}, which is {SERVED[self.name]}, has no attribute {name!r}")
        if name.startswith("__"):
            raise missing
        if self.module is None:
            self.module = self._load()
        if not hasattr(self.module, name):
            raise missing
        if name not in self._warned:
            logger.warning("%s.%s: not in binidx; using Megatron's own", self.name, name)
        self._warned.add(name)
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
"""Defaults of config fields, from `install`."""
