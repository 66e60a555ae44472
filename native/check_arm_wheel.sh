#!/bin/sh
# The aarch64 wheel in dist/ under qemu, in Debian's Python for arm64: a dataset is written, read back, and a dataset of
# training samples built from it: native/check_arm_wheel.sh    (after `make wheels`)
# apt install qemu-user. Debian's packages for arm64 are unpacked into a temporary folder; nothing of them is installed.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p "$out/lists/partial" "$out/archives/partial" "$out/root" "$out/site"
touch "$out/status"
apt="apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists=$out/lists
    -o Dir::State::Status=$out/status -o Dir::Cache::Archives=$out/archives -o Debug::NoLocking=1 -o APT::Sandbox::User=root"
$apt update
(cd "$out/archives" && $apt --download-only --no-install-recommends --yes install python3-minimal libpython3-stdlib libstdc++6)
for each in "$out"/archives/*.deb; do dpkg-deb -x "$each" "$out/root"; done
version=$(ls "$out/root/usr/lib" | sed -n 's/^python\(3\.[0-9]*\)$/\1/p')
python -m pip install --quiet --disable-pip-version-check --target "$out/site" --only-binary :all: \
    --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 --python-version "$version" \
    --constraint "$here/constraints.txt" "$here"/dist/binidx-*-manylinux_2_17_aarch64.whl
cat > "$out/round_trip.py" <<'END'
import platform, sys
import numpy as np
import binidx, binidx._native
from binidx.native.permutations import RandomState
from binidx.tools import main

assert platform.machine() == "aarch64", platform.machine()
prefix, tokens = f"{sys.argv[1]}/data", np.arange(3000, dtype=np.uint16)
with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
    for first in range(0, 3000, 30):
        builder.add_document(tokens[first : first + 30], [30])
    builder.finalize(f"{prefix}.idx")
read = binidx.IndexedDataset(prefix)
assert (np.concatenate([read[number] for number in range(len(read))]) == tokens).all()
ours, numpys = np.arange(1000), np.arange(1000)
RandomState(1234).shuffle(ours)
np.random.RandomState(1234).shuffle(numpys)
assert (ours == numpys).all()
assert main(["verify", prefix]) == 0
print("aarch64: round trip, shuffle and verify", binidx._native.__file__)
END
PYTHONHOME="$out/root/usr" PYTHONPATH="$out/site" qemu-aarch64 -L "$out/root" "$out/root/usr/bin/python$version" \
    "$out/round_trip.py" "$out"
