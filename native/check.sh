#!/bin/sh
# The C core's own tests under AddressSanitizer and UBSan, then its fuzz targets on the same few thousand random inputs
# each: native/check.sh [inputs]  (CC=clang for another compiler; fuzz_main.c says how to fuzz in earnest)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
build="${CC:-cc} -std=c11 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Wpedantic -Werror
    -fsanitize=address,undefined -fno-sanitize-recover=all"
inputs=${1:-2000}
core=$(cd "$here" && ls *.c | grep -v -e ^fuzz_ -e ^test_ | sed "s|^|$here/|")
(cd "$out" && echo "$core" | xargs -n 1 -P 2 $build -c)
$build "$here"/test_*.c "$out"/*.o -o "$out/test_native"
"$out/test_native"
for target in $(ls "$here"/fuzz_*.c | grep -v '/fuzz_main.c$'); do
    $build "$target" "$here/fuzz_main.c" "$out"/*.o -o "$out/fuzz"
    "$out/fuzz" "$inputs"
done
echo "native: ok"
