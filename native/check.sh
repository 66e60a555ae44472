#!/bin/sh
# The C core's own tests under AddressSanitizer and UBSan: native/check.sh  (CC=clang native/check.sh for another compiler)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
sources=$(ls "$here"/*.c | grep -v /fuzz_)
"${CC:-cc}" -std=c11 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Wpedantic -Werror \
    -fsanitize=address,undefined -fno-sanitize-recover=all $sources -o "$out/test_native"
"$out/test_native"
echo "native: ok"
