"""Run of a user's script as `__main__`, also in the processes that it spawns.

multiprocessing runs the main module of a process again in each spawned process, by the name in its `__spec__`. To
replace Megatron there before the script imports it, that name is this module's, which then runs as `__mp_main__` and
reads the script's path and the options of `install` from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from binidx.compat.megatron.serve import DEFAULTS, install

SCRIPT = "BINIDX_MEGATRON_SCRIPT"
OPTIONS = "BINIDX_MEGATRON_OPTIONS"
"""Environment variables with the path of the script, and with the options in JSON, for spawned processes."""


def run(path: str) -> None:
    """Run a script as `python path` does."""
    module = ModuleType("__main__")
    os.environ[SCRIPT], os.environ[OPTIONS] = os.path.abspath(path), json.dumps(DEFAULTS)
    spec = ModuleSpec("binidx.compat.megatron.script", None, origin=path)
    vars(module).update(__file__=path, __spec__=spec, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    exec(compile_script(path), vars(module))


def compile_script(path: str) -> CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)  # not our __future__


if __name__ == "__mp_main__":
    install(**json.loads(os.environ[OPTIONS]))
    __file__ = sys.argv[0] = os.environ[SCRIPT]
    exec(compile_script(__file__), globals())
