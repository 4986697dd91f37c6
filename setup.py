"""Builds the CPU kernels: a plain shared library with a C interface, no Python extension module.

MindSpore loads it as a custom operator and ctypes calls it. Without a C++ compiler, or with
MINDSTREAM_NO_KERNELS=1, the package installs all the same and serves with MindSpore's operators.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

NAME = "mindstream.backends.mindspore.cpu._kernels"
SOURCES = Path("backends/mindspore/cpu/csrc")
X86 = platform.machine() in ("x86_64", "AMD64")
# Every file of an instruction set is compiled for it alone; dispatch.cc chooses at run time.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"]
AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISA_FLAGS = {
    "isa_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cc": AVX512,
    "isa_avx512bf16.cc": AVX512_BF16,
    "isa_amx.cc": [*AVX512_BF16, *AMX],
}
# It names the instructions, so that the assembler is asked too.
AMX_PROBE = """
#include <immintrin.h>
void probe() { _tile_zero(0); _tile_dpbf16ps(0, 1, 2); _tile_dpbsud(0, 1, 2); _tile_release(); }
"""
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
# GCC 12 warns of its own AVX-512 header.
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]


class BuildKernels(build_ext):
    """Compiles each source with its own flags and links without a Python module's conventions."""

    def get_ext_filename(self, fullname: str) -> str:
        """The same name for every Python version: the library does not use Python."""
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Raises CompileError or LinkError; `run` turns them into a message."""
        extra = os.environ.get("MINDSTREAM_KERNEL_FLAGS", "").split()
        macros = [("MINDSTREAM_X86", "1")] if X86 else []
        sources = [path for path in ext.sources if Path(path).name != "isa_amx.cc"]
        amx = X86 and sys.platform == "linux" and self.compiles(AMX_PROBE, AMX)
        if amx:
            sources, macros = ext.sources, [*macros, ("MINDSTREAM_AMX_BUILT", "1")]

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=macros,
                extra_postargs=FLAGS + ISA_FLAGS.get(Path(source).name, []) + extra,
                depends=ext.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, sources) for name in names]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-pthread", *extra], target_lang="c++"
        )
        if X86 and not amx:
            print("mindstream: built without AMX, which this C++ compiler or system lacks")

    def compiles(self, text: str, flags: list[str]) -> bool:
        """Whether the compiler takes this program with these flags."""
        source = Path(self.build_temp) / "probe.cc"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        try:
            self.compiler.compile([str(source)], output_dir=self.build_temp, extra_postargs=flags)
        except CompileError:
            return False
        return True

    def run(self) -> None:
        """Builds, or says what the installation does without."""
        if os.environ.get("MINDSTREAM_NO_KERNELS"):
            print("mindstream: MINDSTREAM_NO_KERNELS is set, the CPU kernels are not built")
            return
        try:
            super().run()
        except (BaseError, CompileError, LinkError, OSError) as error:
            if os.environ.get("MINDSTREAM_REQUIRE_KERNELS"):
                raise
            print(
                f"mindstream: the CPU kernels were not built ({error}). Serving on CPU falls back "
                "to MindSpore's own operators and is several times slower. Install a C++17 "
                "compiler (g++ 10 or newer, or clang++ 12) and install mindstream again.",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        """Only what was built: an absent library must not fail the installation."""
        return [path for path in super().get_outputs() if Path(path).exists()]


def sources() -> list[str]:
    """All C++ files that this machine's architecture can compile."""
    found = sorted(str(path) for path in SOURCES.glob("*.cc"))
    return [path for path in found if X86 or Path(path).name not in ISA_FLAGS]


setup(
    ext_modules=[
        Extension(
            NAME,
            sources(),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
