"""The sdist, and from it the wheels of all platforms, built on one Linux machine: `make wheels`.

    sdist ─┬─► manylinux_2_17 x86_64, aarch64    auditwheel: no library and no symbol that is newer than glibc 2.17
           └─► macosx_11_0 x86_64, arm64         inspected: format, processor, and libraries; not run

The compiler is zig, from PyPI: it has the headers and stub libraries of every glibc and of macOS. One wheel of a
platform serves Python 3.11 and later (abi3). Python's headers are those of this machine: the parts of them that the
stable ABI uses do not depend on the platform.
"""

from __future__ import annotations

import os
import shlex
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORMS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}
"""Platform of a wheel -> zig's target."""

CPU_TYPES = {"x86_64": 0x01000007, "arm64": 0x0100000C}
MACH_O_64 = 0xFEEDFACF
LOAD_DYLIB = 0xC
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"


def call(*command: str, **environment: str) -> str:
    """Run a command and return its stdout; an error shows all its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(source: Path, platform: str, out: Path) -> Path:
    """Return the wheel of a platform, from the unpacked sdist."""
    compiler = f"{sys.executable} -m ziglang cc -target {PLATFORMS[platform]}"
    shared = "-dynamiclib -undefined dynamic_lookup" if platform.startswith("macosx") else "-shared"
    with tempfile.TemporaryDirectory() as folder:
        call(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(source),
            CC=compiler, LDSHARED=f"{compiler} {shared} -s", CFLAGS="-g0 -fno-sanitize=undefined",
            PYTHONWARNINGS="ignore",
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        (name,) = call(sys.executable, "-m", "wheel", "tags", "--platform-tag", platform, str(wheel)).split()
        return (Path(folder) / name).replace(out / name)


def check_linux(wheel: Path, platform: str) -> str:
    """Return what auditwheel says of a wheel; exit if it may not be called what it is called."""
    said = " ".join(call(sys.executable, "-m", "auditwheel", "show", str(wheel)).split())
    if f'"{platform}"' not in said:
        sys.exit(f"{wheel.name}: not {platform}; auditwheel says: {said}")
    return "auditwheel agrees"


def check_macos(wheel: Path, platform: str) -> str:
    """Return what the extension module of a wheel links to; exit if it is for another processor, or needs a library."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".so"))
        data = archive.read(name)
    magic, cpu_type, _, _, num_commands = struct.unpack_from("<5I", data)
    libraries, offset = [], 32
    for _ in range(num_commands):
        kind, length, text = struct.unpack_from("<3I", data, offset)
        if kind == LOAD_DYLIB:
            libraries.append(data[offset + text : offset + length].split(b"\0")[0].decode())
        offset += length
    if (magic, cpu_type, libraries) != (MACH_O_64, CPU_TYPES[platform.split("_", 3)[3]], [LIBSYSTEM]):
        sys.exit(f"{wheel.name}: found magic {magic:x}, processor {cpu_type:x}, libraries {libraries}")
    return f"Mach-O for its processor, needs {LIBSYSTEM} alone; not run"


def main() -> None:
    """Build into dist/, and print a line for each file."""
    out = ROOT / "dist"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="binidx-wheels-") as folder:
        call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, str(ROOT))
        (sdist,) = Path(folder).glob("*.tar.gz")
        for platform in PLATFORMS:
            source = Path(folder) / platform
            with tarfile.open(sdist) as archive:
                archive.extractall(source, filter="data")
            (source,) = source.iterdir()
            wheel = build(source, platform, out)
            check = check_macos if platform.startswith("macosx") else check_linux
            print(f"{wheel.name}  {wheel.stat().st_size:,} bytes; {check(wheel, platform)}", flush=True)
        sdist = Path(sdist).replace(out / sdist.name)
        print(f"{sdist.name}  {sdist.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
