#!/bin/sh
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, with fewer row tiles so that
# it takes a minute, and runs the kernel tests on them for every instruction set this CPU has.
# usage: tests/kernels/sanitize.sh [python]
set -e
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
MINDSTREAM_REQUIRE_KERNELS=1 MINDSTREAM_KERNEL_FLAGS="$flags -DMINDSTREAM_FEW_TILES" \
    "$python" setup.py -q build_ext --build-temp "$out/objects" --build-lib "$out" >"$out/log" 2>&1 ||
    { cat "$out/log"; exit 1; }
libraries="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
for isa in portable avx2 avx512 avx512bf16; do
    echo "kernel tests under ASan and UBSan: $isa"
    # Python itself does not free all it takes.
    LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0 MINDSTREAM_CPU_ISA=$isa \
        MINDSTREAM_KERNELS="$out/mindstream/backends/mindspore/cpu/_kernels.so" \
        "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_fused.py \
        tests/kernels/test_paged_attention.py
done
