"""Stand-in for `megatron.core.datasets`, module by module; a training script needs no change.

    python -m binidx.compat.megatron pretrain_gpt.py ARGS...

    import binidx.compat.megatron                    or in the script, before any import of Megatron
    binidx.compat.megatron.install()

Each module has the name of Megatron's and is imported in its place, in any order of imports; the rest of Megatron is
Megatron's own. The modules can be imported without Megatron, too.
"""

from binidx.compat.megatron.serve import install as install
from binidx.compat.megatron.serve import uninstall as uninstall

__all__ = ["install", "uninstall"]
