"""Options of the build that calls a constructor: Megatron's constructors have no argument for them.

    builder ─ building(context) ─► constructor, build_low_level_dataset ─► current_build(), kept and passed on

The variable is set and read in this package and in those above it that build datasets; below it, options are arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext

_BUILD = ContextVar("binidx_build", default=DEFAULT_CONTEXT)


def current_build() -> BuildContext:
    """Return the options of the build that calls this function or constructor; the default outside of a build."""
    return _BUILD.get()


@contextlib.contextmanager
def building(context: BuildContext) -> Iterator[None]:
    """Make `context` the current build of this thread within the block.

    Args:
        context: returned by `current_build` to the functions and constructors of datasets that the block calls. They
            keep it, and pass it on as an argument.
    """
    token = _BUILD.set(context)
    try:
        yield
    finally:
        _BUILD.reset(token)
