"""Import of binidx's modules in place of Megatron's: a finder before all others on `sys.meta_path`.

    import megatron.core.datasets.gpt_dataset       ─►  binidx.compat.megatron.gpt_dataset, the same module object
    import megatron.core.datasets.data_schedule     ─►  Megatron's own module, over binidx's classes
    from megatron....sft_dataset import MockSFT     ─►  a name that binidx lacks: Megatron's own, over binidx's classes

So a stand-in has only what must differ from Megatron's: classes and functions that read data or build indices.
Whatever else a script imports comes from Megatron's own file, with a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Literal

from binidx.dataset.megatron_releases import EARLIEST, MAIN, NEWEST, RELEASES, parse_release_name
from binidx.dataset.torch_bridge import missing_torch
from binidx.errors import ConfigError

logger = logging.getLogger(__name__)

HERE = "binidx.compat.megatron"
NO_STAND_INS = ("__main__", "script", "serve")
TRAINING = ("data_samplers", "fim_dataset", "sft_dataset")
MODULES = [module.name for module in iter_modules([os.path.dirname(__file__)])]
CORE = [name for name in MODULES if name not in (*NO_STAND_INS, *TRAINING)]

SERVED = {
    **{f"megatron.core.datasets.{name}": f"{HERE}.{name}" for name in CORE},
    **{f"megatron.training.datasets.{name}": f"{HERE}.{name}" for name in TRAINING},
    "megatron.legacy.data.data_samplers": f"{HERE}.data_samplers",
}
"""Module of Megatron -> binidx's stand-in for it."""


def install(
    *,
    trust_cache: Literal["megatron"] | None = None,
    cache_small_indices: bool = False,
    megatron_samples: str | None = None,
) -> None:
    """Replace the modules in `SERVED` for all imports from now on. A second call changes only the options.

    Args:
        trust_cache, cache_small_indices, megatron_samples: defaults of these fields in every
            `BlendedMegatronDatasetConfig`. None for `megatron_samples` is the release that is installed.

    Raises:
        ConfigError: Megatron's own module was imported before, or `megatron_samples` is no known release.
        MissingDriverError: torch is not installed.
    """
    if megatron_samples is not None:
        parse_release_name(megatron_samples)
    if importlib.util.find_spec("torch") is None:
        raise missing_torch()
    if own := [name for name, ours in SERVED.items() if name in sys.modules and sys.modules[name].__name__ != ours]:
        raise ConfigError(
            f"{own[0]}: Megatron's own module is imported already; call binidx.compat.megatron.install() before any "
            f"import of Megatron, or run: python -m {HERE} SCRIPT ARGS..."
        )
    DEFAULTS.update(trust_cache=trust_cache, cache_small_indices=cache_small_indices, megatron_samples=megatron_samples)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


@functools.cache
def find_installed_release() -> str:
    """Return the release of the Megatron that this process imports, a name in `RELEASES`; main's without Megatron."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ModuleNotFoundError, ValueError):  # the latter for a module that a script made itself
        spec = None
    return MAIN if spec is None or spec.origin is None else read_release(Path(spec.origin).parent)


def read_release(core: Path) -> str:
    """Return the release of a Megatron, a name in `RELEASES`.

    A version before 0.16 counts as 0.16, and a pre-release as its release. A tree later than the last release is after
    pull request 6742 if it has that one's `VarlenDataset`.

    Args:
        core: its folder `megatron/core`.
    """
    try:
        described = dict(re.findall(r"^(\w+) = ['\"]?(\w*)", (core / "package_info.py").read_text(), re.MULTILINE))
        major, minor, pre_release = int(described["MAJOR"]), int(described["MINOR"]), described.get("PRE_RELEASE", "")
    except (OSError, KeyError, ValueError):  # of a fork
        major, minor, pre_release = 1, 0, f" (assumed, as {core} names no version)"
    version = f"{major}.{minor}"
    varlen = core.parent / "training/datasets/varlen_dataset.py"
    latest = NEWEST if varlen.is_file() and "class VarlenDataset" in varlen.read_text() else MAIN
    release = version if version in RELEASES else EARLIEST if (major, minor) < (0, 16) else latest
    if release != version or pre_release:
        name = version + pre_release
        logger.warning("Megatron %s: no known release; its samples are taken to be those of %s", name, release)
    return release


def uninstall() -> None:
    """Make imports return Megatron's own modules again. Names that a script has imported already keep their objects."""
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
            vars(module)["__getattr__"] = find_in_megatron(spec.name, self.path)


def find_in_megatron(module: str, path: Sequence[str] | None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a stand-in: it looks names up in Megatron's own module, loaded at the first look-up.

    Args:
        module: Megatron's name of the module.
        path: search path of Megatron's package.
    """

    @functools.cache
    def load() -> ModuleType | None:
        spec = PathFinder.find_spec(module, path)
        if spec is None or spec.loader is None:
            return None
        own = module_from_spec(spec)
        spec.loader.exec_module(own)
        return own

    @functools.cache
    def find(name: str) -> Any:
        if name.startswith("__") or not hasattr(load(), name):
            raise AttributeError(f"module {module!r}, which is {SERVED[module]}, has no attribute {name!r}")
        value = getattr(load(), name)
        if getattr(value, "__module__", None) == module:
            logger.warning("%s.%s: not in binidx; using Megatron's own", module, name)
        return value

    return find


FINDER = _Finder()

DEFAULTS: dict[str, Any] = {}
"""Config field -> its default, as given to `install`."""
