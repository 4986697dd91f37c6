"""The kernel tests once more, on kernels built with AddressSanitizer and UBSan.

For every instruction set this CPU has. The build has fewer row tiles than the real one: the others
are the same templates, and would take the compiler ten minutes. And the thread pool by itself with
ThreadSanitizer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "backends" / "mindspore" / "cpu" / "csrc"
INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512bf16", "amx", "amx_emulated"]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"

# One call of PagedAttention, one token. Given an argument, `v` is half of what its shape says.
ONE_CALL = """
import ctypes, sys
import numpy as np
from mindstream.backends.mindspore.cpu.library import instruction_set, load_library

print(instruction_set(), flush=True)
row, cache = np.ones((1, 64), np.float32), np.ones((1, 16, 1, 64), np.float32)
zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
arrays = [row, row, row, cache, cache.copy(), zero, zero.reshape(1, 1), one, one, row.copy()]
shapes = [(ctypes.c_int64 * a.ndim)(*a.shape) for a in arrays]
if sys.argv[1:]:
    arrays[2] = np.ones((1, 32), np.float32)
n = len(arrays)
data = (ctypes.c_void_p * n)(*[a.ctypes.data for a in arrays])
ndims = (ctypes.c_int * n)(*[a.ndim for a in arrays])
table = (ctypes.c_void_p * n)(*[ctypes.addressof(s) for s in shapes])
sys.exit(load_library().PagedAttention(n, data, ndims, table, None, None, None))
"""


def runtime(name: str) -> str:
    """The compiler's shared library for a sanitizer; skips where there is none."""
    if not (shutil.which("gcc") and shutil.which("g++")):
        pytest.skip("there is no g++")
    command = ["gcc", f"-print-file-name={name}.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"this compiler comes without {name}")
    return path


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that is to use the kernels with sanitizers."""
    preload = f"{runtime('libasan')} {runtime('libubsan')}"
    out = tmp_path_factory.mktemp("sanitized")
    build = {
        "CC": "gcc",
        "CXX": "g++",
        "MINDSTREAM_REQUIRE_KERNELS": "1",
        "MINDSTREAM_KERNEL_FLAGS": f"{SANITIZE} -g1 -O1 -DMINDSTREAM_FEW_TILES",
    }
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(
        [*command, "--build-temp", str(out / "objects"), "--build-lib", str(out)],
        cwd=ROOT,
        env={**os.environ, **build},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (library,) = out.rglob("_kernels.so")
    # A file of its own for the report: pytest's would be lost when the process is ended.
    report = f"log_path={out / 'report'}"
    return {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": f"detect_leaks=0:{report}",  # Python itself does not free all it takes
        "UBSAN_OPTIONS": f"print_stacktrace=1:{report}",
        "MINDSTREAM_KERNELS": str(library),
    }


def fixed_addresses() -> list[str]:
    """Before a command: some systems' random addresses lie where sanitizers keep their notes."""
    prefix = ["setarch", "-R"]
    found = shutil.which("setarch") and subprocess.run([*prefix, "true"]).returncode == 0
    return prefix if found else []


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit status, and what Python and the sanitizers said."""
    done = subprocess.run(
        [*fixed_addresses(), sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = done.stdout
    for report in Path(environment["MINDSTREAM_KERNELS"]).parents[4].glob("report.*"):
        said += report.read_text()
        report.unlink()
    return done.returncode, said


@pytest.fixture(params=INSTRUCTION_SETS)
def chosen(
    request: pytest.FixtureRequest,
    sanitized: dict[str, str],
    build_amx_emulator: Callable[[Path], Path],
    tmp_path: Path,
) -> dict[str, str]:
    """`sanitized` for one instruction set; skips one that this CPU lacks."""
    environment = {**sanitized, "MINDSTREAM_CPU_ISA": request.param}
    if request.param == "amx_emulated":
        environment["LD_PRELOAD"] += f" {build_amx_emulator(tmp_path)}"
    status, said = run(environment, "-c", ONE_CALL)
    assert status == 0, said
    if said.split() != [request.param]:
        pytest.skip(f"this CPU has no {request.param}; the kernels chose {said.strip()}")
    return environment


@pytest.mark.timeout(1800)
def test_the_kernel_tests_pass_under_sanitizers(chosen: dict[str, str]) -> None:
    tests = [str(HERE / "test_fused.py"), str(HERE / "test_paged_attention.py")]
    status, said = run(chosen, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert status == 0, said
    assert " passed" in said and "skipped" not in said, said
    assert "Sanitizer" not in said and "runtime error" not in said, said


@pytest.mark.timeout(1800)
def test_a_read_behind_an_input_is_found(chosen: dict[str, str]) -> None:
    """So the sanitizers do watch the kernels."""
    status, said = run(chosen, "-c", ONE_CALL, "short")
    assert status != 0
    assert "AddressSanitizer: heap-buffer-overflow" in said
    assert "READ of size" in said and "csrc/attention.h" in said, said


@pytest.mark.parametrize("weakened", [False, True], ids=["as it is", "without memory order"])
def test_the_thread_pool_has_no_data_race(tmp_path: Path, weakened: bool) -> None:
    """By the rules of C++: on x86 a missing order would seldom show, on aarch64 it would."""
    runtime("libtsan")
    source = (KERNELS / "threads.cc").read_text()
    if weakened:
        source = re.sub(r"memory_order_\w+", "memory_order_relaxed", source)
    (tmp_path / "threads.cc").write_text(source)
    command = ["g++", "-std=c++17", "-fsanitize=thread", "-g1", "-O1", "-pthread", f"-I{KERNELS}"]
    files = [str(HERE / "thread_pool.cc"), str(tmp_path / "threads.cc")]
    subprocess.run([*command, *files, "-o", str(tmp_path / "pool")], check=True)
    done = subprocess.run(
        [*fixed_addresses(), str(tmp_path / "pool")],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if "unexpected memory mapping" in done.stdout:
        pytest.skip("this system's random addresses leave ThreadSanitizer no room")
    assert ("ThreadSanitizer: data race" in done.stdout) is weakened, done.stdout
    assert (done.returncode == 0) is not weakened, done.stdout
