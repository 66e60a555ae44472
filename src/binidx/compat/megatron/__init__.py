"""Stands in for `megatron.core.datasets`, module by module; a training script stays as it is.

    python -m binidx.compat.megatron pretrain_gpt.py ARGS...

    import binidx.compat.megatron                    or in the script, before anything of Megatron is imported
    binidx.compat.megatron.install()

Each module has the name of the one it stands in for and is imported in its place, whatever is imported first; the rest
of Megatron stays its own. The modules can be imported without Megatron, too.
"""

from binidx.compat.megatron.serve import install as install
from binidx.compat.megatron.serve import uninstall as uninstall

__all__ = ["install", "uninstall"]
