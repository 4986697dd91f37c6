"""The kernels' AMX instructions on a CPU without them: every one is trapped and emulated.

`amx_emulator.cc` does what Intel's manual says, so this tests the machine code, the layouts and the
configuration of the tiles, also that no instruction comes without one. It is no proof of hardware.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

ISA = "from mindstream.backends.mindspore.cpu.library import instruction_set as s; print(s())"
# Logits of batches of one tile, of tiles with and without lower rows, and of two parts of tiles.
LOGITS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest, numpy as np
from mindstream.backends.mindspore.cpu.fused_weights import FusedShape
folder, weights = Path(sys.argv[2]), sys.argv[3]
if len(sys.argv) > 4:
    conftest.load_amx_emulator(folder)
shape = FusedShape(2, 96, 3, 1, 32, 160, 77, 16, 1e-5, True)
made = conftest.Decoder(shape, weights, "bf16", False, False, 1)
ids = [int(i) for i in np.random.default_rng(2).integers(0, 77, 350)]
batches = [[(ids[:rows], 0, list(range(22)))] for rows in (1, 2, 4, 5, 16, 17, 33, 70, 350)]
np.savez(folder / "logits.npz", *[made.run(batch) for batch in batches])
"""


def python(isa: str, *arguments: str, **environment: str) -> str:
    """What Python printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "MINDSTREAM_CPU_ISA": isa, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def emulation() -> None:
    """Skips where the emulator cannot run."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    if python("amx", "-c", ISA).strip() == "amx":
        pytest.skip("this CPU has AMX: the other tests ran on it")
    if python("avx512bf16", "-c", ISA).strip() != "avx512bf16":
        pytest.skip("the rest of the AMX kernels needs AVX-512 with bf16 and VNNI")


def test_amx_is_never_used_on_a_cpu_that_lacks_it() -> None:
    """The emulated set exists for tests alone: without the emulator its name is an unknown one."""
    best = python("", "-c", ISA).strip()
    assert python("amx_emulated", "-c", ISA).strip() == best
    flags = Path("/proc/cpuinfo")
    if flags.exists() and "amx_bf16" not in flags.read_text():
        assert best != "amx"
        assert python("amx", "-c", ISA).strip() == best


@pytest.mark.usefixtures("emulation")
def test_the_kernel_tests_pass_in_tiles() -> None:
    said = python(
        "amx_emulated",
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_fused.py")),
    )
    assert " passed" in said and "skipped" not in said, said


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("weights", ["int8", "f32", "bf16"])
def test_integer_tiles_have_the_bits_of_avx512(weights: str, tmp_path: Path) -> None:
    """bf16 tiles round in another order, so theirs are only close."""
    logits = []
    for isa, more in (("amx_emulated", ["emulate"]), ("avx512bf16", [])):
        python(isa, "-c", LOGITS, str(HERE), str(tmp_path), weights, *more)
        with np.load(tmp_path / "logits.npz") as file:
            logits.append([file[name] for name in file.files])
    for tiles, vectors in zip(*logits, strict=True):
        if weights == "bf16":
            np.testing.assert_allclose(tiles, vectors, atol=0.06)
            assert (tiles != vectors).any()  # so tiles were used
        else:
            np.testing.assert_array_equal(tiles, vectors)


@pytest.mark.timeout(900)
def test_a_compiler_without_amx_builds_the_other_kernels(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    old = tmp_path / "g++"
    refuse = "echo \"g++: error: unrecognized command-line option '$a'\" >&2; exit 1"
    old.write_text(
        f'#!/bin/sh\nfor a; do case $a in -mamx*) {refuse};; esac; done\nexec g++ "$@"\n'
    )
    old.chmod(0o755)
    said = python(
        "",
        *("setup.py", "-q", "build_ext", "--build-temp", str(tmp_path / "objects")),
        *("--build-lib", str(tmp_path / "library")),
        CC=str(old),
        CXX=str(old),
        MINDSTREAM_REQUIRE_KERNELS="1",
        MINDSTREAM_KERNEL_FLAGS="-O0 -DMINDSTREAM_FEW_TILES",
    )
    assert "built without AMX" in said
    (library,) = (tmp_path / "library").rglob("_kernels.so")
    assert python("portable", "-c", ISA, MINDSTREAM_KERNELS=str(library)).strip() == "portable"
    assert python("amx", "-c", ISA, MINDSTREAM_KERNELS=str(library)).strip() != "amx"
