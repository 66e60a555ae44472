#!/bin/sh
# The C core of this machine and of arm64, as the wheels build them: its tests under qemu, and one digest of all that the
# fuzz targets make of the same inputs on both: native/check_arm.sh [inputs]
# apt install qemu-user, and gcc-aarch64-linux-gnu libc6-dev-arm64-cross, or name another compiler in CC_ARM
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
inputs=${1:-2000}
core=$(cd "$here" && ls *.c | grep -v -e ^fuzz_ -e ^test_ | sed "s|^|$here/|")

build() { # compiler, what runs its programs, folder
    mkdir "$3"
    flags="-std=c11 -O3 -ffp-contract=off -static"
    (cd "$3" && $1 $flags -Wall -Wextra -Werror -c $core)
    $1 $flags "$here"/test_*.c "$3"/*.o -o "$3/test_native"
    $2 "$3/test_native"
    for target in $(cd "$here" && ls fuzz_*.c | grep -v fuzz_main.c); do
        $1 $flags "$here/$target" "$here/fuzz_main.c" "$3"/*.o -o "$3/fuzz"
        echo "$target $($2 "$3/fuzz" "$inputs")"
    done
}

build "${CC:-cc}" "" "$out/here" | tee "$out/here.txt"
build "${CC_ARM:-aarch64-linux-gnu-gcc}" "qemu-aarch64" "$out/arm" > "$out/arm.txt"
diff "$out/here.txt" "$out/arm.txt"
echo "arm: the same, $inputs inputs each"
