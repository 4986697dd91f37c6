#!/bin/sh
# Builds the kernels for aarch64, with warnings as errors, and runs their tests under QEMU; on x86, as
# any user. It tells nothing about speed, and nothing about the weaker memory order of real cores.
# needs: apt-get install g++-aarch64-linux-gnu qemu-user mmdebstrap
# usage: tests/kernels/aarch64.sh [a directory for what is downloaded and built, 200 MB]
set -eu
cd "$(dirname "$0")/../.."
repository=$PWD
mkdir -p "${1:-build/aarch64}"
cd "${1:-build/aarch64}"
python=$repository/.venv/bin/python
root=$PWD/root site=$PWD/site out=$PWD/out

# Debian 12 for its Python 3.11: NumPy 1 has no wheels for the Python of Debian 13.
[ -e "$root/usr/bin/python3" ] || {
    rm -rf "$root"
    mode=$([ "$(id -u)" = 0 ] && echo root || echo chrootless)  # nothing of it is run meanwhile
    mmdebstrap --mode="$mode" --architectures=arm64 --variant=extract \
        --include=python3,libstdc++6 bookworm "$root"
}
[ -e "$site/complete" ] || {
    rm -rf "$site"
    "$python" -m pip install -q --target "$site" --python-version 3.11 --only-binary=:all: \
        --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
        -c "$repository/requirements/constraints.txt" \
        numpy PyYAML msgspec pytest pytest-timeout hypothesis
    touch "$site/complete"
}

cd "$repository"
rm -rf "$out"
export CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++
export LDSHARED="$CXX -shared" LDCXXSHARED="$CXX -shared"
# setup.py's own list of sources and flags, for the machine it is told to be on.
MINDSTREAM_REQUIRE_KERNELS=1 MINDSTREAM_KERNEL_FLAGS=-Werror "$python" - "$out" <<'END'
import platform, runpy, sys

platform.machine = lambda: "aarch64"
out = sys.argv[1]
sys.argv = ["setup.py", "-q", "build_ext", "--build-temp", f"{out}/objects", "--build-lib", out]
runpy.run_path("setup.py", run_name="__main__")
END

# .typecheck: the packages under the name `mindstream`, as an installation would have them.
exec qemu-aarch64 -L "$root" -E PYTHONPATH="$site:$repository/.typecheck" \
    -E PYTHONDONTWRITEBYTECODE=1 -E MINDSTREAM_CPU_ISA=portable \
    -E MINDSTREAM_KERNELS="$out/mindstream/backends/mindspore/cpu/_kernels.so" \
    "$root/usr/bin/python3" -m pytest -q -p no:cacheprovider \
    tests/kernels/test_fused.py tests/kernels/test_paged_attention.py
