"""cffi builds `binidx._native` from the header and the C files beside this one.

`binidx.h` is the only declaration: the C files include it, and cffi reads the same text without its preprocessor lines.
"""

from pathlib import Path

import cffi

HERE = Path(__file__).parent
SOURCES = sorted(f"native/{path.name}" for path in HERE.glob("*.c") if not path.name.startswith(("test_", "fuzz_")))


def declarations(header: str) -> str:
    """The header as cffi reads it: without preprocessor lines."""
    return "\n".join(line for line in header.splitlines() if not line.startswith("#"))


ffi = cffi.FFI()
ffi.cdef(declarations((HERE / "binidx.h").read_text()))
ffi.set_source(
    "binidx._native",
    '#include "binidx.h"',
    sources=SOURCES,
    depends=sorted(f"native/{path.name}" for path in HERE.glob("*.h")),
    include_dirs=["native"],
    py_limited_api=True,
    # The order of a blend is decided by rounded doubles: a fused multiply-add would round once where x86 rounds twice.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
